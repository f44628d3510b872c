"""Eight virtual CPU devices, as environment variables that torch and torch_xla read when they are imported."""

import os

VARIABLES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Several tests run at a time. OpenMP's threads would wait for work in loops that take the other tests' processors.
    "OMP_NUM_THREADS": "1",
    # Most of the tests' time would go into optimising machine code that runs a few times. What is computed, and how it
    # is partitioned over the devices, stays the same.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
}


def set_up() -> None:
    """Set the variables in this process, where they are not set. Call this before torch_xla is imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
