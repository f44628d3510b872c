"""What runs where there is no torch_xla: ``worker.py`` is a program of its own, which imports ``reference.py``.

The test imports ``reference`` too, to compare. Both run on any torch, and the worker also without this package.
"""
