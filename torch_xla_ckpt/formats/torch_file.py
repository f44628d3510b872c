"""Files that ``torch.save`` wrote: the pickle is executed by the restricted machine, and tensors stay in the file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, cast

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsafeObjectError
from torch_xla_ckpt.formats.contents import Contents, TensorPlace, is_text, malformed, version_of
from torch_xla_ckpt.formats.sparse_file import SparseFile
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import (
    MAX_DEPTH,
    ArchiveError,
    OtherByteOrder,
    Refused,
    StandIn,
    Unknown,
    encode,
    parsed_ranges,
    restricted,
)
from torch_xla_ckpt.state import Leaf, Path, flatten, key_of

logger = logging.getLogger(__name__)

_NAMED = 10  # objects that a warning names
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DATA = b"/data/0"  # in an archive that has tensors
_TAIL = 1 << 20  # bytes at the end of a remote archive that are read first; they hold the directory of most archives
# Tensors that do not lie in the file as in memory are copied, and views may repeat the file's bytes without end. So all
# copies together may have this many bytes for each byte of the file, and as many more.
_COPIES, _COPIED = 4, 64 << 20


def read_torch_file(folder: Folder, name: str) -> Contents:
    """Return the contents of a ``torch.save`` file that holds a dict.

    Local files are memory-mapped, and tensors are not read. Of remote files, only the directory and the pickle are
    read, unless the file holds tensors in other forms than a state dict has.

    Objects of unknown types stay out, and a warning names them. No code of theirs runs.

    Raises:
        CorruptCheckpointError: the file is no archive as ``torch.save`` writes it.
        UnsafeObjectError: the file names something that could run code, and it has no tensors beside.
        CheckpointError: the file holds no dict, or comes from a computer with another byte order.
    """
    size = folder.size(name)
    view, read = _skeleton(folder, name, size)
    found = _contents(folder, name, view, size, is_whole=not folder.remote)
    if found is None:
        (view,) = folder.view([Window(name, 0, size, ((0, size),))])
        read = size
        found = _contents(folder, name, view, size, is_whole=True)
    assert found is not None
    tensors, objects, paths, unknown = found
    if unknown:
        _warn_of(unknown, name, folder)
    shapes = [f"{key} {place.offset} {place.dtype} {place.shape}".encode() for key, place in tensors.items()]
    version = version_of([name.encode(), str(size).encode(), *shapes, *objects.values()])
    return Contents("torch.save", {name: size}, tensors, version, objects, paths, read)


def _skeleton(folder: Folder, name: str, size: int) -> tuple[memoryview, int]:
    """Return a view of the file with at least the bytes that describe its tensors, and the bytes that were read."""
    if not folder.remote:
        (view,) = folder.view([Window(name, 0, size, ((0, size),))])
        return view, 0
    tail = max(0, size - _TAIL)
    parts: list[tuple[int, int]] = [(tail, size)]
    try:
        for _ in range(2):  # the directory may begin before the tail
            (view,) = folder.view([Window(name, 0, size, tuple(parts))])
            parts = parsed_ranges(view)
    except ValueError as error:
        raise _no_archive(name, size, error) from error
    (view,) = folder.view([Window(name, 0, size, tuple(parts))])
    return view, sum(stop - start for start, stop in parts)


def _contents(
    folder: Folder, name: str, view: memoryview, size: int, *, is_whole: bool
) -> tuple[dict[str, TensorPlace], dict[str, bytes], Mapping[str, Path], dict[str, str]] | None:
    """Return tensors, objects, paths, and the type of each object that stays out.

    None if that takes bytes of tensors, and the view does not have them.
    """
    view = restricted.writable(view)
    try:
        value = _loaded(folder, name, view, size)
    except CorruptCheckpointError as error:
        if is_whole or isinstance(error.__cause__, ArchiveError):
            raise
        return None  # sparse tensors, for example, are checked when they are made
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"{name} in {folder.url} holds a {type(value).__name__}, and a checkpoint is a dict. Save a dict with "
            "torch.save, such as model.state_dict()"
        )
    unknown = _removed(value)
    leaves = flatten(value, with_empty=True, deepest=MAX_DEPTH)
    base = np.frombuffer(view, np.uint8).ctypes.data if size else 0
    tensors: dict[str, TensorPlace] = {}
    others: dict[str, Leaf] = {}
    for key, leaf in leaves.items():
        tensor = leaf.value
        if not is_text(key):
            raise malformed(name, 0, size, f"the name {key[:100]!a} is no text")
        if leaf.is_tensor and _lies_plainly(tensor):
            offset = tensor.data_ptr() - base if tensor.numel() else 0
            tensors[key] = TensorPlace(tensor.dtype, tuple(tensor.shape), name, offset)
        else:
            others[key] = leaf
    objects = {}
    room = _COPIES * size + _COPIED
    for key, leaf in others.items():
        if leaf.is_tensor and _is_strided(leaf.value):
            if not is_whole and leaf.value.numel():
                return None
            _require_room(key, leaf.value.numel() * leaf.value.itemsize, room, name, size)
            tensors[key] = _copied(leaf.value, name)
            room -= len(tensors[key].data or b"")
            continue
        try:
            objects[key] = encode(key, leaf.value, lambda tensor: tensor).getvalue()
        except CheckpointError as error:
            if not isinstance(error.__cause__, Unknown):
                raise
            unknown[key] = error.__cause__.name
            if not isinstance(leaf.container, list):
                continue
            objects[key] = encode(key, None, lambda tensor: tensor).getvalue()  # lists must have no gaps
        if _DATA in objects[key]:  # tensors in an object
            if not is_whole:
                return None
            room -= len(objects[key])
            _require_room(key, 0, room, name, size)
    if unknown and not tensors:
        raise _refusal(folder, name, tuple(sorted(set(unknown.values()))))
    paths = {key: leaf.path for key, leaf in leaves.items() if key in tensors or key in objects}
    is_flat = all(len(path) == 1 for path in paths.values())
    return tensors, objects, {} if is_flat else paths, unknown


def _removed(value: Any) -> dict[str, str]:
    """Remove keys and values of unknown types from nested mappings.

    Returns:
        The type of each of them, by key. The name of the type is the key's last part if the key is of an unknown type.
    """
    unknown: dict[str, str] = {}
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen = set()
    while waiting:
        path, one = waiting.pop()
        if id(one) in seen or len(path) > MAX_DEPTH:  # ``flatten`` refuses deeper containers
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            for key, below in list(one.items()):
                if type(key) is StandIn:
                    unknown[key_of((*path, f"<{key.name}>"))] = key.name
                elif type(below) is StandIn:
                    unknown[key_of((*path, key))] = below.name
                else:
                    continue
                del one[key]
        inner = one.items() if isinstance(one, dict) else enumerate(one)
        waiting += [((*path, key), below) for key, below in inner if isinstance(below, dict | list)]
    return unknown


def _warn_of(unknown: Mapping[str, str], name: str, folder: Folder) -> None:
    """Warn of objects that stay out.

    Args:
        unknown: the type of each object, by key.
        name: the file's name.
        folder: the file's folder.
    """
    named = [f"{key!a} ({kind})" if key.isprintable() else f"{key!a}" for key, kind in unknown.items()]
    logger.warning(
        "%s in %s: these objects stay out, because their types are unknown here and could run code: %s%s. Everything "
        "else is read. To read them, tell torch that their types are harmless: torch.serialization.add_safe_globals; "
        "or load the file with torch.load(..., weights_only=False), if you trust it",
        name,
        folder.url,
        ", ".join(named[:_NAMED]),
        f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "",
    )


def _refusal(folder: Folder, name: str, names: tuple[str, ...], what: str = "") -> UnsafeObjectError:
    return UnsafeObjectError(
        f"refused to load {name} in {folder.url}: it names something that could run code ({what or ', '.join(names)}). "
        "Nothing was loaded. If you trust the file, load it with torch.load(..., weights_only=False) and save "
        "model.state_dict() again",
        types=names,
    )


def _loaded(folder: Folder, name: str, view: memoryview, size: int) -> Any:
    """Return the value in the file. Its tensors share the memory of the view."""
    try:
        value = restricted.load_mapped(view)
    except Refused as error:
        raise _refusal(folder, name, error.names, "" if error.names else str(error)) from error
    except OtherByteOrder as error:
        other = "big" if sys.byteorder == "little" else "little"
        raise CheckpointError(
            f"{name} in {folder.url} was saved on a {other}-endian computer, and its tensors cannot be read in place "
            "here. Nothing was loaded. torch.load(path, weights_only=True) swaps the bytes: save what it returns with "
            "torch.save, and read the new file"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise _no_archive(name, size, error) from error
    if type(value) is StandIn:
        raise _refusal(folder, name, (value.name,))
    return value


def _no_archive(name: str, size: int, error: Exception) -> CheckpointError:
    return malformed(
        name, 0, size, f"it is no archive as torch.save writes it since torch 1.6 ({type(error).__name__}: {error})"
    )


def _is_strided(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not tensor.is_quantized and not tensor.is_nested


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements follow one another in the file, in C order."""
    return _is_strided(tensor) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _require_room(key: str, nbytes: int, room: int, name: str, size: int) -> None:
    """Check that there is room in memory for a copy of a tensor.

    Raises:
        CheckpointError: all copies together would have many times the bytes of the file.
    """
    if nbytes > room:
        raise CheckpointError(
            f"{key!r} in {name} repeats its elements (as after expand), or those of other tensors. Copies of all such "
            f"tensors need more than {_COPIES} times the {size:,} bytes of the file. Nothing was loaded. Save "
            "tensor.contiguous() of tensors that are views, and of expanded tensors only what they repeat"
        )


def _copied(tensor: torch.Tensor, name: str) -> TensorPlace:
    """Return a place with a copy of a tensor's elements, in C order."""
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = elements.reshape(-1).view(torch.uint8).numpy().tobytes() if elements.numel() else b""
    return TensorPlace(tensor.dtype, tuple(tensor.shape), name, 0, data)


def torch_file_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], ties: Mapping[str, str]
) -> tuple[list[tuple[int, bytes]], dict[str, int], int]:
    """Lay out a new ``torch.save`` file that holds a dict of tensors.

    Args:
        tensors: name, dtype and shape of each tensor.
        ties: further names of these tensors, each with the tensor's name. They share its bytes.

    Returns:
        Positions and bytes of everything but the elements, the position of each tensor in the file, and the size of
        the whole file in bytes.
    """
    file = SparseFile()
    with FakeTensorMode():
        value = {name: torch.empty(tuple(shape), dtype=dtype) for name, dtype, shape in tensors}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({**value, **{name: value[kept] for name, kept in ties.items()}}, cast(IO[bytes], file))
    gaps = iter(file.gaps())
    offsets = {}
    for name, tensor in value.items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if not nbytes:
            offsets[name] = 0
            continue
        start, stop = next(gaps)
        if stop - start != nbytes:
            raise CheckpointError(f"torch {torch.__version__} lays out {name!r} in an unknown way. Nothing was written")
        offsets[name] = start
    return file.written(), offsets, file.end
