"""Moving a module's tensors to the devices: host values are uploaded shard by shard, and tensors on the meta device
get the values that their modules compute, one module at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from torch_xla_ckpt.device import access_of, alias_of, lazy, make
from torch_xla_ckpt.errors import CheckpointError, Mismatch, MismatchError
from torch_xla_ckpt.planner import copy_into
from torch_xla_ckpt.restoring.initialize import HeldTensor, require_values, values_by_module
from torch_xla_ckpt.restoring.materialize import exchange, held_tensors, require_no_weak_references
from torch_xla_ckpt.restoring.modules import set_what_is_made_anew

logger = logging.getLogger(__name__)

SpecOf = Callable[[HeldTensor], tuple[Any, tuple[Any, ...]] | None]
"""Returns the mesh and the partition spec of a tensor; None leaves it whole on each device."""


class Placement:
    """The move of a module's tensors to the devices. Parameters stay the same objects.

    Tensors that are on devices already stay there, and keep their sharding if they have one.

    Args:
        model: the module.
        spec_of: returns the mesh and the partition spec of a tensor.
        prefix: the module's name in the model, with a dot at its end. Default: the module is the model.

    Raises:
        CheckpointError: a spec does not fit, or a tensor cannot be moved. Nothing was changed.
    """

    def __init__(self, model: torch.nn.Module, spec_of: SpecOf, prefix: str = ""):
        held = [
            one._replace(key=prefix + one.key, name=prefix + one.name)
            for one in {id(one.tensor): one for one in reversed(list(held_tensors("", model)))}.values()
        ][::-1]
        self._model = model
        self._specs = {id(one.tensor): spec_of(one) for one in held}
        for one in held:
            self._require_spec(one)
        self._to_move = [one for one in held if one.tensor.device.type in ("cpu", "meta")]
        self._to_mark = [one for one in held if one.tensor.device.type == "xla" and self._specs[id(one.tensor)]]
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, and its content before
        require_no_weak_references(self._to_move)

    def run(self, loaded_later: Collection[str] = (), *, can_undo: bool = False) -> None:
        """Move and shard all tensors.

        Args:
            loaded_later: names of tensors that a checkpoint will fill. They get zeros.
            can_undo: whether to keep old values, so that ``undo`` can put them back. Default: False.

        Raises:
            CheckpointError: a module does not compute a value for its tensor on the meta device. Nothing was changed.
        """
        try:
            self._run(loaded_later)
        except BaseException:
            self.undo()
            raise
        if not can_undo:
            self._exchanged.clear()

    def undo(self) -> None:
        """Put all tensors that were moved back where they were."""
        while self._exchanged:
            tensor, before = self._exchanged.pop()
            torch.utils.swap_tensors(tensor, before)

    def _run(self, loaded_later: Collection[str]) -> None:
        to_initialize = []
        for one in self._to_move:
            spec = self._specs[id(one.tensor)]
            if one.persistent and one.name in loaded_later:
                new = make(one.tensor.shape, one.tensor.dtype, spec or lazy.xla.root_device())
                self._exchange(one, new)
            elif one.tensor.device.type == "meta":
                to_initialize.append(one)
            else:
                self._exchange(one, lazy.xla.upload(one.tensor, spec))
        self._initialize(to_initialize)
        for one in self._to_mark:
            spec = self._specs[id(one.tensor)]
            if spec is not None and not lazy.xla.is_cut(one.tensor):
                lazy.xla.mark(one.tensor, *spec)

    def _initialize(self, wanted: Sequence[HeldTensor]) -> None:
        by_id = {id(one.tensor): one for one in wanted}
        for values in values_by_module(self._model, wanted):
            for number, value in values.items():
                self._exchange(by_id[number], lazy.xla.upload(value, self._specs[number]))
        require_values(wanted, {id(tensor) for tensor, _ in self._exchanged})

    def _exchange(self, one: HeldTensor, new: torch.Tensor) -> None:
        try:
            self._exchanged.append((one.tensor, exchange(one.tensor, new)))
        except RuntimeError as error:
            raise CheckpointError(
                f"{one.name!r} cannot be moved to the devices: something else holds the tensor, such as the graph of a "
                "loss. Nothing was changed. Delete results of forward passes in host memory, or compute them under "
                "torch.no_grad()"
            ) from error

    def _require_spec(self, one: HeldTensor) -> None:
        spec = self._specs[id(one.tensor)]
        try:
            if spec is not None:
                lazy.xla.require_spec(*spec, one.tensor.shape)
        except ValueError as error:
            raise CheckpointError(f"sharding= does not fit {one.name!r}: {error}. Nothing was changed") from error


def fill(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str) -> None:
    """Copy a state dict into a module whose tensors may be sharded. One tensor at a time is prepared in host memory.

    Args:
        model: the module; its tensors have their places.
        state: values for its tensors, as ``model.state_dict()`` names them. A value that shares a tensor's data is
            there already.
        strict: whether each key of the module must be in ``state``, and the reverse.
        source: the checkpoint, for errors.

    Raises:
        MismatchError: keys or shapes do not fit. All are named, and nothing was changed. If not ``strict``, a warning
            names the keys.
    """
    values = {_plain(key): value for key, value in state.items()}
    own = {_plain(key): value for key, value in model.state_dict().items()}
    _require_fit(values, own, strict, source)
    tensors = {_plain(held.name): held.tensor for held in held_tensors("", model)}
    loaded = {key: value for key, value in values.items() if key in tensors and isinstance(value, torch.Tensor)}
    copy_into([(tensors[key], value) for key, value in loaded.items() if value.device.type == "cpu"], access_of)
    with torch.no_grad():
        for key, value in loaded.items():
            if value.device.type != "cpu" and alias_of(value) != alias_of(tensors[key]):
                tensors[key].copy_(value)
    rest = {key: values[_plain(key)] for key in model.state_dict() if _plain(key) in values.keys() - tensors.keys()}
    set_what_is_made_anew(model, rest)


def _require_fit(values: Mapping[str, Any], own: Mapping[str, Any], strict: bool, source: str) -> None:
    shapes = [
        Mismatch(key, "shape", f"shape {tuple(own[key].shape)}", f"shape {tuple(value.shape)}")
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor) and own[key].shape != value.shape
    ]
    keys = [Mismatch(key, "missing", "a value", "nothing") for key in own.keys() - values.keys()]
    keys += [Mismatch(key, "unexpected", "nothing", "a value") for key in values.keys() - own.keys()]
    if shapes or (strict and keys):
        differences = sorted([*shapes, *(keys if strict else ())], key=lambda one: one.key)
        found = "\n  ".join(map(str, differences))
        raise MismatchError(
            f"{source} does not fit the module:\n  {found}\nNothing was loaded. Load into the module that was saved, "
            "or set strict_loading = False if keys may be missing on either side",
            differences,
        )
    if keys:
        found = "\n  ".join(map(str, sorted(keys, key=lambda one: one.key)))
        logger.warning("%s does not fit the module. All else was loaded:\n  %s", source, found)


def _plain(key: str) -> str:
    """Return a key without the names that ``torch.compile`` puts into keys."""
    return key.replace("_orig_mod.", "")
