"""Noticing that the machine is about to be taken away, in all processes at the same step."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class Terminated:
    """Notes a SIGTERM instead of dying of it. A handler that was there before is called too."""

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """Begin to listen. Where that is impossible, which is logged, nothing is ever received."""
        try:
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        except ValueError as error:  # not in the main thread
            logger.warning("SIGTERM is not noticed, so nothing is saved on preemption: %s", error)

    def restore(self) -> None:
        """Put back the handler that was there before, unless somebody has replaced ours."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):
            self._before(number, frame)
