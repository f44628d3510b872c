"""State that an optimizer keeps for each parameter, learnt without a step of the optimizer itself.

An optimizer of ``torch.optim`` is built once more, for one small parameter in host memory and with the same options,
and takes one step there. Names and shapes of the state that appears are those that the optimizer keeps. Optimizers of
other modules are never tried out like this: to build one, or to let it step, could have effects that nobody expects.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_ckpt.errors import CheckpointError

# Options that choose how a step is computed, and not which state it keeps. On the host, some of them are refused.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class SavedState:
    """The saved state of one parameter of an optimizer.

    Args:
        name: the parameter's number, or name, in the checkpoint.
        param: the parameter.
        group: the position of the parameter's group.
        shapes: the shape of each tensor in the state, by name; None for an object, or for a list or dict of tensors.
    """

    name: str
    param: torch.Tensor
    group: int
    shapes: Mapping[str, torch.Size | None]


@dataclass(frozen=True)
class _StateNames:
    """Names in the state that an optimizer keeps for a parameter.

    Args:
        after_step: names that exist after one step.
        from_start: names that exist before the first step.
        like_param: names of tensors that have the parameter's shape.
    """

    after_step: frozenset[str]
    from_start: frozenset[str]
    like_param: frozenset[str]


def require_own_state(
    key: str, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], saved: Sequence[SavedState]
) -> dict[str, str]:
    """Check that saved state is what an optimizer keeps. Only optimizers of ``torch.optim`` can be checked.

    Args:
        key: the optimizer's key in the checkpoint, for errors.
        optimizer: the optimizer; nothing of it is changed.
        groups: the saved ``param_groups``, which fit the optimizer's in number and size.
        saved: the saved state of each parameter.

    Returns:
        For parameters whose state has another shape than they have: the difference in words, by the parameter's name.

    Raises:
        CheckpointError: the state is that of another optimizer.
    """
    kind = type(optimizer)
    if not _is_of_torch(optimizer):
        return {}
    known: dict[Any, _StateNames | None] = {}
    differing: dict[str, str] = {}
    for one in saved:
        alike = one.group, one.param.ndim, one.param.dtype
        if alike not in known:
            known[alike] = _state_names(key, optimizer, optimizer.param_groups[one.group], groups[one.group], one.param)
        names = known[alike]
        if names is not None:
            _require_names(key, kind.__name__, one, names)
            differing |= _other_shape(kind.__name__, one, names)
    return differing


def refusal(key: str, difference: str) -> CheckpointError:
    """Return the error for saved state that an optimizer cannot take.

    Args:
        key: the optimizer's key in the checkpoint.
        difference: what the checkpoint has and what the optimizer needs.
    """
    return CheckpointError(
        f"the state under {key!r} is not this optimizer's: {difference}. Nothing was changed. Restore into the "
        "optimizer that was saved, or leave optimizer= out and begin with fresh state"
    )


def fresh_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state, in host memory, that an optimizer has for a new parameter before its first step.

    Args:
        optimizer: the optimizer. For one that is not of ``torch.optim``, the state is taken to be empty.
        group: the options of the parameter's group.
        param: the parameter; only its shape and dtype count.
    """
    if not _is_of_torch(optimizer):
        return {}
    with torch.device("cpu"), torch.inference_mode(False):
        stand_in = torch.nn.Parameter(torch.zeros(param.shape, dtype=param.dtype))
        return dict(_twin(optimizer, group, stand_in).state.get(stand_in, {}))


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def _require_names(key: str, kind: str, saved: SavedState, names: _StateNames) -> None:
    needed = names.after_step if saved.shapes else names.from_start
    tensors = {name for name, shape in saved.shapes.items() if shape is not None}
    if not needed <= saved.shapes.keys() or not tensors <= names.after_step:
        raise refusal(
            key,
            f"for parameter {saved.name} the checkpoint has {_listed(saved.shapes)}, and {kind} needs "
            f"{_listed(names.after_step)}",
        )


def _other_shape(kind: str, saved: SavedState, names: _StateNames) -> dict[str, str]:
    for name in sorted(names.like_param & saved.shapes.keys()):
        shape = saved.shapes[name]
        if shape is not None and shape != saved.param.shape:
            return {
                saved.name: f"for parameter {saved.name} the checkpoint has a {name} of shape {tuple(shape)}, and "
                f"{kind} needs the parameter's shape, {tuple(saved.param.shape)}"
            }
    return {}


def _state_names(
    key: str,
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    param: torch.Tensor,
) -> _StateNames | None:
    """Return the names in a parameter's state once its group has the saved options; None if they cannot be found out.

    Args:
        key: the optimizer's key in the checkpoint, for errors.
        optimizer: the optimizer.
        own: the optimizer's group.
        saved: the saved group.
        param: the parameter.

    Raises:
        CheckpointError: the optimizer cannot take a step with the saved options.
    """
    try:
        _tried(optimizer, own, own, param)
    except Exception:  # whatever the reason is, nothing can be learnt about the saved options
        return None
    try:
        names = _tried(optimizer, own, saved, param)
    except Exception as error:
        has, needs = set(saved) - {"params"}, set(own) - {"params"}
        raise refusal(
            key,
            f"its groups have the options {_listed(has)}, and {type(optimizer).__name__} needs {_listed(needs)} "
            f"(they have no {_listed(needs - has)})"
            if needs - has
            else f"{type(optimizer).__name__} cannot step with its options ({type(error).__name__}: {error})",
        ) from error
    # The state of LBFGS depends on how many steps it took.
    return None if isinstance(optimizer, torch.optim.LBFGS) else names


def _tried(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any], options: Mapping[str, Any], like: torch.Tensor
) -> _StateNames:
    """Build the optimizer once more for a small parameter, give its group the options, and let it step."""
    kind: Any = type(optimizer)
    shape = tuple(range(2, 2 + like.ndim))  # no two dimensions alike
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        param = torch.nn.Parameter(torch.ones(shape, dtype=like.dtype))
        twin = _twin(optimizer, own, param)
        from_start = frozenset(twin.state.get(param, {}))
        state = twin.state_dict()
        twin.load_state_dict({**state, "param_groups": [{**_plain(options), "params": [0]}]})
        gradient = torch.ones_like(param)
        param.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        step = kind.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # without the hooks that a program has on all optimizers
        step(twin, lambda: torch.zeros(()))
        found = twin.state.get(param, {})
    like_param = {name for name, value in found.items() if isinstance(value, torch.Tensor) and value.shape == shape}
    return _StateNames(frozenset(found), from_start, frozenset(like_param) if like.ndim else frozenset())


def _twin(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """Build an optimizer of the same kind and options for another parameter."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    options = _plain({**optimizer.defaults, **group})
    twin: torch.optim.Optimizer = kind([param], **{k: v for k, v in options.items() if k in known})
    return twin


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with numbers for tensors, which may lie on devices, and with the plainest implementation."""

    def number(value: Any) -> Any:
        return 1e-3 if isinstance(value, torch.Tensor) else value

    plain: dict[str, Any] = pytree.tree_map(number, {k: v for k, v in options.items() if k != "params"})
    return {name: False if name in _IMPLEMENTATIONS else value for name, value in plain.items()}


def _listed(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"
