"""Saved keys for target keys that the checkpoint lacks by name: other prefixes, and tied weights saved only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from torch_xla_ckpt.device import alias_of
from torch_xla_ckpt.planner.policy import by_plain_name
from torch_xla_ckpt.state import Leaf


def pair_prefixed_keys(target: Collection[str], saved: Collection[str]) -> dict[str, str]:
    """Match keys of which all on one side have a prefix that the other side lacks.

    The file of a model has the keys of its state dict. In a target, the state dict may lie under "model"; and the body
    of a model has "norm.weight" where the whole model has "model.norm.weight". The prefix that lets most keys meet is
    taken; wrappers, as in ``pair_wrapped_keys``, do not count.

    Args:
        target: keys of the target.
        saved: keys of the checkpoint.

    Returns:
        For each matched target key, the saved key.
    """
    targets, sources = _unique(target), _unique(saved)
    of_target = Counter(prefix for key in targets for prefix, rest in _cuts(key) if rest in sources)
    of_saved = Counter(prefix for key in sources for prefix, rest in _cuts(key) if rest in targets)
    choices = [(-count, side, prefix) for side, met in ((0, of_target), (1, of_saved)) for prefix, count in met.items()]
    if not choices:
        return {}
    _, side, prefix = min(choices)
    if side == 0:
        pairs = {key: key.removeprefix(prefix) for key in targets if key.startswith(prefix)}
    else:
        pairs = {key: prefix + key for key in targets}
    return {targets[key]: sources[source] for key, source in pairs.items() if source in sources}


def pair_tied_keys(
    keys: Iterable[str], leaves: Mapping[str, Leaf], sources: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Find the twin of each target key without a saved key of its own.

    Two keys of a target are twins if they name one tensor, such as tied weights. Filling one fills the other.

    Args:
        keys: keys of the target without a saved key.
        leaves: the target's values by key.
        sources: the saved key for each other key of the target.

    Returns:
        For each key with a twin, the twin and the twin's saved key.
    """
    lacking = [key for key in keys if leaves[key].is_tensor]
    if not lacking:
        return {}
    filled: dict[Hashable, str] = {}
    for key in sources:
        if leaves[key].is_tensor:
            filled.setdefault(alias_of(leaves[key].value), key)
    twins = {key: filled.get(alias_of(leaves[key].value)) for key in lacking}
    return {key: (twin, sources[twin]) for key, twin in twins.items() if twin is not None}


def _unique(keys: Iterable[str]) -> dict[str, str]:
    """Return keys by their names without wrappers, without names that several keys share."""
    return {name: keys[0] for name, keys in by_plain_name(keys).items() if len(keys) == 1}


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    """Yield each way to cut a key into a prefix, with its dot, and a rest."""
    at = key.find(".")
    while at >= 0:
        yield key[: at + 1], key[at + 1 :]
        at = key.find(".", at + 1)
