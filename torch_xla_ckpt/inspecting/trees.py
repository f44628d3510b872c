"""Keys as a tree: sizes added up, branches that are alike on one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch_xla_ckpt.inspecting.folding import braces
from torch_xla_ckpt.inspecting.text import plural, shown
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


def tree_lines(keys: Sequence[ListedKey], depth: int | None) -> Iterator[str]:
    """Yield the lines of a tree, which ends at ``depth`` levels; None for all levels."""
    # A list instead of recursion: a key may have more dots than Python allows nested calls.
    waiting = [("", *line) for line in reversed(_folded(tree_of(keys)))]
    while waiting:
        indent, name, times, node = waiting.pop()
        below = _folded(node)
        while len(below) == 1 and node.leaf is None:  # a branch without a fork takes no line of its own
            ((part, count, node),) = below
            name, times = f"{name}.{part}", times * count
            below = _folded(node)
        yield f"{indent}{shown(name)}  {_facts(node, times)}"
        if depth is None or len(indent) < 2 * (depth - 1):
            waiting += [(indent + "  ", part, times * count, one) for part, count, one in reversed(below)]


def _facts(node: Node, times: int) -> str:
    """Return what a line says after the name."""
    size = format_bytes(node.nbytes * times)
    if node.children:
        return f"{plural(node.count * times, 'key')}, {size}"
    if node.leaf is None or node.leaf.dtype is None:
        return f"{size}, object"
    return f"{size}, {node.leaf.dtype} {'x'.join(map(str, node.leaf.shape or ())) or 'scalar'}"


def _folded(node: Node) -> list[tuple[str, int, Node]]:
    """Return the children, those with numbers for names and equal branches joined: name, number of children, child."""
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
        lines.append((name, max(1, len(members)), child))
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
