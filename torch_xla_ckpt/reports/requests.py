"""RequestCounts: the requests to a store that a save or a load made, which cost time and money."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_xla_ckpt.reports.sizes import format_bytes


@dataclass(frozen=True)
class RequestCounts:
    """Requests to a store. Local files need none.

    A backend of fsspec may turn one of these requests into several, and repeats some by itself.

    Args:
        by_kind: the number of requests of each kind: "write", "read", "list", "look at" and "remove".
        sent: bytes in requests that write.
        received: bytes in answers to ranged reads.
        repeated: requests that were made again after an error. They count in ``by_kind`` too.
        asked_twice: requests that were made a second time because the answer was late. They count in ``by_kind`` too.
    """

    by_kind: Mapping[str, int] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    repeated: int = 0
    asked_twice: int = 0

    @property
    def total(self) -> int:
        """The number of all requests."""
        return sum(self.by_kind.values())

    def __sub__(self, earlier: RequestCounts) -> RequestCounts:
        """Return the requests since ``earlier``."""
        since = {kind: number - earlier.by_kind.get(kind, 0) for kind, number in self.by_kind.items()}
        return RequestCounts(
            {kind: number for kind, number in since.items() if number},
            self.sent - earlier.sent,
            self.received - earlier.received,
            self.repeated - earlier.repeated,
            self.asked_twice - earlier.asked_twice,
        )

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.by_kind.items(), key=lambda one: -one[1]))
        late = [f"{self.repeated} repeated"] if self.repeated else []
        late += [f"{self.asked_twice} asked twice"] if self.asked_twice else []
        moved = [f"{format_bytes(self.sent)} sent"] if self.sent else []
        moved += [f"{format_bytes(self.received)} received"] if self.received else []
        return "; ".join([f"{self.total} requests{f' ({kinds})' if kinds else ''}", *moved, *late])
