"""The safetensors format: a header that says where each tensor lies, and the tensors' bytes.

https://github.com/huggingface/safetensors#format specifies the format: eight bytes with the length of the header, the
header as JSON, and the elements of all tensors without a gap. Files can be hostile. So each number in a header is
checked before it is used, and nothing outside of a file is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats.contents import TensorPlace, is_text, malformed
from torch_xla_ckpt.protocols import Folder, Window

METADATA = "__metadata__"
"""The key of a header under which programs keep texts. It names no tensor."""

HEADER_LIMIT = 100_000_000
"""The most bytes that a header may have, for the safetensors library and for this package."""

_LENGTH = 8  # bytes of the header's length
_ALIGNMENT = 8  # the tensors' bytes begin at a multiple of this, as the safetensors library writes them
_ENTRY = 128  # bytes of an entry without name and shape, or of a header without texts, at most
_FIRST = 64 << 10  # bytes that are read at first; most headers are shorter

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{"U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    "C64": torch.complex64,
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
}
"""The dtype for each name that a header can have and that torch has too."""

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Header(NamedTuple):
    """The header of a file.

    Args:
        tensors: the place of each tensor, by key.
        texts: the texts under ``__metadata__``, without "format", which names the library that wrote the file.
        raw: the header's bytes.
    """

    tensors: Mapping[str, TensorPlace]
    texts: Mapping[str, str]
    raw: bytes


def read_headers(folder: Folder, sizes: Mapping[str, int]) -> dict[str, Header]:
    """Return the headers of files.

    Args:
        folder: the folder of the files.
        sizes: the size in bytes of each file, by name.

    Raises:
        CorruptCheckpointError: a header is not well formed, or does not fit its file.
        CheckpointError: a tensor has a dtype that this package does not read.
    """
    names = list(sizes)
    starts = _view(folder, {name: (0, min(sizes[name], _FIRST)) for name in names})
    lengths = {name: _header_length(name, starts[name], sizes[name]) for name in names}
    longer = {name: (0, _LENGTH + lengths[name]) for name in names if _LENGTH + lengths[name] > len(starts[name])}
    starts.update(_view(folder, longer))
    headers = {}
    for name in names:
        raw = bytes(starts[name][_LENGTH : _LENGTH + lengths[name]])
        if len(raw) < lengths[name]:
            raise malformed(name, 0, sizes[name], "the file ends inside its header")
        headers[name] = Header(*_parsed(name, raw, sizes[name]), raw)
    return headers


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], texts: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a new file, up to the first tensor.

    Args:
        tensors: name, dtype and shape of each tensor, in the order of their bytes in the file.
        texts: texts to keep under ``__metadata__``.

    Returns:
        The bytes, the position of each tensor in the file, and the size of the whole file in bytes.
    """
    entries: dict[str, Any] = {METADATA: {**texts, "format": "pt"}}
    end = 0
    begins: dict[str, int] = {}
    for name, dtype, shape in tensors:
        begins[name] = end
        nbytes = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode("ascii")
    raw += b" " * (-len(raw) % _ALIGNMENT)
    first = _LENGTH + len(raw)
    return (
        len(raw).to_bytes(_LENGTH, "little") + raw,
        {name: first + begin for name, begin in begins.items()},
        first + end,
    )


def entry_bytes(name: str, shape: Sequence[int]) -> int:
    """Return the most bytes that a tensor takes in a header."""
    return len(json.dumps(name)) + len(json.dumps(list(shape))) + _ENTRY


def texts_bytes(texts: Mapping[str, str]) -> int:
    """Return the most bytes that a header takes without tensors."""
    return len(json.dumps(texts)) + _ENTRY


def _view(folder: Folder, parts: Mapping[str, tuple[int, int]]) -> dict[str, memoryview]:
    windows = [Window(name, start, stop, ((start, stop),)) for name, (start, stop) in parts.items()]
    return dict(zip(parts, folder.view(windows)))


def _header_length(name: str, start: memoryview, size: int) -> int:
    if len(start) < _LENGTH:
        raise malformed(name, 0, size, f"a safetensors file has at least {_LENGTH} bytes, and this one has {size}")
    length = int.from_bytes(start[:_LENGTH], "little")
    if length > HEADER_LIMIT or length > size - _LENGTH:
        raise malformed(
            name, 0, _LENGTH, f"its first bytes claim a header of {length:,} bytes, and the file has {size:,} bytes"
        )
    return length


def _parsed(name: str, raw: bytes, size: int) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return the place of each tensor in a file of ``size`` bytes, and its texts, given its header."""
    first = _LENGTH + len(raw)

    def bad(problem: str) -> CheckpointError:
        return malformed(name, 0, first, problem)

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise bad(f"its header is no JSON ({type(error).__name__}: {str(error)[:200]})") from error
    if type(entries) is not dict:
        raise bad("its header is no JSON object")
    texts = _texts(entries.pop(METADATA, None))
    places: dict[str, TensorPlace] = {}
    unknown: list[str] = []
    spans: list[tuple[int, int, str]] = []
    for key, entry in entries.items():
        try:
            dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            sizes_fit = type(shape) is list and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
        except (TypeError, KeyError, ValueError) as error:
            raise bad(f"the entry of {_short(key)} is incomplete") from error
        if not is_text(key):
            raise bad(f"the name {_short(key)} is no text")
        if not (
            sizes_fit and len(shape) <= 64 and type(begin) is type(end) is int and 0 <= begin <= end <= size - first
        ):
            raise bad(f"the bytes of {_short(key)} lie outside of the file, which has {size:,} bytes")
        spans.append((begin, end, key))
        if type(dtype_name) is not str or dtype_name not in DTYPES:
            unknown.append(f"{_short(key)} ({str(dtype_name)[:20]})")
            continue
        dtype = DTYPES[dtype_name]
        if _nbytes(shape, dtype.itemsize, end - begin) != end - begin:
            raise bad(f"{_short(key)} of shape {shape} and dtype {dtype_name} does not have {end - begin:,} bytes")
        places[key] = TensorPlace(dtype, tuple(shape), name, first + begin)
    _require_exact_cover(spans, size - first, bad)
    if unknown:
        raise CheckpointError(
            f"{name} has tensors of dtypes that this package does not read: {', '.join(unknown[:10])}. Nothing "
            "was loaded. Convert these tensors with the program that wrote the file"
        )
    return places, texts


def _texts(found: Any) -> dict[str, str]:
    pairs = found.items() if type(found) is dict else ()
    return {
        key: text for key, text in pairs if key != "format" and type(text) is str and is_text(key) and is_text(text)
    }


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _nbytes(shape: Sequence[int], itemsize: int, most: int) -> int:
    """Return the bytes of a tensor; -1 if there are more than ``most``, or if torch has no such shape."""
    if 0 in shape:
        return 0 if math.prod(max(n, 1) for n in shape) * itemsize < 1 << 63 else -1
    nbytes = itemsize
    for n in shape:
        nbytes *= n
        if nbytes > most:
            return -1
    return nbytes


def _require_exact_cover(spans: list[tuple[int, int, str]], size: int, bad: Any) -> None:
    """Check that the tensors' bytes follow one another without a gap, up to the end of the file."""
    at = 0
    for begin, end, key in sorted(spans):
        if begin != at:
            what = "overlap those of another tensor" if begin < at else "follow bytes that belong to no tensor"
            raise bad(f"the bytes of {_short(key)} {what}")
        at = end
    if at != size:
        raise bad(f"the tensors end {size - at:,} bytes before the end of the file")


def _short(key: str) -> str:
    return ascii(key if len(key) <= 100 else key[:100] + "...")
