"""The run's journal: a line of JSON for everything that was saved or deleted, and why."""

from __future__ import annotations

import json
import logging
import operator
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from torch_xla_ckpt.manager.keep import now
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage import checksum

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


_KEPT = 1000  # lines that wait in memory for a journal that cannot be written


class Journal:
    """Lines of JSON in a run's folder, written by one process.

    A line that cannot be written waits in memory, and is written with the next one.

    Args:
        steps: of the run.
    """

    def __init__(self, steps: Steps):
        self._steps = steps
        self._renew()
        forks.renew_in_child(self, Journal._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._written: tuple[int, bytes] = (0, b"")  # length of what was last written, and its checksum

    def write(self, event: str, **facts: Any) -> None:
        """Add a line, with the time."""
        line = json.dumps({"time": now().isoformat(timespec="milliseconds"), "event": event, **facts})
        with self._lock:
            self._waiting.append(line.encode())
            self._flush()

    def close(self) -> None:
        """Try once more to write the lines that wait. Lines that are lost are logged."""
        with self._lock:
            self._flush()
            for line in self._waiting:
                logger.error("a line of the journal in %s is lost: %s", self._steps.location, line.decode())
            self._waiting.clear()

    def events(self) -> list[dict[str, Any]]:
        """All records, oldest first. Lines that are none are left out, with a warning.

        Raises:
            CheckpointError: the journal cannot be read.
        """
        found, odd = [], []
        for line in self._content().splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # no JSON, or nested deeper than Python recurses
                event = None
            if isinstance(event, dict):
                found.append(event)
            elif line.strip():
                odd.append(line)
        if odd:
            logger.warning(
                "%s lines of %s in %s are no records, and are left out; the first one begins with %r",
                *(len(odd), NAME, self._steps.location, odd[0][:80]),
            )
        return found

    def history(self) -> History:
        """The saves. Records that lack something are left out, with a warning."""
        saved = [event for event in self.events() if event.get("event") == "saved"]
        records = [record for event in saved if (record := _record(event)) is not None]
        if len(records) < len(saved):
            odd = len(saved) - len(records)
            logger.warning("%s records of saves in %s of %s lack a field", odd, NAME, self._steps.location)
        return History(records)

    def undeleted(self) -> frozenset[int]:
        """The steps that were saved, if no step was ever deleted, as far as the journal knows."""
        events = self.events()
        if any(event.get("event") in ("deleted", "failed to delete") for event in events):
            return frozenset()
        steps = (event.get("step") for event in events if event.get("event") == "saved")
        return frozenset(step for step in steps if isinstance(step, int))

    def _flush(self) -> None:
        root = self._steps.root
        try:
            if root.remote:
                self._rewrite(root)
            else:
                while self._waiting:
                    root.append(NAME, self._waiting[0])
                    self._waiting.popleft()
        except Exception as error:  # a journal that cannot be written must stop nothing
            logger.warning(
                "the journal in %s could not be written, and %s lines wait for the next time (%s: %s)",
                *(self._steps.location, len(self._waiting), type(error).__name__, error),
            )
            while len(self._waiting) > _KEPT:
                logger.error("a line of the journal is lost: %s", self._waiting.popleft().decode())

    def _rewrite(self, root: Folder) -> None:
        """Write the journal anew with the lines that wait: files of object stores cannot grow."""
        if not self._waiting:
            return
        content = self._whole()
        if content and not content.endswith(b"\n"):  # the line before was cut off
            content += b"\n"
        content += b"".join(line + b"\n" for line in self._waiting)
        root.replace(NAME, content, f"{NAME}.tmp")
        self._written = len(content), checksum(content)
        self._waiting.clear()

    def _whole(self) -> bytes:
        """The journal, which must begin with what this process has written. An answer that is cut off does not."""
        length, expected = self._written
        for _ in range(3):
            content = self._content()
            if checksum(content[:length]) == expected or not length:
                return content
        logger.warning(
            "the journal in %s was changed by somebody else, who may have removed lines", self._steps.location
        )
        return content

    def _content(self) -> bytes:
        try:
            return self._steps.tried(lambda: self._steps.root.read(NAME), "reading the journal")
        except FileNotFoundError:
            return b""


def _record(event: Mapping[str, Any]) -> Record | None:
    try:
        metrics = event["metrics"]
        return Record(
            step=operator.index(event["step"]),
            time=datetime.fromisoformat(event["time"]),
            metrics={str(name): float(value) for name, value in metrics.items()},
            nbytes=operator.index(event["nbytes"]),
            blocked_seconds=float(event["blocked_seconds"]),
            seconds=float(event["seconds"]),
            mode=str(event["mode"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
