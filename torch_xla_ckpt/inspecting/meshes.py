"""Meshes and partition specs written as text, and the boxes that devices get from them, as XLA cuts them."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box

_AXIS = re.compile(r"([A-Za-z_]\w*)=([1-9]\d{0,6})")
_MOST_DEVICES = 1 << 20

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes that cut each dimension of a tensor."""


@dataclass(frozen=True)
class MeshPlan:
    """A mesh, and the partition spec of each key.

    Args:
        axes: the axes' sizes by name, from the outermost to the innermost.
        rules: pairs of a glob and a spec. The first glob that matches a key counts. Other keys are not cut.
    """

    axes: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, Spec], ...]

    @classmethod
    def parse(cls, mesh: str, specs: Sequence[str]) -> MeshPlan:
        """Read a mesh such as "fsdp=2,tensor=4" and specs such as "*.weight=fsdp,tensor".

        In a spec, "-" stands for a dimension that is not cut, and "a+b" for one that two axes cut.

        Raises:
            CheckpointError: the text is no mesh or no spec.
        """
        matches = [_AXIS.fullmatch(part.strip()) for part in mesh.split(",")]
        axes = tuple((match[1], int(match[2])) for match in matches if match is not None)
        if len(axes) < len(matches) or len(dict(axes)) < len(axes) or math.prod(n for _, n in axes) > _MOST_DEVICES:
            raise CheckpointError(f"{mesh!r} is no mesh. Write its axes with their sizes, such as 'fsdp=2,tensor=4'")
        return cls(axes, tuple(_rule(text, dict(axes)) for text in specs))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    def spec_of(self, key: str) -> Spec | None:
        """Return the spec of a key; None if no rule names the key."""
        return next((spec for glob, spec in self.rules if fnmatch.fnmatchcase(key, glob)), None)

    def unused(self, keys: Sequence[str]) -> list[str]:
        """Return the globs that match none of some keys."""
        return [glob for glob, _ in self.rules if not any(fnmatch.fnmatchcase(key, glob) for key in keys)]

    def tiles(self, key: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of tiles in each dimension of a key's tensor.

        Raises:
            CheckpointError: the spec has more dimensions than the tensor.
        """
        spec = self.spec_of(key) or ()
        if len(spec) > len(shape):
            raise CheckpointError(
                f"the spec for {key!r} has {len(spec)} dimensions, and its tensor has the shape {tuple(shape)}. Give "
                "this key a --spec of its own, before the others"
            )
        sizes = dict(self.axes)
        cuts = [math.prod(sizes[axis] for axis in dim) for dim in spec]
        return (*cuts, *(1 for _ in range(len(shape) - len(cuts))))

    def shard_shape(self, key: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each device's shard, with padding."""
        return tuple(math.ceil(n / tiles) for n, tiles in zip(shape, self.tiles(key, shape)))

    def boxes(self, key: str, shape: Sequence[int]) -> list[Box]:
        """Return the box of each device, in the order of the mesh's devices. Boxes may be empty."""
        steps = self.shard_shape(key, shape)
        spec = (*(self.spec_of(key) or ()), *(() for _ in shape))[: len(shape)]
        names = [name for name, _ in self.axes]
        boxes = []
        for position in itertools.product(*(range(size) for _, size in self.axes)):
            at = dict(zip(names, position))
            offsets = []
            for dim, axes in enumerate(spec):
                number = 0
                for axis in axes:
                    number = number * dict(self.axes)[axis] + at[axis]
                offsets.append(min(number * steps[dim], shape[dim]))
            sizes = tuple(min(step, n - offset) for step, n, offset in zip(steps, shape, offsets))
            boxes.append(Box(tuple(offsets), sizes))
        return boxes

    def boxes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Sequence[Box]]:
        """Return the box of each device, for several tensors. Tensors that are cut alike share their boxes."""
        known: dict[tuple[Spec | None, tuple[int, ...]], Sequence[Box]] = {}
        found = {}
        for key, shape in shapes.items():
            cut = self.spec_of(key), shape
            if cut not in known:
                known[cut] = self.boxes(key, shape)
            found[key] = known[cut]
        return found

    def describe(self, key: str, shape: Sequence[int]) -> str:
        """Return the sharding of a key for people."""
        spec = self.spec_of(key) or ()
        cut = ", ".join("+".join(axes) or "-" for axes in (*spec, *(() for _ in range(len(shape) - len(spec)))))
        return f"({cut}) on {', '.join(f'{name}={size}' for name, size in self.axes)}"


def _rule(text: str, axes: dict[str, int]) -> tuple[str, Spec]:
    glob, equals, dims = text.rpartition("=")
    spec = tuple(() if dim.strip() in ("-", "None", "") else tuple(dim.strip().split("+")) for dim in dims.split(","))
    used = [axis for dim in spec for axis in dim]
    if not equals or not glob or not set(used) <= axes.keys() or len(set(used)) < len(used):
        raise CheckpointError(
            f"{text!r} is no spec for a mesh with the axes {', '.join(axes)}. Write a glob of keys and the axis that "
            "cuts each dimension, such as '*.weight=fsdp,tensor'. '-' leaves a dimension whole, and a+b cuts it by two "
            "axes"
        )
    return glob, spec
