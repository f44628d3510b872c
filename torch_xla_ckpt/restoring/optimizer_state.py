"""What state an optimizer keeps for each parameter, learnt without a step of the optimizer itself.

An optimizer of ``torch.optim`` is built once more, for one small parameter in host memory and with the same options,
and takes one step there. Names and shapes of the state that appears are those that the optimizer keeps. Optimizers of
other modules are never tried out like this: building one or letting it step could have effects that nobody expects.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_ckpt.errors import CheckpointError

# How a step is computed, not what it keeps. On the host, some of these are refused.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint has for one parameter of an optimizer.

    Args:
        name: the parameter's number, or name, in the checkpoint.
        param: the parameter.
        group: position of its group.
        shapes: shape of each tensor of its state, by name; None for an object, or for a list or dict of tensors.
    """

    name: str
    param: torch.Tensor
    group: int
    shapes: Mapping[str, torch.Size | None]


@dataclass(frozen=True)
class _Kept:
    """Names of an optimizer's state for a parameter.

    Args:
        names: all, after one step.
        from_start: those that exist before the first step.
        like_param: those of tensors that have the parameter's shape.
    """

    names: frozenset[str]
    from_start: frozenset[str]
    like_param: frozenset[str]


def require_own_state(
    key: str, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], saved: Sequence[SavedState]
) -> None:
    """Show that saved state is what an optimizer keeps. Only optimizers of ``torch.optim`` can be checked.

    Args:
        key: of the optimizer in the checkpoint, for errors.
        optimizer: it; nothing of it is changed.
        groups: the saved ``param_groups``, which fit the optimizer's in number and size.
        saved: the saved state of each parameter.

    Raises:
        CheckpointError: it is the state of another optimizer.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return
    known: dict[Any, _Kept | None] = {}
    for one in saved:
        what = one.group, one.param.ndim, one.param.dtype
        if what not in known:
            known[what] = _kept(key, optimizer, optimizer.param_groups[one.group], groups[one.group], one.param)
        kept = known[what]
        if kept is not None:
            _require(key, kind.__name__, one, kept)


def _require(key: str, kind: str, saved: SavedState, kept: _Kept) -> None:
    needed = kept.names if saved.shapes else kept.from_start
    tensors = {name for name, shape in saved.shapes.items() if shape is not None}
    if not needed <= saved.shapes.keys() or not tensors <= kept.names:
        raise _refusal(
            key,
            f"for parameter {saved.name} the checkpoint has {_listed(saved.shapes)}, and {kind} needs "
            f"{_listed(kept.names)}",
        )
    for name in sorted(kept.like_param & tensors):
        if saved.shapes[name] != saved.param.shape:
            raise _refusal(
                key,
                f"for parameter {saved.name} the checkpoint has a {name} of shape {_shown(saved.shapes[name])}, and "
                f"{kind} needs the parameter's shape, {_shown(saved.param.shape)}",
            )


def _refusal(key: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the state under {key!r} is not this optimizer's: {what}. Nothing was changed. Restore into the optimizer "
        "that was saved, or leave optimizer= out and begin with fresh state"
    )


def _kept(
    key: str,
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, Any],
    saved: Mapping[str, Any],
    param: torch.Tensor,
) -> _Kept | None:
    """What the optimizer keeps for a parameter once it has a saved group's options; None if that cannot be found out.

    Raises:
        CheckpointError: it cannot take a step with these options.
    """
    try:
        _tried(optimizer, own, own, param)
    except Exception:  # whatever the reason is, nothing can be learnt about the saved options
        return None
    try:
        kept = _tried(optimizer, own, saved, param)
    except Exception as error:
        has, needs = set(saved) - {"params"}, set(own) - {"params"}
        raise _refusal(
            key,
            f"its groups have the options {_listed(has)}, and {type(optimizer).__name__} needs {_listed(needs)} "
            f"(they have no {_listed(needs - has)})"
            if needs - has
            else f"{type(optimizer).__name__} cannot step with its options ({type(error).__name__}: {error})",
        ) from error
    # The state of LBFGS depends on how many steps it took.
    return None if isinstance(optimizer, torch.optim.LBFGS) else kept


def _tried(
    optimizer: torch.optim.Optimizer, own: Mapping[str, Any], options: Mapping[str, Any], like: torch.Tensor
) -> _Kept:
    """Build the optimizer once more for a small parameter, give it a group's options, and step."""
    kind: Any = type(optimizer)
    shape = tuple(range(2, 2 + like.ndim))  # no two dimensions alike
    known = inspect.signature(kind).parameters
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        param = torch.nn.Parameter(torch.ones(shape, dtype=like.dtype))
        copy = kind([param], **{k: v for k, v in _plain({**optimizer.defaults, **own}).items() if k in known})
        from_start = frozenset(copy.state.get(param, {}))
        state = copy.state_dict()
        copy.load_state_dict({**state, "param_groups": [{**_plain(options), "params": [0]}]})
        gradient = torch.ones_like(param)
        param.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        step = kind.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # without the hooks that a program has on all optimizers
        step(copy, lambda: torch.zeros(()))
        found = copy.state.get(param, {})
    like_param = {name for name, value in found.items() if isinstance(value, torch.Tensor) and value.shape == shape}
    return _Kept(frozenset(found), from_start, frozenset(like_param) if like.ndim else frozenset())


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with numbers for tensors, which may lie on devices; and with the plainest way to compute a step."""

    def number(value: Any) -> Any:
        return 1e-3 if isinstance(value, torch.Tensor) else value

    plain: dict[str, Any] = pytree.tree_map(number, {k: v for k, v in options.items() if k != "params"})
    return {name: False if name in _WAYS else value for name, value in plain.items()}


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def _shown(shape: torch.Size | None) -> str:
    return str(tuple(shape or ()))
