"""Checks of one data file: every block against its checksum, or every archive against its CRC-32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch_xla_ckpt.errors import CheckpointError, Damage
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import Archive, ArchiveError
from torch_xla_ckpt.storage.file_errors import NOT_A_FILE, TRANSIT, NotAFile
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.ranges import MAX_GAP
from torch_xla_ckpt.storage.read_bytes import BAD_CHECKSUM, ENDS_EARLY, MISSING, asked_again_if_missing
from torch_xla_ckpt.storage.stored import Stored, checksum

logger = logging.getLogger(__name__)

_READ_BYTES = 16 << 20


class FileCheck(NamedTuple):
    """The result for a part of a data file.

    Args:
        damages: each run of damaged bytes, or the whole file if it cannot be opened.
        bytes_read: bytes read from the file.
        unchecked: key and number of bytes for each item with bytes that have no checksum.
    """

    damages: list[Damage]
    bytes_read: int
    unchecked: list[tuple[str, int]]


class _Span(NamedTuple):
    """Bytes that are checked together: a block with its checksum, or a whole item of stock DCP."""

    start: int
    stop: int
    key: str
    item: Stored
    checksum: bytes | None

    def check(self, data: memoryview, forget: Callable[[int, int], object]) -> tuple[str | None, int]:
        """Return the problem of the bytes, or None, and the number of bytes that have no checksum.

        Args:
            data: the bytes.
            forget: called with the start and stop, in the file, of bytes that were checked.
        """
        if len(data) < self.stop - self.start:
            return ENDS_EARLY, 0
        if self.checksum is None:
            return _check_archive(self.item, data, forget)
        return None if checksum(data) == self.checksum else BAD_CHECKSUM, 0


def checks_of(
    folder: Folder, name: str, items: Sequence[tuple[str, Stored]], size: int | None, bar: Progress
) -> Iterator[Callable[[], FileCheck]]:
    """Yield the checks of a data file, which several threads may run. Each reads some MiB, or one item of stock DCP.

    Args:
        folder: the checkpoint's folder.
        name: the file's name.
        items: key and place of each item in the file.
        size: the file's size in bytes by the manifest; None for a checkpoint without a manifest.
        bar: the progress bar.

    Raises (also from the checks):
        CheckpointError: the storage does not give access to the file.
    """
    keys = tuple(dict.fromkeys(key for key, _ in items))
    end = max(item.offset + (item.length if size is None else item.extent) for _, item in items)

    def whole(problem: str) -> FileCheck:
        return FileCheck([Damage(name, 0, end, keys, problem)], 0, [])

    def guarded(check: Callable[[], FileCheck]) -> FileCheck:
        try:
            return asked_again_if_missing(folder, check)
        except FileNotFoundError:
            return whole(MISSING)
        except (NotAFile, IsADirectoryError, NotADirectoryError):
            return whole(NOT_A_FILE)
        except CheckpointError:
            raise
        except Exception as error:
            raise cannot_verify(folder, name, error) from error

    actual = 0

    def opened() -> FileCheck:
        nonlocal actual
        actual = folder.size(name)
        damages = _size_damages(name, actual, size)
        if damages and not folder.is_file(name):
            return whole(NOT_A_FILE)
        return FileCheck(damages, 0, [])

    first = guarded(opened)
    if first.damages:
        yield lambda: first
    if first.damages and first.damages[0].what in (MISSING, NOT_A_FILE):
        return
    spans = sorted((span for key, item in items for span in _spans(key, item)), key=lambda span: span.start)
    for window, group in _windows(name, spans, actual):
        yield partial(guarded, partial(_check_group, folder, name, window, group, actual, bar))


def _size_damages(name: str, actual: int, size: int | None) -> list[Damage]:
    if size is not None and actual > size:
        return [Damage(name, size, actual, (), "the file has bytes that no save wrote")]
    if size is not None and actual < size:
        return [Damage(name, actual, size, (), f"the file has {actual:,} bytes instead of {size:,}")]
    return []


def check_archive(folder: Folder, name: str, size: int, keys: tuple[str, ...], bar: Progress) -> FileCheck:
    """Check a whole ``torch.save`` file against the CRC-32 of its records.

    Args:
        folder: the file's folder.
        name: the file's name.
        size: the file's size in bytes.
        keys: the keys of the tensors in the file.
        bar: the progress bar.
    """
    (view,) = folder.view([Window(name, 0, size, ((0, size),))])
    problem, unchecked = _check_archive(Stored(name, 0, size), view, partial(folder.forget, name))
    bar.advance(size)
    damages = [] if problem is None else [Damage(name, 0, size, keys, problem)]
    return FileCheck(damages, size, [(name, unchecked)] if unchecked else [])


def cannot_verify(folder: Folder, what: str, error: Exception) -> CheckpointError:
    """Return the error for a file that cannot be read, which says nothing about its content.

    Args:
        folder: the checkpoint's folder.
        what: the file that was read.
        error: the error of the storage.
    """
    return CheckpointError(
        f"cannot verify {folder.url}: reading {what} failed ({type(error).__name__}: {error}). The checkpoint may be "
        "whole. Check the access rights, the network and the store, and try again"
    )


def _check_group(
    folder: Folder, name: str, window: Window, group: Sequence[_Span], actual: int, bar: Progress
) -> FileCheck:
    """Read a window of a file of ``actual`` bytes, and check the spans in it."""
    # An object store answers with an error when the whole range lies behind the object's end.
    (view,) = folder.view([window]) if window.start < actual else [memoryview(b"")]
    forget = partial(folder.forget, name)
    checked = _check_window(name, window, group, view, forget)
    if checked.damages and folder.remote and window.start < actual:
        (view,) = folder.view([window])
        first, checked = checked.damages[0], _check_window(name, window, group, view, forget)
        if not checked.damages:
            logger.warning(TRANSIT, folder.url, first)
    bar.advance(sum(span.stop - span.start for span in group))
    del view
    folder.forget(name, window.start, window.stop)
    return checked


def _check_window(
    name: str, window: Window, spans: Sequence[_Span], view: memoryview, forget: Callable[[int, int], object]
) -> FileCheck:
    """Check the spans in a window of a file. ``view`` holds the window's bytes."""
    found = FileCheck([], len(view), [])
    for span in spans:
        problem, unchecked = span.check(view[span.start - window.start : span.stop - window.start], forget)
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
    """Join neighbouring spans into windows of a file of ``size`` bytes."""
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


def _check_archive(item: Stored, view: memoryview, forget: Callable[[int, int], object]) -> tuple[str | None, int]:
    """Check an item against the CRC-32 of its records.

    The archive is parsed as it is for loading, so that the checked bytes are the loaded bytes.

    Returns:
        The problem, or None, and the number of bytes that have no CRC-32.
    """
    if item.transform_descriptors:
        return None, len(view)  # an extension of DCP compressed or encrypted the archive
    try:
        archive = Archive(view)
    except ArchiveError as error:
        return f"the item is no complete archive ({error})", 0
    misfits, unchecked = archive.check(lambda start, stop: forget(item.offset + start, item.offset + stop))
    if misfits:
        return f"the record {misfits[0]} does not match its CRC-32", 0
    return None, sum(len(archive[name]) for name in unchecked)
