"""The data path in one file: what planners, storage and devices ask of each other.

Saving: a planner that is a ``SaveSource`` gets shards from a ``TensorAccess``; storage writes them into the ``Sink``
of a ``Folder``. Loading: storage reads ``Window``s of a ``Folder`` and hands tensors to a planner that is a
``LoadSink``, which puts them on devices through a ``TensorAccess``. A snapshot's ``SnapshotData`` stands in for the
tensor during an async save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
import xxhash
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from torch_xla_ckpt.layout import Box, TensorLayout

Bytes = bytes | memoryview


class TensorAccess(Protocol):
    """Reads and writes the local shards of one kind of tensor."""

    def settle(self) -> None:
        """Start and await all pending computation, so that layouts are final and data can be fetched."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        """Return the layout of this process's shards. Moves no data."""

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        """Return the data of each distinct box of a part in host memory, without padding.

        The data may share memory with the tensor.
        """

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        """Return the bytes of host memory that fetching a part takes."""

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return this process's part of the tensor as a host tensor that shares its memory.

        None if there is no such host tensor. A load can read directly into it.
        """

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        """Replace the tensor's data in place. As after ``copy_``, views see the new data, and autograd is told.

        Args:
            tensor: the tensor to write to.
            layout: the tensor's layout.
            shards: for each distinct box a host tensor of the layout's shard shape: the elements of the box, followed
                by padding in each dimension. Replicas share one host tensor.
        """


class SnapshotData(Protocol):
    """The copy of one tensor in a snapshot, on the devices or in host memory."""

    def layout(self) -> TensorLayout:
        """Wait for the copy, and return the layout of this process's shards."""

    def fetch(self, part: int) -> Mapping[Box, torch.Tensor]:
        """Return the data of each distinct box of a part, in host memory."""

    def host_bytes(self, part: int) -> int:
        """Return the bytes of host memory that fetching a part takes."""


@runtime_checkable
class SaveSource(Protocol):
    """A planner that tells storage what resolving an item costs, and how its tensors are sharded."""

    def part(self, item: WriteItem) -> int:
        """Return the number of the part that is fetched with the item. The parts of a tensor are fetched one by one."""

    def host_bytes(self, key: str, part: int) -> int:
        """Return the bytes of host memory that fetching a part takes: all of it that this process holds."""

    def sharding(self, key: str) -> str:
        """Return a description of the tensor's sharding on this process's devices."""


@runtime_checkable
class LoadSink(Protocol):
    """A planner that can adopt the tensor that was read, which saves a copy into a buffer.

    ``resolve_tensor`` and ``adopt`` are called from several threads, while another thread commits.
    """

    def adopt(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """Use the memory of ``tensor`` as the buffer of ``read_item``; return False if it does not fit.

        The storage reader calls ``commit_tensor`` in either case.
        """

    def buffer_bytes(self, key: str) -> int:
        """Return the bytes of host memory that a tensor's buffers take until all its reads are committed."""


@dataclass(frozen=True)
class Window:
    """Bytes of a file that are wanted together.

    Args:
        name: of the file.
        start, stop: the bytes of which a view is wanted.
        parts: the byte ranges within them that will be looked at, ascending; the others may hold anything.
    """

    name: str
    start: int
    stop: int
    parts: tuple[tuple[int, int], ...]


class Entry(NamedTuple):
    """A file in a listing.

    Args:
        size: bytes.
        modified: when it was last written, in seconds of the storage's clock; None if the storage does not tell.
    """

    size: int
    modified: float | None


@dataclass(frozen=True)
class Version:
    """What a file held when it was read, to be compared before the file is replaced.

    Args:
        digest: a digest of its bytes; None if there was no file.
        end: its last bytes, at most ``ENDING`` of them.
        tag: the store's own name for this version, an ETag for example; None if the store has none.
    """

    digest: bytes | None
    end: bytes = b""
    tag: str | None = None

    ENDING: ClassVar[int] = 256

    @classmethod
    def of(cls, data: bytes, tag: str | None = None) -> Version:
        """Return the version of a file that holds ``data``."""
        return cls(xxhash.xxh3_128_digest(data), data[-cls.ENDING :], tag)

    @classmethod
    def none(cls) -> Version:
        """Return the version of a file that is not there."""
        return cls(None)

    @property
    def exists(self) -> bool:
        return self.digest is not None

    def is_same(self, other: Version) -> bool:
        """Whether both hold the same bytes, or both are not there."""
        return self.digest == other.digest


class Sink(Protocol):
    """A file being written."""

    def write(self, data: Bytes) -> None: ...

    def close(self) -> None:
        """Finish the file; with ``sync`` it is on stable storage afterwards."""

    def abandon(self) -> None:
        """Leave nothing behind, as far as that is possible."""


class Folder(Protocol):
    """Files by name, all in one place."""

    url: str
    remote: bool

    def make(self) -> None:
        """Create the folder if it is not there."""

    def settle(self) -> None:
        """Wait for earlier requests of this process that may still replace or remove the checkpoint here.

        They were given up on, because the store did not answer in time.

        Raises:
            CheckpointError: they do not end within the time limit of one request.
        """

    def names(self) -> list[str]:
        """All files; none when there is no folder."""

    def listing(self) -> dict[str, Entry]:
        """All files by name, with their sizes and times."""

    def folders(self) -> list[str]:
        """Return the names of the folders in this one. A link counts as what it leads to."""

    def size(self, name: str) -> int: ...

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        """Return which of these files are not here.

        Args:
            files: names, with sizes in bytes.
            listed: the names that a listing made just now has, where there was one.
        """

    def read(self, name: str) -> bytes: ...

    def version(self, name: str) -> Version:
        """Return what a file holds now, whether it is there or not."""

    def create(self, name: str) -> Sink: ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. A power failure may undo it."""

    def replace(
        self,
        name: str,
        data: bytes,
        temporary: str,
        *,
        expected: Version | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Write a whole file in one step: afterwards, and after a crash, it is the old one or the new one.

        Args:
            name: the file.
            data: its new bytes.
            temporary: the file to use on the way where the storage needs one.
            expected: replace the file only if it still is this version. Comparing and replacing is one step on local
                disks, in S3 and in memory. Elsewhere it is one step only for a file that is not there yet.
            look: called before the file is replaced, and what it raises is raised. With ``expected`` on a local disk
                it is part of that one step.

        Raises:
            FileChanged: the file is another version.
        """

    def append(self, name: str, line: bytes) -> None:
        """Add a line to a file, which is made if it is not there. Where files cannot grow, it is written anew."""

    def flush(self) -> None:
        """With ``sync``: make the names of new files stable."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are gone already are fine.

        Raises:
            OSError: some are still there.
        """

    def abort_uploads(self, of: Callable[[str], bool]) -> None:
        """Drop what dead processes have uploaded of files with such names, which nobody sees but the bill."""

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        """The bytes of each window; shorter where the file ends before.

        Raises:
            FileNotFoundError, NotAFile, IsADirectoryError: naming the file in ``filename``.
        """

    def forget(self, name: str, start: int, stop: int) -> None:
        """Say that these bytes will not be looked at again, so that they need not stay in memory."""

    def release(self) -> None:
        """Let go of what was kept for further views. Views stay valid."""
