"""A program that exports a checkpoint and is killed at one of its file operations."""

import os
import signal


def run(source, path, operation, nth, options):
    """Export, and be killed before the ``nth`` call of ``os.<operation>``."""
    import torch_xla_ckpt as xc

    real = getattr(os, operation)
    calls = 0

    def killed(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, operation, killed)
    xc.export(source, path, **options)
