"""Retries of requests to a run's folder: an error of access says nothing about a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from torch_xla_ckpt.storage import Location

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt; longer before later ones

T = TypeVar("T")


class Retries:
    """Calls functions that make requests, and calls them again if the storage does not answer.

    Args:
        location: the run's folder, for error messages.
        closed: an event that ends the pauses between attempts.
    """

    def __init__(self, location: Location, closed: threading.Event):
        self._location = location
        self._closed = closed

    def run(self, action: Callable[[], T], doing: str) -> T:
        """Return the result of ``action``, after up to three attempts.

        Args:
            action: a function that makes requests.
            doing: the operation in words, for error messages: "listing the steps".

        Raises:
            FileNotFoundError: the file that ``action`` needs does not exist.
            CheckpointError: the storage does not answer, or a checkpoint is damaged.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action()
            except (FileNotFoundError, CheckpointError):
                raise
            except Exception as error:
                if attempt == _ATTEMPTS or self._closed.is_set():
                    raise CheckpointError(
                        f"{doing} of {self._location} failed {attempt} times, so the content of the folder is unknown: "
                        f"{type(error).__name__}: {error}. Try again when the storage answers"
                    ) from error
                logger.info("%s of %s failed, trying again: %s", doing, self._location, error)
                self._closed.wait(_PAUSE * attempt)
        raise AssertionError("the last attempt returns or raises")

    def run_twice_if_damaged(self, action: Callable[[], T], doing: str) -> T:
        """Return the result of ``action``; read again what seems damaged, because a broken connection looks alike."""
        try:
            return self.run(action, doing)
        except CorruptCheckpointError:
            return self.run(action, doing)
