"""Reading regions of saved tensors and objects, without a state dict: only the bytes that hold them, and checked."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.inspecting.locating import located
from torch_xla_ckpt.inspecting.opening import Checkpoint
from torch_xla_ckpt.layout import Box, Flaw
from torch_xla_ckpt.planner import ReadPlanner
from torch_xla_ckpt.storage import Stored

PIECE_BYTES = 32 << 20
"""Size in bytes of the pieces in which large tensors are read, so that memory is bounded."""
_LARGE = 1 << 20  # mean size in bytes of a tensor's chunks from which the pieces follow the chunks


class Values:
    """The values of a checkpoint, read on request.

    Args:
        checkpoint: the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint):
        self._reader, self.metadata = checkpoint.reader()
        self._folder = checkpoint.folder
        self._planners: dict[str, ReadPlanner] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from data files so far."""
        return self._reader.stats.bytes_read

    def entry(self, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return DCP's entry for a key.

        Raises:
            CheckpointError: there is no such key.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if entry is None:
            raise CheckpointError(f"the checkpoint has no key {key!r}. 'xc ls PATH' lists its keys")
        return entry

    def stored(self, key: str, offsets: torch.Size | None = None) -> Stored:
        """Return where a chunk or an object lies.

        Args:
            key: the key.
            offsets: the chunk's first index in each dimension; None for an object.
        """
        return stored(self.metadata, key, offsets)

    def saved_tensor(self, key: str) -> TensorStorageMetadata:
        """Return DCP's entry for the key of a tensor."""
        entry = self.entry(key)
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def planner(self, key: str) -> ReadPlanner:
        """Return the planner of reads of a tensor, which indexes the tensor's chunks once."""
        if key not in self._planners:
            self._planners[key] = ReadPlanner(key, key, self.saved_tensor(key))
            self._locate(key)
        return self._planners[key]

    def _locate(self, key: str) -> None:
        """Find the elements of large chunks that stock DCP wrote, so that parts of them can be read."""
        saved, places = self.saved_tensor(key), self.metadata.storage_data
        for chunk in saved.chunks:
            place = MetadataIndex(key, chunk.offsets)
            dtype = saved.properties.dtype
            if math.prod(chunk.sizes) * dtype.itemsize > PIECE_BYTES and isinstance(places, dict) and place in places:
                places[place] = located(self._folder, Stored.of(places[place]), chunk.sizes, dtype)

    def tensor(self, key: str, box: Box) -> torch.Tensor:
        """Return the elements of a box as a host tensor.

        Raises:
            IncompleteCheckpointError: the saved chunks do not hold every element of the box exactly once.
            CorruptCheckpointError: the bytes are not what was written.
        """
        dtype = self.saved_tensor(key).properties.dtype
        if not box.volume:
            return _empty(key, box.sizes, dtype)
        planned = self.planner(key).plan([box])
        if planned.flaws:
            raise _incomplete(key, planned.flaws)
        buffer = _empty(key, box.sizes, dtype)
        self._reader.read_data(LoadPlan(planned.items), _Buffer(buffer))
        return buffer

    def object_bytes(self, key: str) -> io.BytesIO:
        """Return the bytes of an object, as ``torch.save`` wrote them."""
        target = _Bytes()
        self._reader.read_data(LoadPlan([_dcp.read_object(key, key)]), target)
        return target.data

    def pieces(self, key: str, box: Box) -> Iterator[Box]:
        """Cut a box into pieces of bounded size that hold each element once. They follow the chunks if these are large.

        Chunks whose elements cannot be found without rebuilding the tensor are read whole.

        Raises:
            IncompleteCheckpointError: the saved chunks do not hold every element of the box exactly once.
        """
        if not box.volume:
            return
        planner, saved = self.planner(key), self.saved_tensor(key)
        itemsize = saved.properties.dtype.itemsize
        if math.prod(saved.size) * itemsize < _LARGE * len(saved.chunks):
            yield from cut(box, itemsize)
            return
        volume = 0
        for chunk in saved.chunks:
            inside = intersection(box, _dcp.box_of(chunk))
            if inside is not None:
                volume += inside.volume
                is_plain = self.stored(key, chunk.offsets).data is not None
                yield from cut(inside, itemsize) if is_plain else [inside]
        if volume != box.volume:
            raise _incomplete(key, planner.plan([box]).flaws)


def _incomplete(key: str, flaws: Sequence[Flaw]) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"cannot read {key!r}: {'; '.join(map(str, flaws[:3]))} in the saved chunks. Restore from another checkpoint",
        [key],
    )


def stored(metadata: Metadata, key: str, offsets: torch.Size | None = None) -> Stored:
    """Return where a chunk or an object lies; see ``Values.stored``.

    Raises:
        CheckpointError: the metadata lists the item, and no file holds it.
    """
    entry = metadata.storage_data.get(MetadataIndex(key, offsets))
    if entry is None:
        what = "the object" if offsets is None else f"the chunk at {tuple(offsets)}"
        raise CheckpointError(f"cannot read {key!r}: {what} {_dcp.NOT_STORED}. Restore from another checkpoint")
    return Stored.of(entry)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the region that two boxes share; None if they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    stops = (min(o + n, p + m) for o, n, p, m in zip(a.offsets, a.sizes, b.offsets, b.sizes))
    sizes = tuple(stop - start for start, stop in zip(offsets, stops))
    return Box(offsets, sizes) if all(n > 0 for n in sizes) else None


def cut(box: Box, itemsize: int, most: int = PIECE_BYTES) -> Iterator[Box]:
    """Cut a box into slabs of at most ``most`` bytes, in row-major order."""
    if box.volume * itemsize <= most or not box.sizes:
        yield box
        return
    dim = next(dim for dim, n in enumerate(box.sizes) if n > 1)
    row = math.prod(box.sizes[dim + 1 :]) * itemsize
    rows = max(1, most // row)
    for start in range(0, box.sizes[dim], rows):
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(rows, box.sizes[dim] - start), *box.sizes[dim + 1 :])
        yield from cut(Box(offsets, sizes), itemsize, most)


def _empty(key: str, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(sizes, dtype=dtype)
    except RuntimeError as error:
        nbytes = math.prod(sizes) * dtype.itemsize
        raise CheckpointError(
            f"cannot read {key!r}: there is no memory for {nbytes:,} bytes, or torch makes no tensors of {dtype}. Ask "
            "for a slice of the tensor"
        ) from error


class _Buffer(LoadPlanner):
    """Takes the reads of one box."""

    def __init__(self, buffer: torch.Tensor):
        self._buffer = buffer

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offsets = read_item.dest_offsets
        return self._buffer[tuple(slice(o, o + n) for o, n in zip(offsets, read_item.lengths))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def set_up_planner(self, *args: object, **kwargs: object) -> None:  # pragma: no cover
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner  # type: ignore[assignment]


class _Bytes(_Buffer):
    """Takes the bytes of one object."""

    def __init__(self) -> None:
        self.data = io.BytesIO()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # type: ignore[override]
        self.data = value
