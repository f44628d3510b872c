"""The only door to code that imports torch_xla.

``lazy.xla`` is the package ``device/xla/``. It is imported when the attribute is first used, so that programs without
XLA tensors need no torch_xla.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_xla_ckpt.device import xla as xla


def __getattr__(name: str) -> ModuleType:
    if name != "xla":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("torch_xla_ckpt.device.xla")
    globals()["xla"] = module  # the next use finds the module without calling this function
    return module
