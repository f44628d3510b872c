"""All XLA devices of a program, as one accelerator of Lightning."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from torch_xla_ckpt.device import lazy


class SPMDAccelerator(Accelerator):
    """All XLA devices of a program: TPUs, or virtual devices on a CPU. SPMD makes them one device to the program."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: the runtime has set up the devices."""

    def teardown(self) -> None:
        """Do nothing: tensors stay on the devices."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return nothing: the runtime reports no memory under SPMD."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of devices.

        Raises:
            MisconfigurationException: ``Trainer(devices=...)`` asks for some of the devices only.
        """
        count = SPMDAccelerator.auto_device_count()
        if devices not in (count, str(count), "auto", -1, "-1"):
            raise MisconfigurationException(
                f"Trainer(devices={devices!r}) does not fit SPMDStrategy, which uses all {count} devices of the "
                "program. Leave devices= out, and choose the mesh with SPMDStrategy(mesh=...)"
            )
        return count

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the one device that stands for all."""
        return [lazy.xla.root_device()]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices of all processes."""
        lazy.xla.use_spmd()
        return lazy.xla.device_count()

    @staticmethod
    def is_available() -> bool:
        """Return whether torch_xla is installed."""
        return importlib.util.find_spec("torch_xla") is not None

    @staticmethod
    def name() -> str:
        """Return the accelerator's name."""
        return "xla_spmd"
