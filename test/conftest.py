"""Eight virtual CPU devices, set up before torch_xla is imported."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from hypothesis import HealthCheck, settings

# No deadline: the first example of a property pays for compiling. Derandomised: CI fails on what was changed.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


def pytest_sessionstart() -> None:
    """Start the devices first: torch's autograd engine counts them when backward first runs, also on the host."""
    import torch_xla.runtime as xr

    xr.use_spmd()
    xr.global_runtime_device_count()
