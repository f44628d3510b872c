"""The data path in one file: what planners, storage and devices ask of each other.

Saving: a planner that is a ``SaveSource`` gets shards from a ``TensorAccess``; storage writes them into the ``Sink``
of a ``Folder``. Loading: storage reads ``Window``s of a ``Folder`` and hands tensors to a planner that is a
``LoadSink``, which puts them on devices through a ``TensorAccess``; an ``ElementSink`` takes them as they were read. A
snapshot's ``SnapshotData`` stands in for the tensor during an async save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt
import torch
import xxhash
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from torch_xla_ckpt.layout import Box, TensorLayout
from torch_xla_ckpt.reports import RequestCounts

Bytes = bytes | memoryview
Elements = npt.NDArray[Any]
"""Elements of a tensor, as a numpy array of integers of their size. numpy lacks many of torch's dtypes."""


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
                by padding in each dimension. It may have strides, and lie in a memory map. Replicas share one tensor.
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

        The tensor has the read's shape, often with strides: it may be a part of a saved chunk. The storage reader calls
        ``commit_tensor`` in either case.
        """

    def buffer_bytes(self, key: str) -> int:
        """Return the bytes of host memory that a tensor's buffers take until all its reads are committed."""


class ElementSink(Protocol):
    """Takes the elements of tensors from the memory that they were read into. Many threads call its methods."""

    def take(self, read_item: ReadItem, elements: Elements) -> None:
        """Take the elements of a read, which have been checked.

        Args:
            read_item: the read.
            elements: an array of the read's shape, often with strides. Its numpy type is as wide as the tensor's dtype.
                The memory is only valid during the call.
        """

    def buffer_bytes(self, key: str) -> int:
        """Return the bytes of host memory that a tensor's buffers take until all its elements have been taken."""


@dataclass(frozen=True)
class Window:
    """A view of a file's bytes, and the byte ranges in it that will be read.

    Args:
        name: the file's name.
        start: the view's first byte in the file.
        stop: the end of the view in the file.
        parts: the byte ranges to read, ascending, as pairs of start and stop in the file. Other bytes of the view may
            hold any values.
    """

    name: str
    start: int
    stop: int
    parts: tuple[tuple[int, int], ...]


class Entry(NamedTuple):
    """A file in the listing of a folder.

    Args:
        size: the file's size in bytes.
        modified: the time of the last write, in seconds of the storage's clock; None if the storage does not tell.
    """

    size: int
    modified: float | None


@dataclass(frozen=True)
class Version:
    """The version of a file that was read, to be compared before the file is replaced.

    Args:
        digest: a digest of the file's bytes; None if there was no file.
        end: the file's last bytes, at most ``ENDING`` of them.
        tag: the store's name for this version, an ETag for example; None if the store has none.
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
    def of_pieces(cls, pieces: Iterable[Bytes]) -> Version:
        """Return the version of a file that holds these pieces. A piece need not live longer than its turn."""
        hasher, end = xxhash.xxh3_128(), b""
        for piece in pieces:
            hasher.update(piece)
            end = (end + piece[-cls.ENDING :])[-cls.ENDING :]
        return cls(hasher.digest(), end)

    @classmethod
    def of_end(cls, size: int, end: bytes) -> Version:
        """Return the version of a file whose last bytes tell it from every other file.

        Args:
            size: the size of the file in bytes.
            end: the last bytes.
        """
        return cls(b"%d bytes, %s" % (size, xxhash.xxh3_128_digest(end)), end)

    @classmethod
    def none(cls) -> Version:
        """Return the version of a missing file."""
        return cls(None)

    @property
    def exists(self) -> bool:
        """Whether there was a file."""
        return self.digest is not None

    def is_same(self, other: Version) -> bool:
        """Return whether both versions hold the same bytes, or both files were missing."""
        return self.digest == other.digest


class Sink(Protocol):
    """A file being written."""

    def write(self, data: Bytes) -> None:
        """Append bytes to the file."""

    def close(self) -> None:
        """Finish the file. If its folder syncs, the file is on stable storage afterwards."""

    def abandon(self) -> None:
        """Give up the file, and remove it if possible."""


class Folder(Protocol):
    """A folder of files, local or remote. Every file is addressed by its name in the folder.

    Attributes:
        url: the folder's absolute path or URL, for people.
        remote: whether the files are behind requests to a store; False on local disks.
        refuses_parts: whether the storage refuses a put that loses bytes on the way; S3 compares lengths and checksums.
    """

    url: str
    remote: bool
    refuses_parts: bool

    def make(self) -> None:
        """Create the folder if it does not exist."""

    def settle(self) -> None:
        """Wait for earlier requests of this process that may still replace or remove ``.metadata``.

        These are requests that exceeded their time limit. The store may carry them out later.

        Raises:
            CheckpointError: a request still runs after the time limit of one request.
        """

    def has_late_puts(self) -> bool:
        """Return whether a put of this process that was given up may still be carried out."""
        return False

    def counts(self) -> RequestCounts:
        """Return the requests to the store so far; none for local disks."""

    def names(self) -> list[str]:
        """Return the names of all files; none if the folder does not exist."""

    def listing(self) -> dict[str, Entry]:
        """Return all files by name, with their sizes and times."""

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder. A link to a folder counts."""

    def is_file(self, name: str) -> bool:
        """Return whether there is a file of this name, and not a folder or nothing."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        """Return the names of files that are not here, or have another size.

        Args:
            files: the sizes in bytes of the files to look for, by name.
            listed: the names of the files in a listing made just now, or the listing. Default: the folder makes a
                listing if it needs one.
        """

    def read(self, name: str) -> bytes:
        """Return the bytes of a whole file.

        Raises:
            FileNotFoundError: there is no such file.
            NotAFile, IsADirectoryError: the name belongs to something else.
        """

    def version(self, name: str) -> Version:
        """Return the current version of a file, which may be missing."""

    def create(self, name: str, *, replaces: bool = False, unchanged: bool = False) -> Sink:
        """Create a file and open it for writing.

        Args:
            name: the file's name.
            replaces: whether there may be an older file, which stays if the new one is given up. In stores only; on
                local disks, an older file is an error.
            unchanged: True if memory that is written stays unchanged until the file is closed, and the name is used
                once. Then a store copies nothing, and sends nothing before the file is closed. Default: False.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. A power failure may undo the write."""

    def replace(
        self,
        name: str,
        data: Iterable[Bytes],
        temporary: str,
        *,
        expected: Version | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Write a whole file in one step: after a crash, the file has the old bytes or the new ones.

        Args:
            name: the file's name.
            data: the new bytes, in pieces. They are taken once.
            temporary: the name of a temporary file, for storage that needs one.
            expected: the version that the file must have; default: any. Comparing and replacing is one step on local
                disks, in S3 and in memory. Elsewhere it is one step only if the expected file is missing.
            check: a function that is called before the file is replaced, and prevents this if it raises. With
                ``expected`` on a local disk, the call is part of the one step.

        Raises:
            FileChanged: the file is another version.
        """

    def append(self, name: str, line: bytes) -> None:
        """Append a line to a file, and create the file if it is missing.

        Where files cannot grow, the whole file is written again.
        """

    def flush(self) -> None:
        """If the folder syncs, put the names of new files on stable storage."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files. Files that are missing are ignored.

        Raises:
            OSError: some files are still there.
        """

    def abort_uploads(self, matches: Callable[[str], bool]) -> None:
        """Abort unfinished uploads of dead processes, which are invisible but cost money.

        Args:
            matches: a function that returns whether to abort the uploads of a file, given its name.
        """

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        """Return the bytes of each window; fewer where the file ends before. Some views may be read-only.

        Raises:
            FileNotFoundError, NotAFile, IsADirectoryError: naming the file in ``filename``.
        """

    def forget(self, name: str, start: int, stop: int) -> None:
        """Allow the folder to drop bytes of a file from memory. They will not be read again."""

    def release(self) -> None:
        """Drop everything that the folder keeps for further views. Views that were returned stay valid."""
