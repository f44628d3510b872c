"""Items that are not tensors: to bytes, and safely back.

The bytes are ``torch.save``'s, so stock DCP reads them. Loading runs nothing that the file names: ``serialization``
rebuilds types that only hold data. What else may be loaded is the caller's word, not the file's.
"""

from __future__ import annotations

import collections
import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla_ckpt.errors import CheckpointError, UnsafeObjectError
from torch_xla_ckpt.serialization.machine import Refused
from torch_xla_ckpt.serialization.restricted import AllowedType as AllowedType
from torch_xla_ckpt.serialization.restricted import load


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
        return load(data, allow_types)
    except Refused as error:
        raise _refusal(key, error) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot read {key!r}: its bytes are no complete torch.save archive, or its type cannot be rebuilt here "
            f"({type(error).__name__}: {error}). Restore from another checkpoint, or leave the key out of the target"
        ) from error


def _refusal(key: str, error: Refused) -> UnsafeObjectError:
    names = error.names
    what = f"it needs {', '.join(names)}, which" if names else f"{error}, which"
    allow = ", ".join(name.rpartition(".")[2] for name in names) or "..."
    return UnsafeObjectError(
        f"refused to load {key!r}: {what} could run code. If you know the type, pass "
        f"SPMDLoadPlanner(allow_types=[{allow}]); if you trust whoever wrote the checkpoint, pass "
        "SPMDLoadPlanner(trust_pickle=True)",
        key=key,
        types=names,
    )
