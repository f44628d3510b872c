"""The demo's processes: started together, followed line by line, stopped together."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Event = dict[str, Any]
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
SCRIPTS = Path(__file__).parents[1]
STOP_SECONDS = 60.0  # a process that trains saves its step before it stops


@dataclass(frozen=True)
class Program:
    """A process to run.

    Args:
        title: the name printed before each line.
        command: the command line.
        environment: all environment variables.
        log: the file for stderr.
        steps: the training steps that the process takes; 0 if it does not train.
        first: the first of these steps.
    """

    title: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    steps: int = 0
    first: int = 0


class Processes:
    """Runs programs at the same time, prints what they report, and collects their events.

    Args:
        programs: the programs, by name.
        lock: a file descriptor that every process inherits. A lock on it is held until the last process has ended.
    """

    def __init__(self, programs: Mapping[str, Program], lock: int):
        self._programs = programs
        self._lock = lock
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._tasks: dict[str, TaskID] = {}
        # A name with a line of output, or with None when the output has ended.
        self._lines: queue.Queue[tuple[str, str | None]] = queue.Queue()

    def run(self) -> dict[str, list[Event]]:
        """Run all programs to the end and return the events that each printed.

        Raises:
            SystemExit: a process failed, or the user stopped the demo. All other processes have ended, too.
        """
        events: dict[str, list[Event]] = {name: [] for name in self._programs}
        try:
            with self._bars:
                for name in self._programs:
                    self._start(name)
                for _ in self._programs:
                    self._follow_until_one_ends(events)
        except KeyboardInterrupt:
            self._stop()
            raise SystemExit("\nThe demo was stopped. Run it again to go on.") from None
        finally:
            for process in self._running.values():
                process.kill()
        return events

    @cached_property
    def _bars(self) -> Progress:
        """Progress bars on a terminal. Elsewhere nothing, and ``_print`` prints some steps instead."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=console, disable=not console.is_terminal)

    def _start(self, name: str) -> None:
        program = self._programs[name]
        with program.log.open("w") as stderr:
            process = subprocess.Popen(
                program.command,
                env=program.environment,
                cwd=SCRIPTS,  # with -m, Python can also import from this folder
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                pass_fds=[self._lock],
            )
        self._running[name] = process
        if program.steps:
            self._tasks[name] = self._bars.add_task(program.title, total=program.steps)
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put((name, line))
        self._lines.put((name, None))

    def _follow_until_one_ends(self, events: Mapping[str, list[Event]]) -> None:
        while True:
            name, line = self._lines.get()
            if line is None:
                return self._end(name)
            if line.startswith("{"):
                events[name].append(json.loads(line))
                self._print(name, events[name][-1])
            else:
                console.print(line.rstrip(), style="dim", markup=False)

    def _end(self, name: str) -> None:
        """Print what the process wrote to stderr, and fail if the process failed."""
        failed = self._running[name].wait()
        said = self._programs[name].log.read_text()
        if said.strip():
            console.print(said.rstrip(), style="red" if failed else "dim", markup=False)
        if failed:
            console.print(f"[red]The process of {self._programs[name].title} failed with exit status {failed}.[/]")
            raise SystemExit(1)

    def _stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)

    def _print(self, name: str, event: Event) -> None:
        """Print an event in words; events that are data for the orchestrator are not printed."""
        program = self._programs[name]
        words = None
        match event:
            case {"event": "built"}:
                words = f"{event['parameters']:,} parameters, {event['corpus']:,} bytes of text; compiling"
            case {"event": "saving"}:
                note = " (and compiled the graph of the copy)" if event["first"] else ""
                words = (
                    f"async save of step {event['step']}: blocked the loop for {event['seconds'] * 1e3:.0f} ms{note}"
                )
            case {"event": "restored"}:
                words = f"restored step {event['step']} in {event['seconds']:.1f} s, and goes on"
            case {"event": "opened"}:
                words = f"torch {event['torch']} opened the checkpoint"
            case {"event": "history"}:
                console.print(event["table"], markup=False)
            case {"event": "step"}:
                done, loss = event["step"] + 1, event["loss"]
                if name in self._tasks:
                    title = f"{program.title}: loss {loss:.3f}"
                    self._bars.update(self._tasks[name], completed=done - program.first, description=title)
                if not console.is_terminal and done % 8 == 0:
                    words = f"step {done} of {program.first + program.steps}: loss {loss:.3f}"
        if words is not None:
            console.print(f"[bold]{program.title:22}[/] {words}")


def lock_of(path: Path) -> int:
    """Open the file that a demo locks while it, or one of its processes, uses the output folder."""
    return os.open(path, os.O_CREAT | os.O_RDWR)
