"""What one process knows of preemption: the machine is about to be taken away."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.manager.sigterm import SigtermListener

logger = logging.getLogger(__name__)


class Preemption:
    """Learns of preemption from torch_xla's preemption sync on TPUs, and from SIGTERM elsewhere.

    Args:
        listens: False to ignore preemption and leave SIGTERM alone.
    """

    def __init__(self, listens: bool):
        self._sigterm = SigtermListener()
        self._notice = _torch_xla_notice() if listens else None
        self._is_noticed = False
        if listens and self._notice is None:
            self._sigterm.install()

    def is_signalled(self) -> bool:
        """Return whether this process has received SIGTERM."""
        return self._sigterm.was_received()

    def is_noticed(self, step: int) -> bool:
        """Return whether torch_xla's preemption sync announces preemption; the same answer on all hosts."""
        if self._notice is not None:
            self._is_noticed = self._is_noticed or self._notice(step)
        return self._is_noticed

    def stop_listening(self) -> None:
        """Put back the SIGTERM handler that was installed before."""
        self._sigterm.restore()


def _torch_xla_notice() -> Callable[[int], bool] | None:
    """Return torch_xla's preemption sync; None where there is none or it does not work."""
    if "torch_xla" not in sys.modules:
        return None
    try:
        return lazy.xla.preemption_notice()
    except Exception as error:  # a manager must not fail because of this
        logger.warning("torch_xla's preemption sync does not work here, listening to SIGTERM instead: %s", error)
        return None
