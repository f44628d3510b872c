"""Reading all of a checkpoint to find what is damaged."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, Damage
from torch_xla_ckpt.layout import Box, covers_exactly, find_flaws
from torch_xla_ckpt.storage.commit import Committed, committed, written_by
from torch_xla_ckpt.storage.files import Folder, Window, open_folder
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.manifest import Stored, checksum, foreign
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.ranges import MAX_GAP
from torch_xla_ckpt.storage.unpickle import METADATA

_READ_BYTES = 32 << 20
_RANKS_OWN = re.compile(r"__(\d+)" + re.escape(METADATA))


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found.

    Args:
        path: of the checkpoint.
        damages: each run of damaged bytes, with the keys that need them.
        incomplete: tensors whose chunks do not cover them exactly once, and where they do not.
        files: data files read.
        bytes_read: from them.
        checked_by: "xxh3_64", or "crc32" for a checkpoint of stock DCP.
    """

    path: str
    damages: tuple[Damage, ...]
    incomplete: Mapping[str, str]
    files: int
    bytes_read: int
    checked_by: str

    @property
    def ok(self) -> bool:
        return not self.damages and not self.incomplete

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that cannot be trusted."""
        damaged = (key for damage in self.damages for key in damage.keys)
        return tuple(dict.fromkeys([*damaged, *self.incomplete]))

    def __str__(self) -> str:
        found = [*map(str, self.damages), *(f"{key!r}: {what}" for key, what in self.incomplete.items())]
        head = f"{self.path}: {self.files} files, {self.bytes_read:,} bytes, checked by {self.checked_by}: "
        return head + ("all as written" if self.ok else "DAMAGED\n  " + "\n  ".join(found))


def verify(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, progress: bool = False
) -> VerifyReport:
    """Read a whole checkpoint and name every damaged key, file and byte range.

    Checkpoints of ``ShardWriter`` are held against their manifest: every byte of every file counts. Those of stock DCP
    have no checksums beside the CRC-32 in their archives, which nothing else reads; that is checked for them. It takes
    no process group and no device.

    Args:
        path: a local folder or any fsspec URL.
        storage_options: for fsspec's filesystem.
        progress: show a progress bar on a terminal when it takes long. Needs tqdm.

    Raises:
        CheckpointError: there is no checkpoint.
        UnsafeObjectError: ``.metadata`` names something that could run code.
    """
    folder = open_folder(Location.of(path, storage_options))
    names = folder.names()
    # Ranks that save without collectives have a checkpoint each in the one folder.
    own = [int(match[1]) for name in names if (match := _RANKS_OWN.fullmatch(name))]
    ranks: list[int | None] = [None] if METADATA in names else [*sorted(own)]
    if not ranks:
        raise CheckpointError(f"there is no checkpoint in {folder.url}: it has no {METADATA}")
    reports = [_verify(folder, rank, progress) for rank in ranks]
    folder.release()
    return VerifyReport(
        folder.url,
        damages=tuple(damage for report in reports for damage in report.damages),
        incomplete={key: what for report in reports for key, what in report.incomplete.items()},
        files=sum(report.files for report in reports),
        bytes_read=sum(report.bytes_read for report in reports),
        checked_by=reports[0].checked_by,
    )


def _verify(folder: Folder, rank: int | None, progress: bool) -> VerifyReport:
    damages: list[Damage] = []
    try:
        found = _committed(folder, rank, damages)
    except CorruptCheckpointError as error:
        return VerifyReport(folder.url, error.damages, {}, 0, 0, "xxh3_64")
    by_file: dict[str, list[tuple[str, Stored]]] = defaultdict(list)
    for index, place in (found.metadata.storage_data or {}).items():
        item = place if isinstance(place, Stored) else foreign(place)
        by_file[item.relative_path].append((index.fqn, item))
    sizes = found.manifest.files if found.manifest is not None else {}
    # Archives of ours have no CRC-32: without their manifest nothing can be checked but that they are there.
    with_crc = written_by(found.metadata) is None
    read = 0
    with (
        Progress("verifying", lambda: _total(by_file), progress) as bar,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):
        checks = [
            pool.submit(_check_file, folder, name, items, sizes.get(name), with_crc, bar)
            for name, items in sorted(by_file.items())
        ]
        for check in checks:
            bad, nbytes = check.result()
            damages += bad
            read += nbytes
    checked_by = "xxh3_64" if found.manifest is not None else "crc32"
    return VerifyReport(folder.url, tuple(damages), _incomplete(found.metadata), len(by_file), read, checked_by)


def _committed(folder: Folder, rank: int | None, damages: list[Damage]) -> Committed:
    """What the folder holds. If only one of ``.metadata`` and the manifest is damaged, the other one says what."""
    try:
        return committed(folder, rank)
    except CorruptCheckpointError as error:
        try:
            found = committed(folder, rank, verify=False)
        except CheckpointError:
            raise error from None
        every_key = tuple(found.metadata.state_dict_metadata)
        damages += [Damage(d.file, d.start, d.stop, every_key, d.what) for d in error.damages]
        return found


def _total(by_file: Mapping[str, Sequence[tuple[str, Stored]]]) -> int:
    every = (item for items in by_file.values() for _, item in items)
    return sum(item.length if item.checksums is None else item.extent for item in every)


class _Span(NamedTuple):
    """Bytes that are checked together: a block against its checksum, or a whole item of stock DCP."""

    start: int
    stop: int
    key: str
    item: Stored
    checksum: bytes | None
    with_crc: bool

    def problem(self, data: memoryview) -> str | None:
        if len(data) < self.stop - self.start:
            return "the file ends before"
        if self.checksum is None:
            return _crc_problem(self.item, data) if self.with_crc else None
        return None if checksum(data) == self.checksum else "the bytes do not fit their checksum"


def _check_file(
    folder: Folder, name: str, items: Sequence[tuple[str, Stored]], size: int | None, with_crc: bool, bar: Progress
) -> tuple[list[Damage], int]:
    """The damages of one data file, and how many bytes were read."""
    keys = tuple(dict.fromkeys(key for key, _ in items))
    end = max(item.offset + (item.length if size is None else item.extent) for _, item in items)
    try:
        actual = folder.size(name)
    except FileNotFoundError:
        return [Damage(name, 0, end, keys, "the file is missing")], 0
    damages: list[Damage] = []
    if size is not None and actual > size:
        damages.append(Damage(name, size, actual, (), "the file has bytes that nobody wrote"))
    read = 0
    spans = sorted((span for key, item in items for span in _spans(key, item, with_crc)), key=lambda span: span.start)
    for window, group in _windows(name, spans):
        # An object store answers with an error when all that is asked for lies behind the object's end.
        (view,) = folder.view([window]) if window.start < actual else [memoryview(b"")]
        for span in group:
            problem = span.problem(view[span.start - window.start : span.stop - window.start])
            if problem is not None:
                damages.append(Damage(name, span.start, span.stop, (span.key,), problem))
        read += len(view)
        bar.advance(sum(span.stop - span.start for span in group))
        del view
        folder.forget(name, window.start, window.stop)
    return damages, read


def _spans(key: str, item: Stored, with_crc: bool) -> Iterator[_Span]:
    if item.checksums is not None:
        for number in range(item.blocks):
            start, stop, expected = item.block(number)
            yield _Span(start, stop, key, item, expected, with_crc)
    else:
        yield _Span(item.offset, item.offset + item.length, key, item, None, with_crc)


def _windows(name: str, spans: Sequence[_Span]) -> Iterator[tuple[Window, list[_Span]]]:
    """Neighbouring spans, some at a time."""
    group: list[_Span] = []
    for span in spans:
        if group and (span.start - group[-1].stop > MAX_GAP or span.stop - group[0].start > _READ_BYTES):
            yield _window(name, group), group
            group = []
        group.append(span)
    if group:
        yield _window(name, group), group


def _window(name: str, group: Sequence[_Span]) -> Window:
    start, stop = group[0].start, max(span.stop for span in group)
    return Window(name, start, stop, ((start, stop),))


def _crc_problem(item: Stored, view: memoryview) -> str | None:
    """What is wrong with an item of stock DCP, by the CRC-32 of its records."""
    if item.transform_descriptors:
        return None  # compressed or encrypted by an extension of DCP: there is no archive to look into
    try:
        with zipfile.ZipFile(io.BytesIO(view)) as archive:
            record = archive.testzip()
    except Exception as error:  # zipfile raises many kinds for broken archives
        return f"no complete archive ({type(error).__name__}: {error})"
    return None if record is None else f"the record {record} does not fit its CRC-32"


def _incomplete(metadata: Metadata) -> dict[str, str]:
    """Tensors that the saved chunks do not cover exactly once."""
    found: dict[str, str] = {}
    lost = _dcp.lost(metadata, metadata.state_dict_metadata)
    for key, saved in metadata.state_dict_metadata.items():
        if key in lost:
            found[key] = "; ".join(f"{part or 'the object'} is listed, but stored in no file" for part in lost[key][:3])
        elif isinstance(saved, TensorStorageMetadata) and not _dcp.is_one_chunk(saved):
            whole, chunks = Box.whole(saved.size), _dcp.boxes_of(saved)
            if not covers_exactly(whole, chunks):
                found[key] = "; ".join(map(str, find_flaws(whole, chunks)[:3]))
    return found
