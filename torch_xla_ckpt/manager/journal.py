"""The run's journal: a line of JSON for each save and each deletion, with the reason."""

from __future__ import annotations

import json
import logging
import operator
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from torch_xla_ckpt.manager.history import History, Record
from torch_xla_ckpt.manager.keep import now
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage import checksum

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"
_MOST_WAITING = 1000  # lines that wait in memory while the journal cannot be written


class Journal:
    """Lines of JSON in a run's folder, written by one process.

    A line that cannot be written waits in memory, and is written with the next one.

    Args:
        steps: the run's steps.
    """

    def __init__(self, steps: Steps):
        self._steps = steps
        self._renew()
        forks.renew_in_child(self, Journal._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._written: tuple[int, bytes] = (0, b"")  # length of the last journal that was written, and its checksum

    def write(self, event: str, **facts: Any) -> None:
        """Add a line with the current time."""
        line = json.dumps({"time": now().isoformat(timespec="milliseconds"), "event": event, **facts})
        with self._lock:
            self._waiting.append(line.encode())
            self._flush()

    def close(self) -> None:
        """Try once more to write the lines that wait. Log each line that is lost."""
        with self._lock:
            self._flush()
            for line in self._waiting:
                logger.error("a line of the journal in %s is lost: %s", self._steps.location, line.decode())
            self._waiting.clear()

    def events(self) -> list[dict[str, Any]]:
        """Return all events, oldest first. A warning names lines that are no events.

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
                "%s lines of %s in %s are not journal entries and are ignored; the first of them begins with %r",
                len(odd),
                NAME,
                self._steps.location,
                odd[0][:80],
            )
        return found

    def history(self) -> History:
        """Return the saves, and mark those whose step is gone. A warning counts incomplete records."""
        saved = [event for event in self.events() if event.get("event") == "saved"]
        records = [record for event in saved if (record := _record(event)) is not None]
        if len(records) < len(saved):
            incomplete = len(saved) - len(records)
            logger.warning("%s saves in %s of %s lack a field", incomplete, NAME, self._steps.location)
        return History(self._marked(records))

    def undeleted(self) -> frozenset[int]:
        """Return the steps that were saved; no steps at all if the journal tells of any deletion."""
        events = self.events()
        if any(event.get("event") in ("deleted", "failed to delete") for event in events):
            return frozenset()
        steps = (event.get("step") for event in events if event.get("event") == "saved")
        return frozenset(step for step in steps if isinstance(step, int))

    def _marked(self, records: list[Record]) -> list[Record]:
        """Records with the field ``gone``, after a look at the run's folder."""
        folders = set(self._steps.numbers()) if records else set()
        looks = self._steps.looks(sorted(folders.intersection(record.step for record in records)))
        there = {step for step, folder in looks.items() if folder.kind in ("committed", "damaged")}
        marked: list[Record] = []
        later: set[int] = set()
        for record in reversed(records):
            if record.step in later:
                record = replace(record, gone="replaced")
            elif record.step not in there:
                record = replace(record, gone="deleted")
            later.add(record.step)
            marked.append(record)
        return marked[::-1]

    def _flush(self) -> None:
        root = self._steps.root
        try:
            if root.remote:
                self._rewrite(root)
            else:
                while self._waiting:
                    root.append(NAME, self._waiting[0])
                    self._waiting.popleft()
        except Exception as error:  # a journal that cannot be written must not stop training
            logger.warning(
                "the journal in %s could not be written (%s: %s); %s lines wait for the next attempt",
                self._steps.location,
                type(error).__name__,
                error,
                len(self._waiting),
            )
            while len(self._waiting) > _MOST_WAITING:
                logger.error("a line of the journal is lost: %s", self._waiting.popleft().decode())

    def _rewrite(self, root: Folder) -> None:
        """Write the whole journal with the lines that wait: files of object stores cannot grow."""
        if not self._waiting:
            return
        content = self._whole()
        if content and not content.endswith(b"\n"):  # the last line was cut off
            content += b"\n"
        content += b"".join(line + b"\n" for line in self._waiting)
        root.replace(NAME, [content], f"{NAME}.tmp")
        self._written = len(content), checksum(content)
        self._waiting.clear()

    def _whole(self) -> bytes:
        """Read the journal. Read again if the answer lacks lines that this process has written.

        Before this process has written any, two answers must agree: a garbled one would remove all earlier lines.
        """
        length, expected = self._written
        before: bytes | None = None
        for _ in range(4):
            content = self._content()
            if checksum(content[:length]) == expected if length else content == before:
                return content
            before = content
        if not length:
            raise OSError("the store gave a different answer each time")
        logger.warning(
            "another program has changed the journal in %s, and may have removed lines", self._steps.location
        )
        return content

    def _content(self) -> bytes:
        try:
            return self._steps.retries.run(lambda: self._steps.root.read(NAME), "reading the journal")
        except FileNotFoundError:
            return b""


def _record(event: Mapping[str, Any]) -> Record | None:
    """Return a line of the journal as a record; None if a field is missing or has another type."""
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
