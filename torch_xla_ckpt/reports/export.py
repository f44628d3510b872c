"""ExportReport: what an export wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_xla_ckpt.reports.sizes import format_bytes

_SHOWN = 5  # keys of each kind that a printed report names


@dataclass(frozen=True)
class ExportReport:
    """The result of an export. The same on every rank, but for bytes and seconds, which are those of this process.

    Args:
        path: the folder or file that was written.
        format: "safetensors" or "torch".
        files: size in bytes of each file of weights, by name.
        tensors: the key in the source of each tensor that was written, by its name in the files.
        tied: names that are tied to another tensor, with that tensor's name. safetensors files leave these names out. A
            torch.save file has them, and they share the bytes of that tensor.
        cast: names whose dtype was converted, with the old and the new dtype.
        objects: keys in the source that hold no tensor. They were left out.
        copied: other files that were written, such as "config.json".
        bytes_read: bytes that this process read from the source's files; 0 for live tensors.
        bytes_written: bytes of tensors that this process wrote.
        seconds: seconds of the whole export.
        unselected: keys in the source of tensors that were not written, because they lie outside of ``key``, or because
            ``only`` or ``exclude`` left them out.
        overflowed: number of finite values that the cast made infinite, by the tensor's name. Default: none.
        is_dry: whether nothing was written, and the report says what would be. Default: False.
    """

    path: str
    format: str
    files: Mapping[str, int]
    tensors: Mapping[str, str] = field(repr=False)
    tied: Mapping[str, str]
    cast: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(repr=False)
    objects: tuple[str, ...]
    copied: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    seconds: float
    is_dry: bool = False
    unselected: tuple[str, ...] = field(default=(), repr=False)
    overflowed: Mapping[str, int] = field(default_factory=dict)

    @property
    def renamed(self) -> dict[str, str]:
        """Names in the files that differ from the key in the source, with this key."""
        return {name: key for name, key in self.tensors.items() if name != key}

    def __str__(self) -> str:
        total = sum(self.files.values())
        files = f"{len(self.files)} {'file' if len(self.files) == 1 else 'files'}"
        what = f"{len(self.tensors):,} tensors, {format_bytes(total)}, to {self.path}"
        read = f"{format_bytes(self.bytes_read)} read"
        lines = [
            f"would export {what} ({files})"
            if self.is_dry
            else f"exported {what} in {self.seconds:.2f} s ({files}, {read})"
        ]
        tied = [f"{name} (is {kept})" for name, kept in self.tied.items()]
        cast = [f"{name} ({a} -> {b})".replace("torch.", "") for name, (a, b) in self.cast.items()]
        lost = [f"{name} ({number:,} values are infinite now)" for name, number in self.overflowed.items()]
        kinds = {"tied": tied, "cast": cast, "overflowed": lost, "left out": list(self.objects)}
        for what, keys in kinds.items():
            if keys:
                lines.append(f"  {what:<12} {len(keys):>6}  {_first(keys)}")
        if self.unselected:
            tops = Counter(key.partition(".")[0] for key in self.unselected)
            rest = [f"{top} ({number:,})" for top, number in tops.items()]
            lines.append(f"  {'not selected':<12} {len(self.unselected):>6}  {_first(rest)}")
        return "\n".join(lines)


def _first(keys: Sequence[str]) -> str:
    return ", ".join([*keys[:_SHOWN], *(["..."] if len(keys) > _SHOWN else [])])
