"""Giving the tensors of modules their place on devices, without their data ever lying whole in host memory."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from torch_xla_ckpt.device import lazy, make
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.restoring.initialize import HeldTensor, initial_values

logger = logging.getLogger(__name__)

Sharding = Callable[[torch.nn.Module], object] | Mapping[str, Any]
"""A function that marks a module's tensors, or partition specs by name patterns."""

_GLOB = frozenset("*?[")  # characters that make a pattern more than a name

_MeshAndSpec = tuple[Any, tuple[Any, ...]]


class Materialization:
    """Everything that has to be done so that the tensors of modules are where they belong.

    Making one changes nothing; ``run`` does what was planned.

    Args:
        models: the modules, by their keys in the checkpoint.
        sharding: specs by name patterns, or a function; see ``restore``.
        mesh: the mesh for specs that come without one.
        unfilled: ``id`` of each parameter and persistent buffer whose value will not be loaded. Those that have values
            keep them; those on the meta device are initialized by their modules.

    Raises:
        CheckpointError: a spec fits no tensor, or not the tensor's shape, or not the mesh; or a tensor needs a value
            that neither the checkpoint nor its module has.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        sharding: Sharding | None,
        mesh: Any,
        unfilled: Collection[int] = (),
    ):
        if sharding is not None:
            importlib.import_module("torch_xla_ckpt.device.xla")  # fails with the remedy if torch_xla is missing
        self._models = tuple(models.values())
        self._mark = sharding if callable(sharding) else None
        self._unfilled = unfilled
        self._on_xla = sharding is not None or importlib.util.find_spec("torch_xla") is not None
        held = [one for key, model in models.items() for one in held_tensors(key, model)]
        unique = list({id(one.tensor): one for one in reversed(held)}.values())[::-1]  # tied tensors once
        self._specs = _specs(held, sharding, mesh) if isinstance(sharding, Mapping) else {}
        _require_specs(unique, self._specs)
        # A model of which a part is made on devices could not run with the rest in host memory.
        is_mixed = self._on_xla and any(one.tensor.device.type == "meta" for one in unique)
        moved = ("meta", "cpu") if sharding is not None or is_mixed else ("meta",)
        self._to_move = [one for one in unique if one.tensor.device.type in moved]
        self._to_mark = [one for one in unique if one.tensor.device.type == "xla" and id(one.tensor) in self._specs]
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, and its content before
        require_no_weak_references(self._to_move)
        self._values: dict[int, torch.Tensor] = {}
        for model in models.values():
            self._values |= initial_values(model, list(self._to_initialize(model)), self._on_xla)

    def _to_initialize(self, model: torch.nn.Module) -> Iterator[HeldTensor]:
        own = {id(module) for module in model.modules()}
        for one in self._to_move:
            is_filled = one.persistent and id(one.tensor) not in self._unfilled
            if one.tensor.device.type == "meta" and not is_filled and id(one.owner) in own:
                yield one

    def run(self) -> None:
        """Make tensors for those on the meta device, move tensors from host memory, and shard both."""
        device = torch.device("xla" if self._on_xla else "cpu")
        initialized = [one.key for one in self._to_move if one.persistent and id(one.tensor) in self._values]
        if initialized:
            logger.warning(
                "these tensors had no values and get none from the checkpoint; their modules initialized them: %s",
                ", ".join(initialized),
            )
        for one in self._to_move:
            self._exchanged.append((one.tensor, exchange(one.tensor, self._new(one, device))))
        for one in self._to_mark:
            if not lazy.xla.is_cut(one.tensor):
                lazy.xla.mark(one.tensor, *self._specs[id(one.tensor)])
        if self._mark is not None:
            for model in self._models:
                if not _is_cut(model):
                    self._mark(model)

    def undo(self) -> None:
        """Put tensors that ``run`` made or moved back on the meta device or in host memory."""
        while self._exchanged:
            tensor, before = self._exchanged.pop()
            try:
                torch.utils.swap_tensors(tensor, before)
            except RuntimeError as error:
                logger.warning("a tensor of the model could not be put back after a failed restore: %s", error)

    def forget(self) -> None:
        """Drop the values that ``undo`` would need. Call this when nothing can fail any more."""
        self._exchanged.clear()
        self._values.clear()

    def _new(self, one: HeldTensor, device: torch.device) -> torch.Tensor:
        """Return a tensor on the device, sharded by its spec: with its value if it keeps one, else for loading."""
        tensor = one.tensor
        spec = self._specs.get(id(tensor))
        value = self._values.get(id(tensor), tensor)
        if value is tensor and (tensor.device.type == "meta" or (one.persistent and id(tensor) not in self._unfilled)):
            return make(tensor.shape, tensor.dtype, spec or device)
        moved = value.detach().to(device)
        if spec:
            lazy.xla.mark(moved, *spec)
        return moved


def held_tensors(key: str, model: torch.nn.Module) -> Iterator[HeldTensor]:
    """Yield every parameter and buffer of a module under each of its names.

    Args:
        key: the module's key in the checkpoint; "" if the checkpoint is nothing but this module.
        model: the module.
    """
    start = f"{key}." if key else ""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield HeldTensor(start + dot + name, dot + name, module, name, param, True)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                yield HeldTensor(start + dot + name, dot + name, module, name, buffer, persistent)


def _require_specs(unique: Sequence[HeldTensor], specs: Mapping[int, _MeshAndSpec]) -> None:
    for one in unique:
        if id(one.tensor) not in specs:
            continue
        mesh, spec = specs[id(one.tensor)]
        try:
            lazy.xla.require_spec(mesh, spec, one.tensor.shape)
        except ValueError as error:
            raise CheckpointError(f"sharding= does not fit {one.name!r}: {error}. Nothing was changed") from error


def _specs(held: Sequence[HeldTensor], sharding: Mapping[str, Any], mesh: Any) -> dict[int, _MeshAndSpec]:
    """Return mesh and partition spec by the ``id`` of the tensor. The first name of a tied tensor counts.

    Raises:
        CheckpointError: a pattern fits no name, or has no mesh.
    """
    pairs: dict[str, _MeshAndSpec] = {}
    for pattern, value in sharding.items():
        has_own_mesh = len(value) == 2 and hasattr(value[0], "mesh_shape")
        pairs[pattern] = (value[0], tuple(value[1])) if has_own_mesh else (mesh, tuple(value))
        if pairs[pattern][0] is None:
            raise CheckpointError(
                f"sharding= has no mesh for {pattern!r}. Nothing was changed. Pass mesh=, or a pair (mesh, spec)"
            )
    order = {pattern: number for number, pattern in enumerate(pairs)}
    globs = [pattern for pattern in pairs if not _GLOB.isdisjoint(pattern)]
    literal = pairs.keys() - globs  # names of single tensors, of which a large model has thousands
    fitting = {
        name: [*(pattern for pattern in globs if fnmatchcase(name, pattern)), *([name] if name in literal else ())]
        for name in dict.fromkeys(one.name for one in held)
    }
    used = {pattern for patterns in fitting.values() for pattern in patterns}
    idle = [pattern for pattern in pairs if pattern not in used]
    if idle:
        raise CheckpointError(
            f"sharding= has patterns that fit no parameter or buffer: {', '.join(map(repr, idle))}. Nothing was "
            "changed. Patterns are globs for whole names, such as '*.weight'"
        )
    found: dict[int, _MeshAndSpec] = {}
    for one in held:
        if fitting[one.name]:
            found.setdefault(id(one.tensor), pairs[min(fitting[one.name], key=order.__getitem__)])
    return found


def require_no_weak_references(moved: Sequence[HeldTensor]) -> None:
    """Check that tensors can be exchanged while optimizers hold them. torch cannot exchange a weakly referenced tensor.

    Raises:
        CheckpointError: something has weak references to a tensor. The error names it.
    """
    referenced = [one.name for one in moved if weakref.getweakrefs(one.tensor)]
    if referenced:
        raise CheckpointError(
            f"something has weak references to {', '.join(referenced[:10])}, so that these tensors cannot be moved to "
            "devices. Nothing was changed. Restore before the code runs that makes the references"
        )


def exchange(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give ``old`` the content of ``new``. It stays the same object for every holder, such as an optimizer.

    Returns:
        Another object with the content that ``old`` had before.
    """
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # attributes that the program gave the tensor
    torch.utils.swap_tensors(old, new)
    return new


def _is_cut(model: torch.nn.Module) -> bool:
    """Return whether a tensor of the module is sharded already; if none is, undo replication so that it can be."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(lazy.xla.is_cut(tensor) for tensor in tensors):
        return True
    for tensor in tensors:
        lazy.xla.forget_replication(tensor)
    return False
