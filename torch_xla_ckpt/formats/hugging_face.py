"""Folders as the Hugging Face Hub has them: one file, files with an index, or a plain folder of files."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.formats.contents import Contents, TensorPlace, malformed, version_of
from torch_xla_ckpt.formats.safetensors import read_headers
from torch_xla_ckpt.formats.torch_file import read_torch_file
from torch_xla_ckpt.protocols import Folder

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
"""The file of a model that is written as one file."""

INDEX_LIMIT = 100_000_000
"""The most bytes that an index may have."""

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_TORCH = "pytorch_model.bin"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")
_SHOWN = 5  # names that an error or a warning lists


def shard_names(count: int) -> list[str]:
    """Return the names of a model's files, given how many there are."""
    return [WEIGHTS] if count == 1 else [f"model-{n:05}-of-{count:05}{_SUFFIX}" for n in range(1, count + 1)]


def index_of(weight_map: Mapping[str, str], nbytes: int) -> tuple[str, bytes]:
    """Return the name and the bytes of the index of a model in several files.

    Args:
        weight_map: the file of each tensor, by name.
        nbytes: the bytes of all tensors.
    """
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    return f"model{_INDEX}", (json.dumps(index, indent=2) + "\n").encode()


def is_weights(name: str) -> bool:
    """Whether a file of a folder holds the weights of a model, or lists the files that do."""
    return name.endswith((_SUFFIX, _INDEX)) or (name.startswith("pytorch_model") and ".bin" in name)


def read_folder(folder: Folder) -> Contents | None:
    """Return the contents of a folder; None if it has neither safetensors files nor a ``pytorch_model.bin``.

    An index decides which files count. Without one, ``model.safetensors`` counts, or else all safetensors files do.

    Raises:
        IncompleteCheckpointError: the index lists files or tensors that are not there, or a file of a set is missing.
        CorruptCheckpointError: a file is damaged.
        UnsafeObjectError: the index names a file outside of the folder.
        CheckpointError: a tensor is in two files, or a folder has several indices.
    """
    names = sorted(folder.names())
    files = [name for name in names if name.endswith(_SUFFIX)]
    indices = [name for name in names if name.endswith(_INDEX)]
    if f"model{_INDEX}" in indices:
        indices = [f"model{_INDEX}"]
    if len(indices) > 1:
        raise CheckpointError(
            f"{folder.url} has several models: {', '.join(indices[:_SHOWN])}. Pass the path of a folder or file with "
            "one model"
        )
    if indices:
        return _read_indexed(folder, indices[0], files)
    if WEIGHTS in files:
        _warn_of_ignored(folder, WEIGHTS, [name for name in files if name != WEIGHTS])
        files = [WEIGHTS]
    if files:
        _require_whole_sets(folder, files)
        return read_safetensors(folder, files)
    if _TORCH_INDEX in names:
        return _read_torch_files(folder)
    return read_torch_file(folder, _TORCH) if _TORCH in names else None


def read_safetensors(folder: Folder, files: Sequence[str]) -> Contents:
    """Return the contents of safetensors files, which together hold each tensor once.

    Raises:
        CorruptCheckpointError: a file is damaged.
        CheckpointError: two files hold a tensor of the same name.
    """
    sizes = {name: folder.size(name) for name in files}
    headers = read_headers(folder, sizes)
    tensors: dict[str, TensorPlace] = {}
    texts: dict[str, str] = {}
    for name, header in headers.items():
        if others := [key for key, text in header.texts.items() if texts.setdefault(key, text) != text]:
            logger.warning(
                "%s: %s has other texts than the files before it under %s in __metadata__. Those of the first file are "
                "kept",
                folder.url,
                name,
                _listed(others),
            )
        for key, place in header.tensors.items():
            if key in tensors:
                raise CheckpointError(
                    f"{folder.url} has {key!r} twice: in {tensors[key].file} and in {place.file}. Nothing was loaded. "
                    "Pass the path of one of the files, or remove the file that is left over"
                )
            tensors[key] = place
    parts = [part for name in files for part in (name.encode(), str(sizes[name]).encode(), headers[name].raw)]
    read = sum(8 + len(header.raw) for header in headers.values())
    return Contents("safetensors", sizes, tensors, version_of(parts), bytes_read=read, texts=texts)


def _read_indexed(folder: Folder, index: str, present: Sequence[str]) -> Contents:
    raw, weight_map = _weight_map(folder, index)
    files = sorted(set(weight_map.values()))
    _require_present(folder, index, files, weight_map)
    _warn_of_ignored(folder, index, [name for name in present if name not in files])
    found = read_safetensors(folder, files)
    lost = [key for key, file in weight_map.items() if key not in found.tensors or found.tensors[key].file != file]
    if lost:
        raise IncompleteCheckpointError(
            f"{index} in {folder.url} lists tensors that its files do not have: {_listed(lost)}. Nothing was loaded. "
            "The index and the files do not belong together. Download or export the model again",
            keys=lost,
        )
    extra = [key for key in found.tensors if key not in weight_map]
    if extra:
        logger.warning("%s in %s does not list %s, which are loaded too", index, folder.url, _listed(extra))
    return replace(found, version=version_of([raw, found.version]), bytes_read=found.bytes_read + len(raw))


def _read_torch_files(folder: Folder) -> Contents:
    raw, weight_map = _weight_map(folder, _TORCH_INDEX)
    files = sorted(set(weight_map.values()))
    _require_present(folder, _TORCH_INDEX, files, weight_map)
    parts = [read_torch_file(folder, name) for name in files]
    tensors: dict[str, TensorPlace] = {}
    for part in parts:
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise CheckpointError(f"{folder.url} has {_listed(twice)} in two files. Nothing was loaded")
        tensors.update(part.tensors)
    if lost := [key for key in weight_map if key not in tensors]:
        raise IncompleteCheckpointError(
            f"{_TORCH_INDEX} in {folder.url} lists tensors that its files do not have: {_listed(lost)}. Nothing was "
            "loaded. Download the model again",
            keys=lost,
        )
    return Contents(
        parts[0].kind,
        {name: size for part in parts for name, size in part.files.items()},
        tensors,
        version_of([raw, *(part.version for part in parts)]),
        objects={key: data for part in parts for key, data in part.objects.items()},
        bytes_read=sum(part.bytes_read for part in parts),
    )


def _weight_map(folder: Folder, index: str) -> tuple[bytes, dict[str, str]]:
    """Return an index's bytes, and the file of each tensor."""
    size = folder.size(index)
    if size > INDEX_LIMIT:
        raise malformed(index, 0, size, f"an index has at most {INDEX_LIMIT:,} bytes")
    raw = folder.read(index)
    try:
        weight_map: Any = json.loads(raw)["weight_map"]
        is_map = type(weight_map) is dict and bool(weight_map)
        if not is_map or not all(type(file) is str for file in weight_map.values()):
            raise ValueError("its weight_map does not map names to files")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise malformed(index, 0, len(raw), f"it is no index ({type(error).__name__}: {str(error)[:200]})") from error
    return raw, weight_map


def _require_present(folder: Folder, index: str, files: Iterable[str], weight_map: Mapping[str, str]) -> None:
    missing = []
    for name in files:
        try:
            folder.size(name)  # refuses names that lead out of the folder
        except FileNotFoundError:
            missing.append(name)
    if missing:
        keys = [key for key, file in weight_map.items() if file in missing]
        raise IncompleteCheckpointError(
            f"{folder.url} lacks files that {index} lists: {_listed(missing)}. Nothing was loaded. Download or export "
            "the model again",
            keys=keys,
        )


def _require_whole_sets(folder: Folder, files: Sequence[str]) -> None:
    """Check that files named like ``model-00001-of-00003.safetensors`` are complete."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in sets.items():
        if len(numbers) < count:
            lost = next(number for number in range(1, count + 1) if number not in numbers)
            raise IncompleteCheckpointError(
                f"{folder.url} has {len(numbers)} of the {count} files {stem}-*-of-{count:05}{_SUFFIX}, and no index. "
                f"File {lost} is missing. Nothing was loaded. An interrupted export or download leaves such a folder"
            )


def _warn_of_ignored(folder: Folder, chosen: str, ignored: Sequence[str]) -> None:
    if ignored:
        logger.warning(
            "%s: %s says which tensors the model has, and these files are ignored: %s. Pass the path of a file to read "
            "it by itself",
            folder.url,
            chosen,
            _listed(ignored),
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(ascii(name[:200]) for name in names[:_SHOWN]) + more
