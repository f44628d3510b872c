"""Waiting for a checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

POLL_SECONDS = 0.1


def wait_for_commit(checkpoint: Path) -> None:
    """Wait until a checkpoint is committed: its ``.metadata`` is written last, in one step.

    Raises:
        SystemExit: the process that started this one has ended, so the checkpoint may never come.
    """
    parent = os.getppid()
    while not (checkpoint / ".metadata").exists():
        if os.getppid() != parent:
            raise SystemExit("The demo has ended before the checkpoint was saved.")
        time.sleep(POLL_SECONDS)
