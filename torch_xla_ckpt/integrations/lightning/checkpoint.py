"""Lightning's checkpoint dict as a state to save, and the reverse.

On disk, the module lies under "state_dict" and the optimizers under "optimizer_0", "optimizer_1" and so on. All else
(loops, callbacks, hyperparameters) is one object under "lightning", from which tensors on devices are taken out. These
lie under "tensors", so that they are saved shard by shard.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsafeObjectError
from torch_xla_ckpt.integrations.lightning.loaders import is_own_state
from torch_xla_ckpt.serialization import Refused, restricted
from torch_xla_ckpt.state import random_state

MODEL = "state_dict"
OPTIMIZERS = "optimizer_states"
REST = "lightning"
TENSORS = "tensors"
OWN = "torch_xla_ckpt"
"""The key of what ``with_own`` adds to Lightning's checkpoint dict."""

_Path = tuple[Any, ...]
_DAMAGED = "Nothing was loaded. Load another checkpoint"


class Rest(NamedTuple):
    """What a checkpoint has beside the module and the optimizers.

    Args:
        values: Lightning's checkpoint dict, without the module and the optimizers.
        optimizers: the number of optimizers that were saved; None if only the module was saved.
        places: where in ``values`` each tensor belongs that was taken out, by the tensor's name.
    """

    values: dict[str, Any]
    optimizers: int | None
    places: Mapping[str, _Path]

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the values with all tensors in their places.

        Raises:
            CorruptCheckpointError: there is no such place, or no such tensor.
        """
        values: Any = self.values
        try:
            for name, path in self.places.items():
                values = _inserted(values, path, tensors[name])
        except (LookupError, TypeError) as error:
            raise CorruptCheckpointError(f"the checkpoint has no place for {name!r} ({error}). {_DAMAGED}") from error
        return dict(values)


def optimizer_key(number: int) -> str:
    """Return the key of an optimizer in a checkpoint."""
    return f"optimizer_{number}"


def with_own(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint dict of Lightning with all that resuming needs and stock Lightning does not know.

    This is the state of the random generators, and of loaders without a state of their own.
    """
    own: dict[str, Any] = {"random_state": random_state()}
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = fit_loop.get("combined_loader", [])
    if any(is_own_state(state) for state in states):
        own["loaders"] = states
        fit_loop["combined_loader"] = [state for state in states if not is_own_state(state)]
    return {**checkpoint, OWN: own}


def take_own(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Give the loaders' states back to Lightning, and return the state of the random generators, if there is one."""
    own = checkpoint.pop(OWN, {})
    if "loaders" in own:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loaders"]
    return own.get("random_state")  # type: ignore[no-any-return]


def state_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state to save for a checkpoint dict of Lightning.

    Raises:
        CheckpointError: a value cannot be pickled.
    """
    rest = dict(checkpoint)
    state: dict[str, Any] = {MODEL: _unwrapped(rest.pop(MODEL))}
    optimizers = rest.pop(OPTIMIZERS, None)
    for number, optimizer in enumerate(optimizers or ()):
        state[optimizer_key(number)] = optimizer
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, _Path] = {}
    values = _without_tensors(rest, (), tensors, places)
    file = io.BytesIO()
    try:
        torch.save(
            {"values": values, "optimizers": None if optimizers is None else len(optimizers), "places": places}, file
        )
    except Exception as error:
        raise CheckpointError(
            f"the state of callbacks, loops or hyperparameters cannot be pickled ({type(error).__name__}: {error}). "
            "Nothing was saved. Keep such objects out of state_dict() and save_hyperparameters()"
        ) from error
    state[REST] = file.getvalue()
    return {**state, TENSORS: tensors} if tensors else state


def read_rest(data: bytes, source: str, *, trust_pickle: bool) -> Rest:
    """Return what ``state_of`` stored under ``REST``.

    Args:
        data: the stored bytes.
        source: the checkpoint, for errors.
        trust_pickle: whether to run code that the bytes name.

    Raises:
        UnsafeObjectError: the bytes name types that are not harmless.
        CorruptCheckpointError: the bytes hold something else.
    """
    stored = read_pickle(data, source, trust_pickle=trust_pickle)
    match stored:
        case {"values": dict(values), "optimizers": int() | None as optimizers, "places": dict(places)}:
            return Rest(values, optimizers, places)
        case _:
            raise CorruptCheckpointError(f"{source}: the object {REST!r} is not what SPMDStrategy saves. {_DAMAGED}")


def read_pickle(data: bytes, source: str, *, trust_pickle: bool) -> Any:
    """Return the value in an archive of ``torch.save``.

    Raises:
        UnsafeObjectError: the archive names types that are not harmless.
        CorruptCheckpointError: the bytes are no archive.
    """
    try:
        file = io.BytesIO(data)
        return torch.load(file, map_location="cpu", weights_only=False) if trust_pickle else restricted.load(file)
    except Refused as error:
        raise UnsafeObjectError(
            f"{source}: the state of callbacks, loops or hyperparameters needs types that could run code ({error}). "
            "Nothing was loaded. Allow them with torch.serialization.add_safe_globals([...]), or, if you trust the "
            "checkpoint, pass weights_only=False",
            key=REST,
        ) from error
    except Exception as error:
        raise CorruptCheckpointError(
            f"{source}: the state of callbacks, loops and hyperparameters cannot be read ({type(error).__name__}: "
            f"{error}). {_DAMAGED}"
        ) from error


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state without the names that ``torch.compile`` puts into keys."""
    return {key.replace("_orig_mod.", ""): value for key, value in state.items()}


def _without_tensors(value: Any, path: _Path, tensors: dict[str, torch.Tensor], places: dict[str, _Path]) -> Any:
    """Return a value with None for each tensor on a device, and note the tensors."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        name = ".".join(map(str, path))
        while name in tensors:
            name += "_"
        tensors[name], places[name] = value.detach(), path
        return None
    for key in _keys(value):
        before = value[key]
        after = _without_tensors(before, (*path, key), tensors, places)
        if after is not before:
            value = _replaced(value, key, after)
    return value


def _inserted(value: Any, path: _Path, tensor: torch.Tensor) -> Any:
    """Return a value with a tensor at a path."""
    return _replaced(value, path[0], _inserted(value[path[0]], path[1:], tensor)) if path else tensor


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, (list, tuple)) else []


def _replaced(value: Any, key: Any, new: Any) -> Any:
    """Return a copy of a container with another value under a key."""
    if isinstance(value, tuple):
        items = [*value[:key], new, *value[key + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    value = copy(value)
    value[key] = new
    return value
