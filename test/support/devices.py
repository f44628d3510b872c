"""Eight virtual CPU devices, as environment variables that torch_xla reads when it is imported."""

import os

VARIABLES = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "3"}


def set_up() -> None:
    """Set the variables in this process, where they are not set. Call this before torch_xla is imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
