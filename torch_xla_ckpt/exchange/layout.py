"""The files of an export: their names and sizes, and the place of each tensor, all known before a byte is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import (
    HEADER_LIMIT,
    INDEX_LIMIT,
    NAMES,
    entry_bytes,
    header_of,
    index_of,
    shard_names,
    texts_bytes,
    torch_file_of,
)
from torch_xla_ckpt.planner import QUANTIZED

_SHOWN = 20  # keys that an error names


@dataclass(frozen=True)
class OutTensor:
    """A tensor to write.

    Args:
        name: its name in the file.
        source: its key in the source.
        shape: its shape.
        saved: its dtype in the source.
        dtype: its dtype in the file.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    saved: torch.dtype
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """A file to write.

    Args:
        name: the file's name.
        size: the file's size in bytes.
        pieces: everything but the tensors: positions and bytes, ascending.
        tensors: the tensors, in the order of their bytes.
        offsets: position of each tensor's first byte, by name.
    """

    name: str
    size: int
    pieces: tuple[tuple[int, bytes], ...]
    tensors: tuple[OutTensor, ...]
    offsets: Mapping[str, int]


@dataclass(frozen=True)
class Layout:
    """All files of an export.

    Args:
        files: the files with tensors.
        last: name and bytes of the file that makes the folder a model, to be written after all others; None if there
            is only one file.
    """

    files: tuple[OutFile, ...]
    last: tuple[str, bytes] | None = None

    @property
    def tensors(self) -> list[OutTensor]:
        """All tensors."""
        return [tensor for file in self.files for tensor in file.tensors]


def shares_of(layout: Layout, ranks: int) -> list[list[OutFile]]:
    """Return the files that each rank writes if files are written whole: each rank gets about as many bytes."""
    shares: list[list[OutFile]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for file in sorted(layout.files, key=lambda file: -file.size):
        rank = load.index(min(load))
        load[rank] += file.size
        shares[rank].append(file)
    return shares


def batches_of(tensors: Iterable[OutTensor], most: int) -> Iterator[list[OutTensor]]:
    """Yield the tensors in batches of at most ``most`` bytes. A larger tensor is a batch of its own."""
    batch: list[OutTensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def out_dtype(saved: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in the file.

    Integers stay. So do floating-point numbers of one byte, whose scales are other tensors.
    """
    is_cast = dtype is not None and saved.is_floating_point and saved.itemsize > 1
    return dtype if is_cast and dtype is not None else saved


def require_dtypes(tensors: Sequence[OutTensor], format: str) -> None:
    """Check that a format has the dtypes of all tensors.

    Raises:
        CheckpointError: naming all keys of the tensors that it lacks, and of quantized tensors.
    """
    if quantized := [one for one in tensors if one.saved in QUANTIZED]:
        raise CheckpointError(
            f"{_shown(quantized)}: quantized, and saved without scales and zero points, so that the values are not "
            "known. Nothing was written. Leave these keys out with exclude="
        )
    if format == "safetensors" and (bad := [one for one in tensors if one.dtype not in NAMES]):
        raise CheckpointError(
            f"an export to safetensors has no dtype for {_shown(bad)}. Nothing was written. Leave these keys out with "
            'exclude=, or pass format="torch"'
        )


def _shown(tensors: Sequence[OutTensor]) -> str:
    """Name some tensors, with their dtypes."""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return ", ".join(f"{one.source} ({one.dtype})" for one in tensors[:_SHOWN]) + more


def layout_of(
    tensors: Sequence[OutTensor],
    format: str,
    max_shard_bytes: int,
    file: str | None,
    ties: Mapping[str, str],
    texts: Mapping[str, str],
) -> Layout:
    """Return the files of an export.

    Args:
        tensors: the tensors, in the model's order.
        format: "safetensors" or "torch".
        max_shard_bytes: bytes of tensors from which a new file begins. A larger tensor has a file of its own.
        file: the name of the only file, if the path of the export is a file. None for a folder.
        ties: names tied to a tensor, with that tensor's name. safetensors files do without them. A torch.save file has
            all names, because ``load_state_dict`` asks for them, and the tensor's bytes once.
        texts: texts to keep in the header of each safetensors file.

    Raises:
        CheckpointError: a header or the index would be larger than readers accept.
    """
    if format == "torch":
        assert file is not None
        return Layout((_torch_file(file, tensors, ties),))
    most_head = HEADER_LIMIT - texts_bytes(texts)
    groups = [list(tensors)] if file is not None else list(_groups(tensors, max_shard_bytes, most_head))
    names = [file] if file is not None else shard_names(len(groups))
    files = tuple(_safetensors_file(name, group, texts) for name, group in zip(names, groups))
    if len(files) == 1:
        return Layout(files)
    weight_map = {tensor.name: out.name for out in files for tensor in out.tensors}
    index = index_of(weight_map, sum(tensor.nbytes for tensor in tensors))
    if len(index[1]) > INDEX_LIMIT:
        raise CheckpointError(
            f"{index[0]} would have {len(index[1]):,} bytes, and readers accept at most {INDEX_LIMIT:,}. Nothing was "
            "written. Give the tensors shorter names with rename="
        )
    return Layout(files, index)


def _groups(tensors: Sequence[OutTensor], max_shard_bytes: int, most_head: int) -> Iterator[list[OutTensor]]:
    """Yield the tensors of each file of a folder: neither its tensors nor its header get too large."""
    for batch in batches_of(tensors, max_shard_bytes):
        first = head = 0
        for at, tensor in enumerate(batch):
            entry = entry_bytes(tensor.name, tensor.shape)
            if at > first and head + entry > most_head:
                yield batch[first:at]
                first, head = at, 0
            head += entry
        yield batch[first:]


def _safetensors_file(name: str, tensors: Sequence[OutTensor], texts: Mapping[str, str]) -> OutFile:
    # Large elements first: so each tensor begins at a multiple of its element's size, as readers need it.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    head, offsets, size = header_of(((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered), texts)
    if len(head) > HEADER_LIMIT:
        raise CheckpointError(
            f"the names and shapes of tensors in {name} would make a header of {len(head):,} bytes. safetensors allows "
            f"{HEADER_LIMIT:,}. Nothing was written. Export to a folder, which is split into several files, or "
            "give the tensors shorter names with rename="
        )
    return OutFile(name, size, ((0, head),), tuple(ordered), offsets)


def _torch_file(name: str, tensors: Sequence[OutTensor], ties: Mapping[str, str]) -> OutFile:
    pieces, offsets, size = torch_file_of(((one.name, one.dtype, one.shape) for one in tensors), ties)
    ordered = sorted(tensors, key=lambda tensor: offsets[tensor.name])
    return OutFile(name, size, tuple(pieces), tuple(ordered), offsets)
