"""Reading all of a checkpoint to find what is damaged."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, Damage, ReplacedCheckpointError
from torch_xla_ckpt.layout import Box, covers_exactly, find_flaws
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import METADATA, Archive, ArchiveError
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex, read_index, version_of
from torch_xla_ckpt.storage.file_errors import NOT_A_FILE, TRANSIT, NotAFile
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.limits import default_threads
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.manifest import Stored, checksum, foreign
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.ranges import MAX_GAP

logger = logging.getLogger(__name__)

_READ_BYTES = 32 << 20
_RESTARTS = 10  # for a checkpoint that is replaced meanwhile
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
        checked_by: "xxh3_64", or "crc32" for a checkpoint without a manifest.
        unchecked: keys of items that have bytes without any checksum. Damage of these bytes cannot be found.
        bytes_unchecked: bytes of these items.
    """

    path: str
    damages: tuple[Damage, ...]
    incomplete: Mapping[str, str]
    files: int
    bytes_read: int
    checked_by: str
    unchecked: tuple[str, ...] = ()
    bytes_unchecked: int = 0

    @property
    def ok(self) -> bool:
        """Whether no damage was found. What is ``unchecked`` may be damaged all the same."""
        return not self.damages and not self.incomplete

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that cannot be trusted."""
        damaged = (key for damage in self.damages for key in damage.keys)
        return tuple(dict.fromkeys([*damaged, *self.incomplete]))

    def __str__(self) -> str:
        found = [*map(str, self.damages), *(f"{key!r}: {what}" for key, what in self.incomplete.items())]
        head = f"{self.path}: {self.files} files, {self.bytes_read:,} bytes, checked by {self.checked_by}: "
        if not self.ok:
            return head + "DAMAGED\n  " + "\n  ".join([*found, *self._not_checked()])
        return head + (", ".join(["no damage found", *self._not_checked()]) if self.unchecked else "all as written")

    def _not_checked(self) -> list[str]:
        if not self.unchecked:
            return []
        shown = ", ".join(map(repr, self.unchecked[:5]))
        more = f" and {len(self.unchecked) - 5} more" if len(self.unchecked) > 5 else ""
        return [f"NOT CHECKED, because they have no checksum: {self.bytes_unchecked:,} bytes of {shown}{more}"]


def verify(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, progress: bool = False
) -> VerifyReport:
    """Read a whole checkpoint and name every damaged key, file and byte range.

    Checkpoints of ``ShardWriter`` are held against their manifest: every byte of every file counts. Those of stock DCP
    have no checksums beside the CRC-32 in their archives, which nothing else reads; that is checked for them.
    Tensors in a checkpoint of ours without its manifest have none: the report names them as ``unchecked``. It takes no
    process group and no device.

    Args:
        path: a local folder or any fsspec URL.
        storage_options: for fsspec's filesystem.
        progress: show a progress bar on a terminal when it takes long. Needs tqdm.

    Raises:
        CheckpointError: there is no checkpoint, or the storage does not give access to all of it.
        UnsafeObjectError: ``.metadata`` names something that could run code.
    """
    folder = open_folder(Location.of(path, storage_options))
    for _ in range(_RESTARTS):
        try:
            report = _report(folder, progress)
        except FileNotFoundError:
            continue  # it was removed or replaced since its metadata was first seen
        except CheckpointError:
            raise
        except Exception as error:
            raise _not_read(folder, f"{METADATA} or the manifest", error) from error
        if report is not None:
            return report
    raise ReplacedCheckpointError(
        f"the checkpoint in {folder.url} was replaced {_RESTARTS} times while it was verified. Verify it while nothing "
        "is saved there"
    )


def _report(folder: Folder, progress: bool) -> VerifyReport | None:
    """What is damaged; None if the checkpoint was replaced meanwhile."""
    ranks = _ranks(folder)
    before = [version_of(folder, rank) for rank in ranks]
    report = _joined(folder, [_verify(folder, rank, progress) for rank in ranks])
    folder.release()
    # Only a checkpoint that is still there is damaged: a newer save removes the files of the one before it.
    return report if report.ok or before == [version_of(folder, rank) for rank in ranks] else None


def _ranks(folder: Folder) -> list[int | None]:
    """The ranks whose metadata there is; None stands for all of them together.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if version_of(folder) is not None:
        return [None]
    # Ranks that save without collectives have a checkpoint each in the one folder.
    own = sorted(int(match[1]) for name in folder.names() if (match := _RANKS_OWN.fullmatch(name)))
    if not own:
        raise CheckpointError(f"there is no checkpoint in {folder.url}: it has no {METADATA}")
    return [*own]


def _joined(folder: Folder, reports: Sequence[VerifyReport]) -> VerifyReport:
    return VerifyReport(
        folder.url,
        damages=tuple(damage for report in reports for damage in report.damages),
        incomplete={key: what for report in reports for key, what in report.incomplete.items()},
        files=sum(report.files for report in reports),
        bytes_read=sum(report.bytes_read for report in reports),
        checked_by=reports[0].checked_by,
        unchecked=tuple(dict.fromkeys(key for report in reports for key in report.unchecked)),
        bytes_unchecked=sum(report.bytes_unchecked for report in reports),
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
    read = 0
    unchecked: dict[str, int] = {}
    with (
        Progress("verifying", lambda: _total(by_file), progress) as bar,
        ThreadPoolExecutor(default_threads(remote=False)) as pool,
    ):
        checks = [
            pool.submit(_check_file, folder, name, items, sizes.get(name), bar)
            for name, items in sorted(by_file.items())
        ]
        for check in checks:
            one = check.result()
            damages += one.damages
            read += one.bytes_read
            for key, nbytes in one.unchecked:
                unchecked[key] = unchecked.get(key, 0) + nbytes
    checked_by = "xxh3_64" if found.manifest is not None else "crc32"
    incomplete = _incomplete(found.metadata)
    without = tuple(unchecked), sum(unchecked.values())
    return VerifyReport(folder.url, tuple(damages), incomplete, len(by_file), read, checked_by, *without)


def _committed(folder: Folder, rank: int | None, damages: list[Damage]) -> CheckpointIndex:
    """What the folder holds. If only one of ``.metadata`` and the manifest is damaged, the other one says what."""
    try:
        return read_index(folder, rank)
    except CorruptCheckpointError as error:
        try:
            found = read_index(folder, rank, verify=False)
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

    def check(self, data: memoryview) -> tuple[str | None, int]:
        """What is wrong with the bytes, and how many of them nothing checks."""
        if len(data) < self.stop - self.start:
            return "the file ends before", 0
        if self.checksum is None:
            return _check_archive(self.item, data)
        return None if checksum(data) == self.checksum else "the bytes do not fit their checksum", 0


class _Checked(NamedTuple):
    """What was found in one data file; ``unchecked`` has keys and numbers of bytes."""

    damages: list[Damage]
    bytes_read: int
    unchecked: list[tuple[str, int]]


def _check_file(
    folder: Folder, name: str, items: Sequence[tuple[str, Stored]], size: int | None, bar: Progress
) -> _Checked:
    keys = tuple(dict.fromkeys(key for key, _ in items))
    end = max(item.offset + (item.length if size is None else item.extent) for _, item in items)
    found = _Checked([], 0, [])
    try:
        actual = folder.size(name)
        if size is not None and actual > size:
            found.damages.append(Damage(name, size, actual, (), "the file has bytes that nobody wrote"))
        elif size is not None and actual < size:
            found.damages.append(Damage(name, actual, size, (), f"the file has {actual:,} bytes instead of {size:,}"))
        return _check_spans(folder, name, items, actual, found, bar)
    except FileNotFoundError:
        return _Checked([Damage(name, 0, end, keys, "the file is missing")], 0, [])
    except (NotAFile, IsADirectoryError, NotADirectoryError):
        return _Checked([Damage(name, 0, end, keys, NOT_A_FILE)], 0, [])
    except CheckpointError:
        raise
    except Exception as error:
        raise _not_read(folder, name, error) from error


def _not_read(folder: Folder, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot verify {folder.url}: reading {what} failed ({type(error).__name__}: {error}). This says nothing about "
        "the checkpoint. Check the access rights, the network and the store, and try again"
    )


def _check_spans(
    folder: Folder, name: str, items: Sequence[tuple[str, Stored]], actual: int, found: _Checked, bar: Progress
) -> _Checked:
    read = 0
    spans = sorted((span for key, item in items for span in _spans(key, item)), key=lambda span: span.start)
    for window, group in _windows(name, spans, actual):
        # An object store answers with an error when all that is asked for lies behind the object's end.
        (view,) = folder.view([window]) if window.start < actual else [memoryview(b"")]
        checked = _checked(name, window, group, view)
        if checked.damages and folder.remote and window.start < actual:
            (view,) = folder.view([window])
            first, checked = checked.damages[0], _checked(name, window, group, view)
            if not checked.damages:
                logger.warning(TRANSIT, folder.url, first)
        found.damages.extend(checked.damages)
        found.unchecked.extend(checked.unchecked)
        read += len(view)
        bar.advance(sum(span.stop - span.start for span in group))
        del view
        folder.forget(name, window.start, window.stop)
    return found._replace(bytes_read=read)


def _checked(name: str, window: Window, spans: Sequence[_Span], view: memoryview) -> _Checked:
    """Check the spans in a window of a file."""
    found = _Checked([], len(view), [])
    for span in spans:
        problem, unchecked = span.check(view[span.start - window.start : span.stop - window.start])
        if problem is not None:
            found.damages.append(Damage(name, span.start, span.stop, (span.key,), problem))
        if unchecked:
            found.unchecked.append((span.key, unchecked))
    return found


def _spans(key: str, item: Stored) -> Iterator[_Span]:
    if item.checksums is not None:
        for number in range(item.blocks):
            start, stop, expected = item.block(number)
            yield _Span(start, stop, key, item, expected)
    else:
        yield _Span(item.offset, item.offset + item.length, key, item, None)


def _windows(name: str, spans: Sequence[_Span], size: int) -> Iterator[tuple[Window, list[_Span]]]:
    """Neighbouring spans, some at a time, with what the file has of them."""
    group: list[_Span] = []
    for span in spans:
        if group and (span.start - group[-1].stop > MAX_GAP or span.stop - group[0].start > _READ_BYTES):
            yield _window(name, group, size), group
            group = []
        group.append(span)
    if group:
        yield _window(name, group, size), group


def _window(name: str, group: Sequence[_Span], size: int) -> Window:
    start = group[0].start
    stop = max(start, min(size, max(span.stop for span in group)))
    return Window(name, start, stop, ((start, stop),))


def _check_archive(item: Stored, view: memoryview) -> tuple[str | None, int]:
    """What is wrong with an item by the CRC-32 of its records, and how many bytes have none.

    The archive is parsed as it is for loading, so that what is checked is what would be loaded.
    """
    if item.transform_descriptors:
        return None, len(view)  # compressed or encrypted by an extension of DCP: there is no archive to look into
    try:
        archive = Archive(view)
    except ArchiveError as error:
        return f"no complete archive ({error})", 0
    if misfits := archive.misfits():
        return f"the record {misfits[0]} does not fit its CRC-32", 0
    return None, sum(len(archive[name]) for name in archive.unchecked())


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
