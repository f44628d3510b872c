"""Giving a module's tensors a place on devices, without their data ever lying whole in host memory."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt.device import lazy, make
from torch_xla_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)

Sharding = Callable[[torch.nn.Module], object] | Mapping[str, Any]
"""A function that marks a module's tensors, or partition specs by name patterns."""


class _Held(NamedTuple):
    """A parameter or buffer, and one of the places where a module has it."""

    name: str
    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor
    persistent: bool


class Plan:
    """What has to be done so that a module's tensors are where they belong. Making one changes nothing.

    Args:
        model: the module.
        sharding: specs by name patterns, or a function; see ``restore``.
        mesh: of specs that come without one.

    Raises:
        CheckpointError: a spec fits no tensor or not its shape or mesh, or a buffer without data cannot be reset.
    """

    def __init__(self, model: torch.nn.Module, sharding: Sharding | None, mesh: Any):
        if sharding is not None:
            importlib.import_module("torch_xla_ckpt.device.xla")  # says what to do where there is no torch_xla
        self._model = model
        self._mark = sharding if callable(sharding) else None
        held = list(_held(model))
        specs = _specs(held, sharding, mesh) if isinstance(sharding, Mapping) else {}
        self._on_xla = sharding is not None or importlib.util.find_spec("torch_xla") is not None
        unique = {id(one.tensor): one for one in reversed(held)}.values()  # tied tensors once
        self._to_move = [one for one in unique if self._moves(one.tensor, sharding is not None)]
        self._specs = {id(one.tensor): specs[one.name] for one in reversed(held) if one.name in specs}
        self._there = [one for one in unique if one.tensor.device.type == "xla" and id(one.tensor) in self._specs]
        self._require_specs([one for one in unique if id(one.tensor) in self._specs])
        self._resets = _resets(self._to_move)
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, and what it was before
        _require_no_weak_references(self._to_move)

    def _moves(self, tensor: torch.Tensor, sharded: bool) -> bool:
        return tensor.device.type == "meta" or (sharded and tensor.device.type == "cpu")

    def _require_specs(self, held: Sequence[_Held]) -> None:
        for one in held:
            mesh, spec = self._specs[id(one.tensor)]
            try:
                lazy.xla.require_spec(mesh, spec, one.tensor.shape)
            except ValueError as error:
                raise CheckpointError(f"sharding= does not fit {one.name!r}: {error}. Nothing was changed") from error

    def run(self, keep: Container[str]) -> None:
        """Make what has no data, move what lies in host memory, and shard both.

        Args:
            keep: names of tensors whose values will not be loaded, so that those they have must stay.
        """
        device = torch.device("xla" if self._on_xla else "cpu")
        for one in self._to_move:
            self._exchanged.append((one.tensor, _exchange(one.tensor, self._new(one, device, keep))))
        if self._resets:
            _without_random_numbers(self._resets, self._on_xla)
        for one in self._there:
            if not lazy.xla.is_cut(one.tensor):
                lazy.xla.mark(one.tensor, *self._specs[id(one.tensor)])
        if self._mark is not None and not _is_cut(self._model):
            self._mark(self._model)

    def undo(self) -> None:
        """Make the tensors that ``run`` has moved what they were before: on the meta device, or in host memory."""
        while self._exchanged:
            tensor, before = self._exchanged.pop()
            try:
                torch.utils.swap_tensors(tensor, before)
            except RuntimeError as error:
                logger.warning("a tensor of the model could not be put back after a failed restore: %s", error)

    def forget(self) -> None:
        """Let go of what the tensors were before: nothing can fail any more."""
        self._exchanged.clear()

    def _new(self, one: _Held, device: torch.device, keep: Container[str]) -> torch.Tensor:
        tensor = one.tensor
        spec = self._specs.get(id(tensor))
        if tensor.device.type == "meta" or (one.persistent and one.name not in keep):
            return make(tensor.shape, tensor.dtype, spec or device)
        moved = tensor.detach().to(device)
        if spec:
            lazy.xla.mark(moved, *spec)
        return moved


def _held(model: torch.nn.Module) -> Iterator[_Held]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield _Held(dot + name, module, name, param, True)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                persistent = name not in module._non_persistent_buffers_set
                yield _Held(dot + name, module, name, buffer, persistent)


def _specs(held: Sequence[_Held], sharding: Mapping[str, Any], mesh: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Mesh and spec by the name of the tensor.

    Raises:
        CheckpointError: a pattern fits no name, or has no mesh.
    """
    pairs: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for pattern, value in sharding.items():
        own = len(value) == 2 and hasattr(value[0], "mesh_shape")
        pairs[pattern] = (value[0], tuple(value[1])) if own else (mesh, tuple(value))
        if pairs[pattern][0] is None:
            raise CheckpointError(f"sharding= has no mesh for {pattern!r}. Pass mesh=, or a pair (mesh, spec)")
    names = [one.name for one in held]
    idle = [pattern for pattern in pairs if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        raise CheckpointError(
            f"sharding= has patterns that fit no parameter or buffer: {', '.join(map(repr, idle))}. Nothing was changed"
        )
    found = {}
    for name in names:
        fitting = [pairs[pattern] for pattern in pairs if fnmatchcase(name, pattern)]
        if fitting:
            found[name] = fitting[0]
    return found


def _resets(moved: Sequence[_Held]) -> list[Callable[[], object]]:
    """What gives buffers their values that no checkpoint has, by module.

    Raises:
        CheckpointError: a module has nothing of that kind.
    """
    resets: dict[int, Callable[[], object]] = {}
    lacking = []
    for one in moved:
        if one.persistent or one.tensor.device.type != "meta":
            continue
        reset = getattr(one.owner, "reset_buffers", None) or getattr(one.owner, "reset_parameters", None)
        if reset is None:
            lacking.append(one.name)
        else:
            resets[id(one.owner)] = reset
    if lacking:
        raise CheckpointError(
            f"these buffers are on the meta device and not saved with the model: {', '.join(lacking)}. Nothing was "
            "changed. Give their modules a reset_buffers() or reset_parameters() that computes them, or build the "
            "model with these buffers in host memory"
        )
    return list(resets.values())


def _require_no_weak_references(moved: Sequence[_Held]) -> None:
    """Show that tensors can be exchanged under the eyes of whoever holds them, which torch refuses for weak references.

    Raises:
        CheckpointError: one cannot.
    """
    held = [one.name for one in moved if weakref.getweakrefs(one.tensor)]
    if held:
        raise CheckpointError(
            f"something has weak references to {', '.join(held[:10])}, so that they cannot be given a place on "
            "devices. Nothing was changed. Restore before whatever makes these references"
        )


def _exchange(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Make a tensor what ``new`` is; it stays the same object for whoever holds it, such as an optimizer.

    Returns:
        What the tensor was before, as another object.
    """
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    torch.utils.swap_tensors(old, new)
    return new


def _without_random_numbers(resets: Sequence[Callable[[], object]], on_xla: bool) -> None:
    """Call what may draw random numbers, so that those drawn later are the same."""
    with ExitStack() as guards:
        guards.enter_context(torch.random.fork_rng(devices=[]))
        guards.enter_context(torch.no_grad())
        if on_xla:
            guards.enter_context(lazy.xla.same_seed())
        for reset in resets:
            reset()
        if on_xla:
            lazy.xla.XlaAccess().settle()  # what is still to be computed cannot be marked otherwise


def _is_cut(model: torch.nn.Module) -> bool:
    """Whether a module on devices has been sharded; if not, it may be."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(lazy.xla.is_cut(tensor) for tensor in tensors):
        return True
    for tensor in tensors:
        lazy.xla.forget_replication(tensor)
    return False
