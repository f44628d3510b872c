"""What a load did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What ``load`` did in this process.

    The three times add up to that of the whole call.

    Args:
        bytes_needed: of the tensors and objects that were asked for; None when the storage reader does not say.
        bytes_read: of the checkpoint's data files; more than is needed, because checksums cover whole blocks.
        plan_seconds: until the first byte was read: metadata, matching, proofs, and waiting for other processes.
        read_seconds: reading and checking.
        put_seconds: handing tensors to their devices; reading goes on meanwhile.
    """

    bytes_needed: int | None
    bytes_read: int | None
    plan_seconds: float
    read_seconds: float
    put_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole call."""
        return self.plan_seconds + self.read_seconds + self.put_seconds

    @property
    def bytes_per_second(self) -> float | None:
        """Needed bytes by the time of the whole call."""
        return None if self.bytes_needed is None else self.bytes_needed / self.seconds

    def __str__(self) -> str:
        phases = f"plan {self.plan_seconds:.2f} s, read {self.read_seconds:.2f} s, put {self.put_seconds:.2f} s"
        if self.bytes_needed is None or self.bytes_read is None or self.bytes_per_second is None:
            return f"loaded in {self.seconds:.2f} s ({phases})"
        return (
            f"loaded {_size(self.bytes_needed)} in {self.seconds:.2f} s, {_size(self.bytes_per_second)}/s ({phases}); "
            f"read {_size(self.bytes_read)}"
        )


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 999.5:  # three digits, or the format would resort to exponents
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
