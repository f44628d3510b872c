"""Items that are not tensors: to bytes, and safely back.

The bytes are ``torch.save``'s, so stock DCP reads them. Loading runs nothing that the file names: torch's
``weights_only`` unpickler with the types below added, all of which only hold data. What else may be loaded is the
caller's word, not the file's.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import pathlib
import pickle
import threading
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt import archive, forks
from torch_xla_ckpt.errors import CheckpointError, UnsafeObjectError

# What ``torch.serialization.safe_globals`` takes: an object, or an object and the name it has in the pickle.
AllowedType = Any

_PATHS = (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath)
# What numpy's pickles call to rebuild an array, and a scalar.
_NUMPY_HELPERS: tuple[Any, ...] = (np.empty(0).__reduce__()[0], np.float32().__reduce__()[0])
_HARMLESS: tuple[AllowedType, ...] = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, uuid.UUID, uuid.SafeUUID),
    # Python 3.13 moved the path classes to another module, numpy 2 its helpers: a checkpoint outlives both.
    *((cls, f"{module}.{cls.__name__}") for cls in _PATHS for module in ("pathlib", "pathlib._local")),
    *((f, f"numpy.{core}.multiarray.{f.__name__}") for f in _NUMPY_HELPERS for core in ("core", "_core")),
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
)
# safe_globals changes a set that belongs to torch's module: one thread at a time.
_decoding = threading.Lock()
_admitting: tuple[int, AbstractContextManager[Any]] | None = None  # the thread that does, and its change


@forks.in_child
def _stop_decoding() -> None:
    """In a forked child, undo the change of a thread that is not there."""
    global _decoding, _admitting
    _decoding = threading.Lock()
    if _admitting is not None and _admitting[0] != threading.get_ident():
        _admitting[1].__exit__(None, None, None)
        _admitting = None


@contextmanager
def _admitted(types: Sequence[AllowedType]) -> Iterator[None]:
    """Let torch's ``weights_only`` unpickler load some more types."""
    global _admitting
    change = torch.serialization.safe_globals([*types])
    with _decoding:
        _admitting = threading.get_ident(), change
        try:
            with change:
                yield
        finally:
            _admitting = None


class Encoded:
    """An object of a state dict that is bytes already, so that the program may change it.

    Args:
        data: the bytes.
        check: called when the object is planned to be saved; raises if it must not be.
    """

    def __init__(self, data: io.BytesIO, check: Callable[[], None]):
        self._data = data.getvalue()
        self.check = check

    def open(self) -> io.BytesIO:
        """The bytes from their beginning."""
        return io.BytesIO(self._data)

    def __reduce__(self) -> Any:
        raise CheckpointError("what SPMDStager has staged can only be saved with SPMDSavePlanner: pass it as planner=")


def encode(key: str, value: Any, to_host: Callable[[torch.Tensor], torch.Tensor]) -> io.BytesIO:
    """The bytes of ``value``, as ``torch.save`` writes them.

    Tensors on XLA devices inside it are stored as host tensors, made by ``to_host``, so that the item loads where
    there is no such device.

    Raises:
        CheckpointError: the value cannot be pickled.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type == "xla":
                return to_host(obj).__reduce_ex__(2)
            if type(obj) is collections.deque:  # as one call, because weights_only only appends to lists
                return collections.deque, (list(obj), obj.maxlen)
            return NotImplemented

    data = io.BytesIO()
    try:
        torch.save(value, data, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=Pickler))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot save {key!r}: a {type(value).__name__} could not be pickled ({error}). "
            "Put plain data in the state dict, or leave the item out"
        ) from error
    data.seek(0)
    return data


def decode(key: str, data: io.BytesIO, allow_types: Sequence[AllowedType], trust_pickle: bool) -> Any:
    """The value of an item.

    Args:
        key: named in errors.
        data: what ``torch.save`` wrote.
        allow_types: types to admit besides the harmless ones.
        trust_pickle: load whatever the file holds, running code it names.

    Raises:
        UnsafeObjectError: it needs a type that is not admitted.
        CheckpointError: the bytes are not what ``torch.save`` writes.
    """
    try:
        if trust_pickle:
            return torch.load(data, map_location="cpu", weights_only=False)
        with _admitted([*_HARMLESS, *allow_types]):
            try:
                archive.check(data)
                return torch.load(data, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise _refusal(key, data, error) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot read {key!r}: its bytes are no complete torch.save archive, or its type cannot be rebuilt here "
            f"({type(error).__name__}: {error}). Restore from another checkpoint, or leave the key out of the target"
        ) from error


def _refusal(key: str, data: io.BytesIO, error: Exception) -> UnsafeObjectError:
    data.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception:  # the scan understands less than the unpickler; what it says is only for the message
        names = []
    what = ", ".join(names) if names else str(error).strip().splitlines()[-1]
    allow = ", ".join(name.rpartition(".")[2] for name in names) or "..."
    return UnsafeObjectError(
        f"refused to load {key!r}: it needs {what}, which could run code. If you know the type, pass "
        f"SPMDLoadPlanner(allow_types=[{allow}]); if you trust whoever wrote the checkpoint, pass "
        "SPMDLoadPlanner(trust_pickle=True)",
        key=key,
        types=names,
    )
