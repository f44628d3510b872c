"""Eight virtual CPU devices, as environment variables that torch and torch_xla read when they are imported."""

import os

VARIABLES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Several tests run at a time. OpenMP's threads would wait for work in loops that take the other tests' processors.
    "OMP_NUM_THREADS": "1",
    # LLVM would optimise machine code that runs a few times, which takes most of the tests' time. XLA's own passes run
    # as ever. (Without its fusion emitters, compiling is quicker still, but copies change the bits of bfloat16 NaNs.)
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def set_up() -> None:
    """Set the variables in this process, where they are not set. Call this before torch_xla is imported."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
