"""The stager of ``xc.async_save`` calls that pass none: one for each process, made at the first call."""

from __future__ import annotations

import threading

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging.stager import SPMDStager

_lock = threading.Lock()
_stager: SPMDStager | None = None


@forks.in_child
def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


def default_stager() -> SPMDStager:
    """Return the process's own stager; the first call makes it, with the options of ``SPMDStager()``.

    It is closed when the program exits, after its saves have ended. A forked child gets another one.
    """
    global _stager
    with _lock:
        if _stager is None or not _stager.is_here:
            _stager = SPMDStager()
        return _stager
