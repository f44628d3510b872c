"""The run's journal: a line of JSON for everything that was saved or deleted, and why."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torch_xla_ckpt import forks
from torch_xla_ckpt.manager.keep import now
from torch_xla_ckpt.storage.files import Folder

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"


@dataclass(frozen=True)
class Record:
    """One save.

    Args:
        step: its number.
        time: of the commit.
        metrics: that were given.
        nbytes: of its data files.
        blocked_seconds: how long the training loop waited for the call.
        seconds: from the call to the commit.
        mode: how devices were copied: "device", "host", or "sync" for a save that was not in the background.
    """

    step: int
    time: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    mode: str = "sync"


class History(tuple[Record, ...]):
    """Saves in the order of their commits. Prints as a table, a prettier one with rich."""

    __slots__ = ()

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells."""
        return [
            (
                str(one.step),
                one.time.isoformat(sep=" ", timespec="seconds"),
                f"{one.nbytes / (1 << 20):,.1f} MiB",
                f"{one.blocked_seconds * 1e3:,.0f} ms",
                f"{one.seconds:,.2f} s",
                one.mode,
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


_HEAD = ("step", "committed", "size", "loop blocked", "took", "mode", "metrics")


class Journal:
    """Lines of JSON in a run's folder. One process writes them; a line that cannot be written is logged.

    Args:
        root: makes the run's folder.
    """

    def __init__(self, root: Callable[[], Folder]):
        self._root = root
        self._renew()
        forks.renew_in_child(self, Journal._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def write(self, event: str, **facts: Any) -> None:
        """Add a line, with the time."""
        line = json.dumps({"time": now().isoformat(timespec="milliseconds"), "event": event, **facts})
        try:
            with self._lock:
                self._root().append(NAME, line.encode())
        except OSError as error:
            logger.warning("the journal in %s could not be written (%s); lost: %s", self._root().url, error, line)

    def events(self) -> list[dict[str, Any]]:
        """All lines, oldest first. What is no JSON is left out."""
        found = []
        for line in self._content().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                logger.warning("a line of the journal is damaged: %r", line[:80])
        return found

    def history(self) -> History:
        return History(
            Record(
                step=event["step"],
                time=datetime.fromisoformat(event["time"]),
                metrics=event["metrics"],
                nbytes=event["nbytes"],
                blocked_seconds=event["blocked_seconds"],
                seconds=event["seconds"],
                mode=event["mode"],
            )
            for event in self.events()
            if event.get("event") == "saved"
        )

    def _content(self) -> bytes:
        try:
            return self._root().read(NAME)
        except FileNotFoundError:
            return b""
