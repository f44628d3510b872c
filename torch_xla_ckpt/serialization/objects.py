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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torch_xla_ckpt.errors import CheckpointError, UnsafeObjectError
from torch_xla_ckpt.serialization.machine import Refused
from torch_xla_ckpt.serialization.restricted import AllowedType as AllowedType
from torch_xla_ckpt.serialization.restricted import load, not_harmless

MAX_DEPTH = 400
"""Levels of containers in a state dict that can be saved, and in one object of it that can always be saved.

Python's pickle recurses twice for each level of lists and dicts, and Python allows 1,000 calls by default."""


class Item(io.BytesIO):
    """The bytes of an object.

    Attributes:
        needs: qualified names that a load admits only with ``allow_types=`` or ``trust_pickle=True``.
    """

    def __init__(self, data: bytes = b"", needs: frozenset[str] = frozenset()):
        super().__init__(data)
        self.needs = needs


class Encoded:
    """An object of a state dict that is bytes already, so that the program may change it.

    Args:
        data: the bytes.
        check: called when the object is planned to be saved; raises if it must not be.
    """

    def __init__(self, data: io.BytesIO, check: Callable[[], None]):
        self._data = data.getvalue()
        self._needs = data.needs if isinstance(data, Item) else frozenset()
        self.check = check

    def open(self) -> Item:
        """The bytes from their beginning."""
        return Item(self._data, self._needs)

    def __reduce__(self) -> Any:
        raise CheckpointError("what SPMDStager has staged can only be saved with SPMDSavePlanner: pass it as planner=")


def encode(key: str, value: Any, to_host: Callable[[torch.Tensor], torch.Tensor]) -> Item:
    """The bytes of ``value``, as ``torch.save`` writes them.

    Tensors on XLA devices inside it are stored as host tensors, made by ``to_host``, so that the item loads where
    there is no such device.

    Raises:
        CheckpointError: the value cannot be pickled, or contains too many levels of containers.
    """

    item = Item()

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, *args: Any, **kwargs: Any):
            super().__init__(file, *args, **kwargs)
            self.file = file

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            item.needs = not_harmless(self.file.getvalue())

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and (obj.device.type == "xla" or torch._is_functional_tensor(obj)):
                return to_host(obj).__reduce_ex__(2)
            if type(obj) is collections.deque:  # as one call, because weights_only only appends to lists
                return collections.deque, (list(obj), obj.maxlen)
            return NotImplemented

    def save() -> None:
        item.seek(0)
        item.truncate()
        torch.save(value, item, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=Pickler))

    try:
        try:
            save()
        except RecursionError:  # of the levels that Python allows, the caller has used up some
            _in_a_thread(save)
    except RecursionError as error:
        raise CheckpointError(
            f"cannot save {key!r}: the containers in this {type(value).__name__} are nested too deep to be pickled; "
            f"{MAX_DEPTH} levels are always possible. Flatten it, or leave the item out"
        ) from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot save {key!r}: a {type(value).__name__} could not be pickled ({error}). "
            "Put plain data in the state dict, or leave the item out"
        ) from error
    item.seek(0)
    return item


def _in_a_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


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
    trust = "if you trust whoever wrote the checkpoint, pass SPMDLoadPlanner(trust_pickle=True)"
    if error.names:
        allow = ", ".join(name.rpartition(".")[2] for name in error.names)
        text = (
            f"it needs {', '.join(error.names)}, which could run code. If you know the type, pass "
            f"SPMDLoadPlanner(allow_types=[{allow}]); {trust}"
        )
    else:
        text = f"{error}, which harmless values never do. Restore from another checkpoint; {trust}"
    return UnsafeObjectError(f"refused to load {key!r}: {text}", key=key, types=error.names)
