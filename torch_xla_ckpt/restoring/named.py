"""Values that a restore is given by name: those that it cannot fill in place are refused."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Collection, MutableMapping

import torch
from torch.distributed.checkpoint.stateful import Stateful

_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, enum.Enum)


def require_restorable(name: str, value: object, *, call: str, remedy: str, options: Collection[str] = ()) -> None:
    """Refuse a value that was passed by name and that a restore cannot fill in place.

    Tensors, dicts, lists of these, and objects with ``state_dict()`` and ``load_state_dict()`` can be filled. Python
    cannot hand back anything else to the caller of a function: the saved value would be read and lost.

    Args:
        name: the keyword argument.
        value: the argument's value.
        call: the function that was called, for the error: "restore_latest".
        remedy: the right call, for the error: "state = {'step': 0}; manager.restore_latest(state)".
        options: names of the function's options, to recognise one that is misspelt.

    Raises:
        TypeError: the value cannot be filled. The error names the key and the right call.
    """
    if _can_be_filled(value):
        return
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
    if close:
        raise TypeError(
            f"{call}() has no option {name!r}. Did you mean {close[0]}=? Nothing was changed. As part of the state, "
            f"{name!r} cannot be restored either: {_reason(value)}"
        )
    raise TypeError(f"{call}() cannot restore {name!r}: {_reason(value)}. Nothing was changed. Use: {remedy}")


def _can_be_filled(value: object) -> bool:
    if isinstance(value, type):
        return False
    if isinstance(value, (torch.Tensor, MutableMapping, Stateful)):
        return True
    return isinstance(value, list) and any(_can_be_filled(one) for one in value)


def _reason(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, list):
        return "nothing can be restored into a list without tensors or dicts, and its saved value would be lost"
    immutable = "an immutable value" if value is None or isinstance(value, _IMMUTABLE) else "this value in place"
    return f"nothing can be restored into {immutable} (type {kind}), and its saved value would be lost"
