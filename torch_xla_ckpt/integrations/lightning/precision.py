"""Lightning's mixed precision on XLA devices."""

from __future__ import annotations

from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def for_xla(plugin: Precision | None) -> Precision | None:
    """Return the plugin to use in place of the one that a Trainer chose.

    A Trainer knows mixed precision for CPUs and GPUs only.

    Raises:
        MisconfigurationException: the precision needs a gradient scaler, which XLA devices do not have.
    """
    if not isinstance(plugin, MixedPrecision) or plugin.device == "xla":
        return plugin
    if plugin.precision != "bf16-mixed":
        raise MisconfigurationException(
            f"SPMDStrategy does not support precision={plugin.precision!r}, because XLA devices have no gradient "
            'scaler. Use precision="bf16-mixed" or "bf16-true"'
        )
    return MixedPrecision("bf16-mixed", "xla")
