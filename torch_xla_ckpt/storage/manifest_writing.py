"""The bytes of a manifest, in pieces. ``docs/format.md`` specifies the format.

A manifest with packed tensors has version 2, and others have version 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import xxhash

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.storage.manifest_tensors import KeptText, ListedText, PackedText, as_json, table_texts
from torch_xla_ckpt.storage.places import Places

FORMAT = "torch_xla_ckpt manifest"
PICKLED = "pickled"
"""Stands for planner data that only ``.metadata`` can hold."""

_PATHS = 1 << 10


def manifest_pieces(
    head: Mapping[str, Any],
    files: Mapping[str, int],
    planner_data: Any,
    catalog: _dcp.Catalog,
    places: Places,
    kept: KeptText,
) -> Iterator[bytes]:
    """Yield the bytes of a manifest: one JSON object whose last line holds the checksum of everything before.

    Args:
        head: the members that tell about the save as a whole.
        files: the size in bytes of each data file, by name, in the order of ``places.names``.
        planner_data: the planner's data: the path of each key, for DCP's planners and ours.
        catalog: everything that the checkpoint holds.
        places: where it lies.
        kept: the text that earlier saves of the catalog have made. New text is added.
    """
    hasher = xxhash.xxh3_64()
    for piece in _body(head, files, planner_data, catalog, places, kept):
        hasher.update(piece)
        yield piece
    yield b'\n"xxh3_64": "%s"}' % hasher.hexdigest().encode()


def _body(
    head: Mapping[str, Any],
    files: Mapping[str, int],
    planner_data: Any,
    catalog: _dcp.Catalog,
    places: Places,
    kept: KeptText,
) -> Iterator[bytes]:
    kept.fit(catalog, places)
    version = 2 if kept.packed else 1
    top = {"format": FORMAT, "version": version, **head, "files": [[name, size] for name, size in files.items()]}
    yield as_json(top)[:-1].encode("ascii") + b',"paths":'
    if catalog.has_paths(planner_data):
        kept.paths = kept.paths or b"".join(_paths(planner_data))
        yield kept.paths
    else:
        yield from _paths(planner_data)
    if kept.packed:
        yield b',"shardings":' + as_json(list(kept.shardings)).encode("ascii") + b',"boxes":['
        for n, text in enumerate(table_texts(catalog, kept)):
            yield (b"," if n else b"") + text
        yield b"]"
    packed, listed = PackedText(catalog, places, kept), ListedText(catalog, places, kept)
    for what, is_object in ((b',"tensors":{', False), (b'},"objects":{', True)):
        separator = what
        numbers = [n for n, entry in enumerate(catalog.entries) if (entry.dtype is None) is is_object]
        for number in numbers:
            yield separator
            yield packed.text(number) if number in kept.packed else listed.text(number)
            separator = b","
        if not numbers:
            yield separator
    yield b"},"


def _paths(planner_data: Any) -> Iterator[bytes]:
    if not are_paths(planner_data):
        yield as_json(None if planner_data is None else PICKLED).encode("ascii")
        return
    pairs = list(planner_data.items())
    yield b"{"
    for at in range(0, len(pairs), _PATHS):
        group = {key: _path(path) for key, path in pairs[at : at + _PATHS]}
        yield (b"," if at else b"") + as_json(group)[1:-1].encode("ascii")
    yield b"}"


def are_paths(planner_data: Any) -> bool:
    """Whether a planner's data maps each key to its path in the state dict, as the data of DCP's planners does."""
    if not isinstance(planner_data, Mapping):
        return False
    paths = planner_data.values()
    parts: Iterable[Any] = chain.from_iterable(paths) if set(map(type, paths)) <= {tuple} else [None]
    return set(map(type, planner_data)) <= {str} and set(map(type, parts)) <= {str, int, _dcp.IntegerKey}


def _path(path: Sequence[str | int]) -> Sequence[str | int | list[int]]:
    """Return a path for JSON. An integer key of a mapping becomes a list of one integer."""
    return [[int(element)] if type(element) is _dcp.IntegerKey else element for element in path]
