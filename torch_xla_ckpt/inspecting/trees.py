"""Keys as a tree: sizes added up, branches that are alike on one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch_xla_ckpt.inspecting.folding import braces
from torch_xla_ckpt.inspecting.text import plural, shown
from torch_xla_ckpt.inspecting.words import shape_words
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.storage import ListedKey


@dataclass
class Node:
    """A branch of the tree.

    Args:
        children: the branches below, by the next part of the key.
        leaf: the value that ends here; None if there is none.
        count: number of values in and below this branch.
        nbytes: bytes of these values.
    """

    children: dict[str, Node] = field(default_factory=dict)
    leaf: ListedKey | None = None
    count: int = 0
    nbytes: int = 0


Sort = Literal["saved", "key", "bytes"]
"""The order of keys: as they were saved, by name, or the largest first."""


class _Line(NamedTuple):
    """A line of the tree: one branch, or several that are alike.

    Args:
        name: the branch's name, or the pattern of the names.
        times: number of branches.
        node: the first of them.
    """

    name: str
    times: int
    node: Node


def tree_of(keys: Sequence[ListedKey]) -> Node:
    """Return the tree of keys, split at their dots."""
    root = Node()
    for one in keys:
        node = root
        node.count, node.nbytes = node.count + 1, node.nbytes + one.nbytes
        for part in one.key.split("."):
            node = node.children.setdefault(part, Node())
            node.count, node.nbytes = node.count + 1, node.nbytes + one.nbytes
        node.leaf = one
    return root


def tree_lines(
    keys: Sequence[ListedKey], depth: int | None, *, every: bool = False, sort: Sort = "saved"
) -> Iterator[str]:
    """Yield the lines of a tree.

    Args:
        keys: the keys.
        depth: levels to show; None for all levels.
        every: give every branch a line of its own. Default: branches that are alike share a line.
        sort: the order of the branches below a branch. Default: as they were saved.
    """
    # A list instead of recursion: a key may have more dots than Python allows nested calls.
    waiting = [("", line) for line in reversed(_lines(tree_of(keys), every, sort))]
    while waiting:
        indent, (name, times, node) = waiting.pop()
        below = _lines(node, every, sort)
        while len(below) == 1 and node.leaf is None:  # a branch without a fork takes no line of its own
            (line,) = below
            name, times, node = f"{name}.{line.name}", times * line.times, line.node
            below = _lines(node, every, sort)
        yield f"{indent}{shown(name)}  {_facts(node, times)}"
        if depth is None or len(indent) < 2 * (depth - 1):
            waiting += [(indent + "  ", line._replace(times=times * line.times)) for line in reversed(below)]


def _facts(node: Node, times: int) -> str:
    """Return what a line says after the name."""
    size = format_bytes(node.nbytes * times)
    if node.children:
        return f"{plural(node.count * times, 'key')}, {size}"
    if node.leaf is None or node.leaf.dtype is None:
        return f"{size}, object"
    return f"{size}, {node.leaf.dtype} {shape_words(node.leaf.shape or ())}"


def _lines(node: Node, every: bool, sort: Sort) -> list[_Line]:
    """Return the lines of the branches below a node, in order."""
    lines = [_Line(name, 1, child) for name, child in node.children.items()] if every else _folded(node)
    if sort == "key":
        lines.sort(key=lambda line: line.name)
    elif sort == "bytes":
        lines.sort(key=lambda line: -line.times * line.node.nbytes)
    return lines


def _folded(node: Node) -> list[_Line]:
    """Return the branches below a node. Those with numbers for names that are alike share a line."""
    groups: dict[object, list[tuple[int, Node]]] = {}
    order: list[tuple[object, str, Node]] = []
    for name, child in node.children.items():
        if name.isascii() and name.isdigit() and len(name) < 19 and str(int(name)) == name:
            group: object = (child.count, child.nbytes, tuple(_signature(child)))
            if group not in groups:
                order.append((group, name, child))
            groups.setdefault(group, []).append((int(name), child))
        else:
            order.append((None, name, child))
    lines = []
    for group, name, child in order:
        members = groups.get(group, []) if group is not None else []
        if len(members) > 1:
            name = braces(sorted(number for number, _ in members))
        lines.append(_Line(name, max(1, len(members)), child))
    return lines


def _signature(node: Node) -> Iterator[object]:
    """Yield what two branches must have in common to share a line."""
    waiting: list[tuple[str, Node]] = [("", node)]
    while waiting:
        name, one = waiting.pop()
        yield name, len(one.children)
        if one.leaf is not None:
            yield one.leaf.dtype, one.leaf.shape
        waiting += one.children.items()
