"""Objects of a state dict: to bytes, and safely back.

The bytes are those of ``torch.save``, so that stock DCP reads them. Loading runs no code that the file names. Types
that only hold data are rebuilt; the caller, not the file, decides which other types may be loaded.
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
from torch_xla_ckpt.serialization.restricted import AllowedType as AllowedType
from torch_xla_ckpt.serialization.restricted import load, not_harmless
from torch_xla_ckpt.serialization.table import Refused

MAX_DEPTH = 400
"""Levels of containers that a state dict, and each object in it, may have and can certainly be saved.

Python's pickle recurses twice for each level of lists and dicts. Python allows 1,000 nested calls by default."""


class Item(io.BytesIO):
    """The bytes of one object.

    Attributes:
        needs: qualified names of types that a load admits only with ``allow_types=`` or ``trust_pickle=True``.
    """

    def __init__(self, data: bytes = b"", needs: frozenset[str] = frozenset()):
        super().__init__(data)
        self.needs = needs


class Encoded:
    """An object of a state dict that was encoded early, so that the program may change the original.

    Args:
        data: the object's bytes.
        check: called when a save plans to write the object. It raises an error if the save must not.
    """

    def __init__(self, data: io.BytesIO, check: Callable[[], None]):
        self._data = data.getvalue()
        self._needs = data.needs if isinstance(data, Item) else frozenset()
        self.check = check

    def open(self) -> Item:
        """Return the bytes, to be read from the beginning."""
        return Item(self._data, self._needs)

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "cannot pickle an object that SPMDStager has staged: only SPMDSavePlanner can save it. Pass "
            "planner=SPMDSavePlanner()"
        )


def encode(key: str, value: Any, to_host: Callable[[torch.Tensor], torch.Tensor]) -> Item:
    """Return the bytes of an object, as ``torch.save`` writes them.

    Args:
        key: the object's key, for errors.
        value: the object.
        to_host: returns a host copy of a tensor. Tensors on XLA devices inside of the object are stored as host
            tensors, so that the object can be loaded on other hosts.

    Raises:
        CheckpointError: the object cannot be pickled, or has too many levels of containers.
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
            if type(obj) is collections.deque:  # a single call, because weights_only=True appends to lists only
                return collections.deque, (list(obj), obj.maxlen)
            return NotImplemented

    def save() -> None:
        item.seek(0)
        item.truncate()
        torch.save(value, item, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=Pickler))

    try:
        try:
            save()
        except RecursionError:  # the caller has used up some of the calls that Python allows
            _in_a_thread(save)
    except RecursionError as error:
        raise CheckpointError(
            f"cannot save {key!r}: the containers in this {type(value).__name__} are nested too deep to be pickled. "
            f"{MAX_DEPTH} levels are always possible. Flatten the object, or leave it out of the state dict"
        ) from error
    except CheckpointError as error:  # of a tensor inside the object
        raise CheckpointError(f"cannot save {key!r}: {error}") from error
    except Exception as error:  # the object's own methods may raise anything
        known = isinstance(error, (pickle.PicklingError, TypeError, AttributeError)) and str(error)
        why = str(error) if known else f"{type(error).__name__}: {error}".rstrip(": ")
        raise CheckpointError(
            f"cannot save {key!r}: a {type(value).__name__} could not be pickled ({why}). Put plain data into the "
            "state dict instead, or leave the object out"
        ) from error
    item.seek(0)
    return item


def _in_a_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def decode(key: str, data: io.BytesIO, allow_types: Sequence[AllowedType], trust_pickle: bool) -> Any:
    """Return the object in an item.

    Args:
        key: the object's key, for errors.
        data: the item's bytes, as ``torch.save`` wrote them.
        allow_types: types to admit in addition to the harmless ones.
        trust_pickle: load any object, and run the code that the file names.

    Raises:
        UnsafeObjectError: the item needs a type that is not admitted.
        CheckpointError: the bytes are no complete archive of ``torch.save``.
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
            f"cannot read {key!r}: its bytes are no complete torch.save archive, or its type cannot be rebuilt with "
            f"the installed packages ({type(error).__name__}: {error}). Restore from another checkpoint, or leave the "
            "key out of the target"
        ) from error


def _refusal(key: str, error: Refused) -> UnsafeObjectError:
    trust = "If you trust the writer of the checkpoint, pass SPMDLoadPlanner(trust_pickle=True)"
    if error.names:
        allow = ", ".join(name.rpartition(".")[2] for name in error.names)
        text = (
            f"it needs {', '.join(error.names)}, which could run code. If you know the type, pass "
            f"SPMDLoadPlanner(allow_types=[{allow}]). {trust}"
        )
    else:
        text = f"{error}, which harmless objects never need. Restore from another checkpoint. {trust}"
    return UnsafeObjectError(f"refused to load {key!r}: {text}", key=key, types=error.names)
