"""Flattening a state dict into keys, the way DCP names them.

Keys are DCP's: path elements joined by dots; mappings always open, lists only when they hold tensors or containers
that open; everything else, tuples too, is one leaf. Unlike DCP's own flattening, a leaf remembers the container it
came from, so that putting a value back works for keys that are not strings (optimizer state is keyed by integers).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt.errors import CheckpointError

Path = tuple[str | int, ...]


class Leaf(NamedTuple):
    """A value of a state dict and where it lies.

    ``path`` is the key's elements as DCP records them (every mapping key as a string); ``slot`` is the real key or
    position in ``container``.
    """

    path: Path
    value: Any
    container: Any
    slot: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)

    def replace(self, value: Any) -> None:
        """Put ``value`` in the leaf's place."""
        self.container[self.slot] = value


def flatten(state_dict: Mapping[Any, Any], whole: Container[str] = ()) -> dict[str, Leaf]:
    """The leaves of a state dict by key.

    Args:
        state_dict: nested mappings and lists.
        whole: keys of containers that stay one leaf. torch_xla's planners, and DCP up to 2.3, save a dict without
            tensors as one object.

    Raises:
        CheckpointError: two leaves have the same key.
    """
    leaves: dict[str, Leaf] = {}
    for leaf in _leaves((), state_dict, whole):
        key = _key(leaf.path)
        if key in leaves:
            raise CheckpointError(
                f"two values of the state dict have the key {key!r}: at {leaves[key].path} and at {leaf.path}. "
                "Keys are paths joined by dots; rename one of them"
            )
        leaves[key] = leaf
    return leaves


def _leaves(path: Path, container: Any, whole: Container[str]) -> Iterator[Leaf]:
    is_mapping = isinstance(container, Mapping)
    for slot, value in container.items() if is_mapping else enumerate(container):
        here = (*path, str(slot) if is_mapping else slot)
        if not isinstance(value, torch.Tensor) and _opens(value) and _key(here) not in whole:
            yield from _leaves(here, value, whole)
        else:
            yield Leaf(here, value, container, slot)


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _opens(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(entry, torch.Tensor) or _opens(entry) for entry in value)
