"""A program that exports a checkpoint and is killed before one of its file operations."""

import itertools
import os
import signal

OPERATIONS = ("mkdir", "open", "pwrite", "fsync", "link", "rename", "replace", "unlink", "rmdir")


def run(source, path, nth, options):
    """Export, and be killed before operation ``nth``, counted from 1. 0: print the number of operations instead."""
    import torch_xla_ckpt as xc

    numbers = itertools.count(1)

    def counted(real):
        def operation(*args, **kwargs):
            if next(numbers) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    xc.export(source, path, **options)
    print(next(numbers) - 1)
