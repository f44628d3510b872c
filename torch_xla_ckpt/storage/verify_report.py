"""VerifyReport: what reading a whole checkpoint has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_xla_ckpt.errors import Damage

_SHOWN = 5  # unchecked keys that a report prints


@dataclass(frozen=True)
class VerifyReport:
    """The result of ``verify``. ``bool(report)`` is ``report.ok``: False if damage was found.

    Args:
        path: the checkpoint's folder.
        damages: each run of damaged bytes: file, byte range, the keys that need these bytes, and the problem.
        incomplete: tensors whose chunks do not cover them exactly once, and the regions where they do not.
        files: number of data files read.
        bytes_read: bytes read from data files.
        checked_by: "xxh3_64"; "crc32" for a checkpoint without a manifest and for ``torch.save`` files; "structure"
            for safetensors files, which have no checksums.
        unchecked: keys of items with bytes that have no checksum. Damage of these bytes cannot be found.
        bytes_unchecked: number of bytes without a checksum.
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
        """Whether no damage was found and no tensor is incomplete. Items in ``unchecked`` may be damaged unnoticed."""
        return not self.damages and not self.incomplete

    def __bool__(self) -> bool:
        return self.ok

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that are damaged or incomplete."""
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
        shown = ", ".join(map(repr, self.unchecked[:_SHOWN]))
        more = f" and {len(self.unchecked) - _SHOWN} more" if len(self.unchecked) > _SHOWN else ""
        return [f"NOT CHECKED, because they have no checksum: {self.bytes_unchecked:,} bytes of {shown}{more}"]
