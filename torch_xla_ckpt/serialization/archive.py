"""A strict parser of the zip archives that ``torch.save`` writes.

Zip files can be read in several ways: from the central directory or from the local headers, with or without bytes
before them. Here directory and headers must agree, and the members must cover the file from its first byte to the
central directory without a gap. Only uncompressed archives as torch and Python write them are accepted.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_EXTRA = struct.Struct("<HH")

_DESCRIPTOR = 0x0008  # sizes follow the data
_UTF8 = 0x0800
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_ZIP64, _PADDING = 0x0001, 0x4246  # extra fields: 64-bit sizes, and torch's "FB", which aligns data
_VERSION = b"3"


class ArchiveError(ValueError):
    """The bytes are no archive as ``torch.save`` writes it."""


class Member(NamedTuple):
    """A file in the archive.

    Args:
        name: the file's name, without the folder that all members share.
        start: position of the file's first byte in the archive.
        stop: position behind the file's last byte.
        crc: CRC-32 of the bytes; 0 if the writer left it out.
    """

    name: str
    start: int
    stop: int
    crc: int


class Archive:
    """The members of an archive.

    Args:
        data: the archive, from its first byte to its last.

    Raises:
        ArchiveError: the bytes are no archive as ``torch.save`` writes it.
    """

    def __init__(self, data: memoryview):
        self._data = data
        try:
            self.members: Mapping[str, Member] = _members(data)
        except (struct.error, UnicodeDecodeError) as error:
            raise ArchiveError(f"it is no complete zip archive ({error})") from error
        if bytes(self["version"]).strip() != _VERSION:
            raise ArchiveError("its format does not have version 3, which torch has written since 1.6")

    def __getitem__(self, name: str) -> memoryview:
        member = self.members.get(name)
        if member is None:
            raise ArchiveError(f"it has no {name}")
        return self._data[member.start : member.stop]

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def check(self, forget: Callable[[int, int], object] = lambda start, stop: None) -> tuple[list[str], list[str]]:
        """Compare all members with their CRC-32.

        Args:
            forget: called with the start and stop of bytes that were read and will not be read again. Default: nothing
                is called.

        Returns:
            The names of members whose bytes do not match their CRC-32, and of members that have bytes and no CRC-32.
        """
        misfits: list[str] = []
        unchecked: list[str] = []
        for member in self.members.values():
            crc = 0
            for start in range(member.start, member.stop, _PIECE):
                stop = min(start + _PIECE, member.stop)
                crc = zlib.crc32(self._data[start:stop], crc)
                forget(start, stop)
            if crc != member.crc:
                (misfits if member.crc else unchecked).append(member.name)
        return misfits, unchecked


_PIECE = 16 << 20  # bytes whose CRC-32 is computed at a time
_HEADER = 512  # bytes of a member's header that are read with its name: more than torch's padding needs


def parsed_ranges(data: memoryview) -> list[tuple[int, int]]:
    """Return the byte ranges of an archive that describe its tensors: all bytes but those of the tensors.

    Args:
        data: a view as large as the archive. Only its end needs to have the archive's bytes. If the directory is not
            among them, the result is the directory's range alone.

    Raises:
        ArchiveError: the end is not that of an archive.
    """
    try:
        at, stop, _ = _directory(data)
        directory = at, len(data)
        if bytes(data[at : at + 4]) != b"PK\1\2":
            return [directory]
        entries = list(_entries(data, at, stop))
    except struct.error as error:
        raise ArchiveError(f"it is no complete zip archive ({error})") from error
    ranges = [directory]
    for entry in entries:
        head = entry.offset + _HEADER + len(entry.name)
        is_data = b"/data/" in entry.name
        ranges.append((entry.offset, head if is_data else head + entry.size))
        ranges.append((entry.offset + entry.size, head + entry.size))  # what may follow the member
    inside = sorted((max(0, start), min(stop, len(data))) for start, stop in ranges if start < len(data))
    merged: list[tuple[int, int]] = []
    for start, stop in inside:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


class _Entry(NamedTuple):
    """A member's entry in the central directory."""

    name: bytes
    flags: int
    crc: int
    size: int
    offset: int


def _members(data: memoryview) -> dict[str, Member]:
    at, stop, count = _directory(data)
    entries = list(_entries(data, at, stop))
    _require(len(entries) == count, "its directory does not list as many members as it says")
    _require(bool(entries), "it is empty")
    members: dict[str, Member] = {}
    folder = entries[0].name.partition(b"/")[0] + b"/"
    position = 0
    for number, entry in enumerate(entries):
        end = entries[number + 1].offset if number + 1 < len(entries) else at
        _require(entry.offset == position, "bytes lie before or between its members")
        start = _data_start(data, entry)
        _check_end(data, entry, start + entry.size, end)
        _require(entry.name.startswith(folder), "its members lie in several folders")
        name = entry.name[len(folder) :].decode()
        _require(bool(name), "a member has no name")
        members[name] = Member(name, start, start + entry.size, entry.crc)
        position = end
    _require(len({name.casefold() for name in members}) == count, "two members have one name")
    return members


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ArchiveError(problem)


def _directory(data: memoryview) -> tuple[int, int, int]:
    """Return where the central directory begins and ends, and the number of members that it lists."""
    end = len(data) - _END.size
    _require(end >= 0, "it is too short for a zip archive")
    mark, disk, first, here, count, size, at, comment = _END.unpack_from(data, end)
    _require(mark == b"PK\5\6" and not comment, "it does not end as a zip archive without a comment does")
    _require(disk == first == 0 and here == count, "it has several parts")
    stop = end
    before = end - _LOCATOR.size
    if before >= 0 and bytes(data[before : before + 4]) == b"PK\6\7":
        _, disk, where, disks = _LOCATOR.unpack_from(data, before)
        stop = before - _END64.size
        _require(stop >= 0 and disk == 0 and disks == 1 and where == stop, "its 64-bit end lies elsewhere")
        mark, length, _, _, disk, first, here64, count64, size64, at64 = _END64.unpack_from(data, stop)
        is_valid = mark == b"PK\6\6" and length == _END64.size - 12 and disk == first == 0 and here64 == count64
        agrees = count in (count64, _MAX_16) and size in (size64, _MAX_32) and at in (at64, _MAX_32)
        _require(is_valid and agrees, "its 64-bit end differs from its end")
        count, size, at = count64, size64, at64
    _require(at + size == stop, "bytes lie before or behind its directory")
    return at, stop, count


def _entries(data: memoryview, at: int, stop: int) -> Iterator[_Entry]:
    while at < stop:
        (mark, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment, disk, _, _, offset) = (
            _CENTRAL.unpack_from(data, at)
        )
        _require(mark == b"PK\1\2", "its directory is damaged")
        _require(not comment and not disk, "a member has a comment, or lies in another part of the archive")
        _require(not method and not flags & ~(_DESCRIPTOR | _UTF8), "a member is compressed or encrypted")
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_size
        at = extra_at + extra_size
        _require(at <= stop, "its directory is damaged")
        wide = _wide(data[extra_at:at])
        needed = [value == _MAX_32 for value in (size, packed, offset)]
        _require(len(wide) == 8 * sum(needed), "a 64-bit field does not match its entry")
        values = iter(struct.unpack(f"<{len(wide) // 8}Q", wide))
        size, packed, offset = (next(values) if n else v for n, v in zip(needed, (size, packed, offset)))
        _require(packed == size, "a member is compressed")
        yield _Entry(bytes(data[name_at:extra_at]), flags, crc, size, offset)


def _wide(extra: memoryview) -> bytes:
    """Return the 64-bit field in a member's extra fields; b"" if there is none."""
    wide: bytes | None = None
    while extra:
        kind, size = _EXTRA.unpack_from(extra)
        field, extra = extra[_EXTRA.size : _EXTRA.size + size], extra[_EXTRA.size + size :]
        _require(len(field) == size and kind in (_ZIP64, _PADDING), "a member has an unknown extra field")
        if kind == _ZIP64:
            _require(wide is None, "a member has two 64-bit fields")
            wide = bytes(field)
    return wide or b""


def _data_start(data: memoryview, entry: _Entry) -> int:
    """Return where a member's bytes begin. Its local header must agree with the directory."""
    mark, _, flags, method, _, _, crc, packed, size, name_size, extra_size = _LOCAL.unpack_from(data, entry.offset)
    name_at = entry.offset + _LOCAL.size
    start = name_at + name_size + extra_size
    name = bytes(data[name_at : name_at + name_size])
    _require(
        mark == b"PK\3\4" and name == entry.name and flags == entry.flags and not method and start <= len(data),
        "a member's header differs from the directory",
    )
    wide = _wide(data[name_at + name_size : start])
    # torch repeats the sizes (the second may be 0), the offset, or both; Python repeats the sizes.
    values = set(struct.unpack(f"<{len(wide) // 8}Q", wide)) if len(wide) % 8 == 0 else {-1}
    wide_values = {entry.size, entry.offset, *([0] if flags & _DESCRIPTOR else [])}
    _require(values <= wide_values, "a 64-bit field does not match its member")
    sizes = {0, entry.size} if flags & _DESCRIPTOR else {entry.size}
    sizes |= {_MAX_32} if wide else set()
    crcs = {0, entry.crc} if flags & _DESCRIPTOR else {entry.crc}
    _require({packed, size} <= sizes and crc in crcs, "a member's header differs from the directory")
    return start


def _check_end(data: memoryview, entry: _Entry, stop: int, end: int) -> None:
    """Check the bytes between a member and the next one: the member's sizes again, or none."""
    rest = bytes(data[stop:end]) if stop <= end <= stop + 64 else b"?"
    if entry.flags & _DESCRIPTOR:
        forms = [struct.pack("<4sIQQ", b"PK\7\x08", entry.crc, entry.size, entry.size)]
        if entry.size <= _MAX_32:
            forms.append(struct.pack("<4sIII", b"PK\7\x08", entry.crc, entry.size, entry.size))
        _require(rest in forms, "the bytes behind a member differ from the directory")
    else:
        _require(not rest, "bytes lie between its members")
