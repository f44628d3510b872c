"""SaveReport: where the time of a save went, with bytes and requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_xla_ckpt.reports.requests import RequestCounts
from torch_xla_ckpt.reports.sizes import format_bytes
from torch_xla_ckpt.reports.timeline import Timeline

LOCK, BEGIN = "wait for another save", "begin"
FETCH, SERIALIZE, PACK = "fetch", "serialize", "pack"
STORAGE, END = "wait for the writers", "wait for the last writes"
CHECKSUM, WRITE = "checksum", "write"
COMMIT, RECORDS = "commit", "encode manifest and metadata"
"""Names of spans in the timeline of a save. The report adds most of them up."""


@dataclass(frozen=True)
class SaveReport:
    """The time, bytes and requests of a save on this process. Print the report for a summary.

    ``lock_seconds``, ``plan_seconds``, ``write_seconds`` and ``commit_seconds`` add up to ``seconds``.

    Args:
        bytes_written: bytes of tensors and objects that this process wrote.
        lock_seconds: seconds of waiting for earlier saves of this program to the same path.
        plan_seconds: seconds before the first byte was written: layouts, the plan and its proof, the lease, and waiting
            for other ranks.
        write_seconds: seconds of fetching, checksumming and writing.
        commit_seconds: seconds of writing the manifest, committing and removing old files; on other ranks than the
            coordinator, of waiting for this.
        fetch_seconds: the part of ``write_seconds`` in which data was fetched from devices.
        storage_seconds: the part of ``write_seconds`` in which fetching had to wait, because ``memory_budget`` was full
            of data that was not written yet.
        requests: the requests to the store; none for a local folder.
        timeline: what each thread did and when.
        processor_seconds: the part of ``write_seconds`` in which the save waited for the processor: for serializing
            objects, putting items together, and checksums. While it waited for the writing threads, their work decides.
        record_seconds: the part of ``commit_seconds`` in which the manifest and ``.metadata`` were encoded. To a store,
            they are encoded while the last data is written.
    """

    bytes_written: int
    lock_seconds: float
    plan_seconds: float
    write_seconds: float
    commit_seconds: float
    fetch_seconds: float
    storage_seconds: float
    requests: RequestCounts = field(default_factory=RequestCounts)
    timeline: Timeline = field(default_factory=Timeline, repr=False)
    processor_seconds: float = 0.0
    record_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole save, without those of copying the state for an async save."""
        return self.lock_seconds + self.plan_seconds + self.write_seconds + self.commit_seconds

    @property
    def bytes_per_second(self) -> float:
        """``bytes_written`` divided by ``seconds``."""
        return self.bytes_written / self.seconds

    @property
    def limit(self) -> str:
        """What took most of the time: "lock", "plan", "fetch", "processor", "storage" or "commit"."""
        # The last bytes are written when all are fetched.
        storage = max(self.write_seconds - self.fetch_seconds - self.processor_seconds, 0.0)
        seconds = {
            "lock": self.lock_seconds,
            "plan": self.plan_seconds,
            "fetch": self.fetch_seconds,
            "processor": self.processor_seconds + self.record_seconds,
            "storage": storage,
            "commit": self.commit_seconds - self.record_seconds,
        }
        return max(seconds, key=lambda name: seconds[name])

    def __str__(self) -> str:
        phases = {"wait for locks": self.lock_seconds, "plan": self.plan_seconds, "write": self.write_seconds}
        phases["commit"] = self.commit_seconds
        lines = [
            f"saved {format_bytes(self.bytes_written)} in {self.seconds:.2f} s, "
            f"{format_bytes(self.bytes_per_second)}/s ({', '.join(f'{k} {v:.2f} s' for k, v in phases.items())})",
            f"  {self.limit} took most of the time; fetch {self.fetch_seconds:.2f} s, processor "
            f"{self.processor_seconds + self.record_seconds:.2f} s, waiting for storage {self.storage_seconds:.2f} s",
        ]
        return "\n".join(lines + ([f"  {self.requests}"] if self.requests.total else []))
