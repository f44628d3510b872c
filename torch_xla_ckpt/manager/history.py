"""The saves of a run as a user sees them: one record for each save, and a table of all records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal


@dataclass(frozen=True)
class Record:
    """One save.

    Args:
        step: the step's number.
        time: when the save was committed.
        metrics: the metrics that were given to the save.
        nbytes: size of the data files in bytes.
        blocked_seconds: how long the call blocked the training loop, in seconds.
        seconds: time from the call to the commit, in seconds.
        mode: "sync" for ``save``. For ``save_async`` where the tensors were copied: "device" or "host".
        gone: why this save cannot be restored any more. "deleted": the step was deleted, by retention or by somebody
            else. "replaced": a later save of the same step took its place. None: the step is there.
    """

    step: int
    time: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    mode: str = "sync"
    gone: Literal["deleted", "replaced"] | None = None


class History(tuple[Record, ...]):
    """Saves in the order of their commits. ``print`` shows a table; ``rich.print`` shows a prettier one."""

    __slots__ = ()

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table, one row for each save."""
        return [
            (
                str(one.step),
                one.time.isoformat(sep=" ", timespec="seconds"),
                f"{one.nbytes / (1 << 20):,.1f} MiB",
                f"{one.blocked_seconds * 1e3:,.0f} ms",
                f"{one.seconds:,.2f} s",
                one.mode,
                one.gone or "",
                ", ".join(f"{name} {value:g}" for name, value in one.metrics.items()),
            )
            for one in self
        ]

    def __str__(self) -> str:
        rows = [_HEAD, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_HEAD, title="What was saved")
        for row in self.rows():
            table.add_row(*row)
        return table


_HEAD = ("step", "committed", "size", "loop blocked", "took", "mode", "gone", "metrics")
