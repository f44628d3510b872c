"""Values for tensors on the meta device that no checkpoint fills, computed by the modules that own them.

The modules compute in host memory, and nothing of the model changes: while a module's function runs, stand-ins take
the place of the module's tensors. A tensor that needs a value has a stand-in in host memory; all others have stand-ins
on the meta device, where every computation is free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.errors import CheckpointError


class HeldTensor(NamedTuple):
    """A parameter or buffer, with one of the modules that hold it.

    Args:
        key: the tensor's key in a checkpoint that has it.
        name: the tensor's name in the model.
        owner: the module that holds the tensor.
        attribute: the tensor's name in ``owner``.
        tensor: the parameter or buffer.
        persistent: whether the model's ``state_dict()`` has the tensor.
    """

    key: str
    name: str
    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor
    persistent: bool


def initial_values(model: torch.nn.Module, wanted: Sequence[HeldTensor], on_xla: bool) -> dict[int, torch.Tensor]:
    """Compute values for tensors that no checkpoint fills.

    A module's own ``reset_buffers()`` comes first. Then come the ways of transformers: ``rope_init_fn`` of rotary
    embeddings, and ``_init_weights(module)`` of the nearest model around the module. ``reset_parameters()``, torch's
    way, is the last. Random number generators are left as they were.

    Args:
        model: the module that holds all of the tensors.
        wanted: tensors on the meta device that need values.
        on_xla: whether the seed of XLA devices has to be kept, too.

    Returns:
        Tensors in host memory, by the ``id`` of the tensor that they are for.

    Raises:
        CheckpointError: the modules cannot compute some of the tensors. The error names them.
    """
    values: dict[int, torch.Tensor] = {}
    if wanted:
        with _same_random_numbers(on_xla):
            for one in values_by_module(model, wanted):
                values |= one
        require_values(wanted, values)
    return values


def values_by_module(model: torch.nn.Module, wanted: Sequence[HeldTensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Compute values as ``initial_values`` does, one module at a time, and with the program's random numbers.

    Yields:
        For each module that owns tensors of ``wanted``: the values that it computed, by the ``id`` of the tensor.
    """
    owned: dict[int, list[HeldTensor]] = {}
    for held in wanted:
        owned.setdefault(id(held.owner), []).append(held)
    initializers = _initializers(model)
    for number, lacking in owned.items():
        values: dict[int, torch.Tensor] = {}
        with torch.no_grad(), torch.device("cpu"):
            for compute in _ways(lacking[0].owner, initializers.get(number)):
                values |= compute(lacking)
                lacking = [held for held in lacking if id(held.tensor) not in values]
                if not lacking:
                    break
        yield values


_Way = Callable[[Sequence[HeldTensor]], Mapping[int, torch.Tensor]]


def _ways(owner: torch.nn.Module, init_weights: Callable[[torch.nn.Module], object] | None) -> Iterator[_Way]:
    """Yield the ways in which a module may compute its tensors, the most specific first."""

    if callable(reset_buffers := getattr(owner, "reset_buffers", None)):
        yield partial(_run, owner, reset_buffers, "reset_buffers")
    if callable(rope_init := getattr(owner, "rope_init_fn", None)) and hasattr(owner, "config"):
        yield partial(_rotary, rope_init, owner.config)
    if init_weights is not None:
        yield partial(_run, owner, partial(init_weights, owner), "_init_weights")
    if callable(reset_parameters := getattr(owner, "reset_parameters", None)):
        yield partial(_run, owner, reset_parameters, "reset_parameters")


def _initializers(model: torch.nn.Module) -> dict[int, Callable[[torch.nn.Module], object]]:
    """Return ``_init_weights`` of the nearest module around each module, by the inner module's ``id``."""
    found: dict[int, Callable[[torch.nn.Module], object]] = {}

    def visit(module: torch.nn.Module, inherited: Callable[[torch.nn.Module], object] | None) -> None:
        own = getattr(module, "_init_weights", None)
        nearest = own if callable(own) else inherited
        if nearest is not None:
            found.setdefault(id(module), nearest)
        for child in module.children():
            visit(child, nearest)

    visit(model, None)
    return found


def _rotary(
    rope_init: Callable[[Any, torch.device], tuple[torch.Tensor, float]], config: Any, lacking: Sequence[HeldTensor]
) -> dict[int, torch.Tensor]:
    """Compute the frequencies of a rotary embedding as its constructor in transformers does."""
    with _naming_the_failure(lacking, "rope_init_fn"):
        frequencies, _ = rope_init(config, torch.device("cpu"))
    return {
        id(held.tensor): frequencies.to(held.tensor.dtype)
        for held in lacking
        if held.attribute in ("inv_freq", "original_inv_freq") and frequencies.shape == held.tensor.shape
    }


def _run(
    owner: torch.nn.Module, function: Callable[[], object], name: str, lacking: Sequence[HeldTensor]
) -> dict[int, torch.Tensor]:
    """Call a function that initializes a module, and return the values that it gave to tensors of ``lacking``."""
    values = {}
    with _stand_ins(owner, {id(held.tensor) for held in lacking}) as stand_ins:
        before = {number: _bits(tensor.detach()).clone() for number, tensor in stand_ins.items()}
        with _naming_the_failure(lacking, name):
            function()
        for held in lacking:
            number = id(held.tensor)
            now = {**owner._parameters, **owner._buffers}.get(held.attribute)
            if now is None or now.device.type == "meta" or now.shape != held.tensor.shape:
                continue
            written = now is not stand_ins[number] or not torch.equal(_bits(now.detach()), before[number])
            if written or not now.numel():
                values[number] = now.detach().to("cpu", held.tensor.dtype)
    return values


@contextmanager
def _stand_ins(owner: torch.nn.Module, wanted: set[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Put stand-ins in the place of a module's tensors and those of its submodules, for the length of the block.

    Yields:
        The stand-ins in host memory, by the ``id`` of the tensors that they stand for.
    """
    made: dict[int, torch.Tensor] = {}
    tables: list[dict[str, torch.Tensor | None]] = []
    for module in owner.modules():
        tables += [module._parameters, module._buffers]  # type: ignore[list-item]
    contents = [dict(table) for table in tables]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = _stand_in(tensor, on_host=id(tensor) in wanted)
                table[name] = made[id(tensor)]
    try:
        yield {number: tensor for number, tensor in made.items() if number in wanted}
    finally:
        for table, content in zip(tables, contents):
            table.clear()
            table.update(content)


def _stand_in(tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if on_host else "meta")
    if on_host:
        new.fill_(_mark(tensor.dtype))
    return torch.nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else new


def _mark(dtype: torch.dtype) -> Any:
    """Return a value that initializers do not write, to tell which tensors they wrote."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _naming_the_failure(lacking: Sequence[HeldTensor], function: str) -> Iterator[None]:
    """Turn an error of a module's own code into one that names the tensors for which the code was called."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{function}() could not initialize {_listed(lacking)} ({type(error).__name__}: {error}). These tensors "
            "are on the meta device, and the checkpoint has no values for them. Nothing was changed. "
            + _remedy(lacking)
        ) from error


@contextmanager
def _same_random_numbers(on_xla: bool) -> Iterator[None]:
    """Let the block draw random numbers in host memory without changing those that are drawn later."""
    with ExitStack() as guards:
        guards.enter_context(torch.random.fork_rng(devices=[]))
        guards.enter_context(torch.no_grad())
        guards.enter_context(torch.device("cpu"))
        if on_xla:
            guards.enter_context(lazy.xla.same_seed())
        yield


def require_values(wanted: Sequence[HeldTensor], values: Collection[int]) -> None:
    """Check that every tensor of ``wanted`` has a value.

    Args:
        wanted: the tensors.
        values: the ``id`` of each tensor that has a value.

    Raises:
        CheckpointError: some have none. The error names them.
    """
    lacking = [held for held in wanted if id(held.tensor) not in values]
    if lacking:
        raise CheckpointError(
            f"no values for {_listed(lacking)}: these tensors are on the meta device, the checkpoint has no values to "
            "load into them, and the model has no values to keep. Their modules do not compute them either. Nothing "
            "was changed. " + _remedy(lacking)
        )


def _remedy(lacking: Sequence[HeldTensor]) -> str:
    if any(held.persistent for held in lacking):
        return (
            "Give the modules a reset_parameters() that computes these tensors, or build the model with these tensors "
            "in host memory"
        )
    return (
        "Give the modules a reset_buffers() that computes these buffers, or build the model with its parameters on "
        'the meta device and its buffers in host memory: docs/restoring.md, "Buffers that no checkpoint has"'
    )


def _listed(held: Sequence[HeldTensor]) -> str:
    more = f" and {len(held) - 10} more" if len(held) > 10 else ""
    return ", ".join(one.key for one in held[:10]) + more
