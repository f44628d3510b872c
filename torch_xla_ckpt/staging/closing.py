"""The ``with`` statement of stagers and managers."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TypeVar

from torch_xla_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="ClosesOnExit")


class ClosesOnExit:
    """Base of context managers that close at the end of the block.

    If the block raises an error, that error is raised, and an error of ``close`` is only logged.
    """

    def close(self) -> None:
        """Wait for async saves that are under way, and release all resources.

        Raises:
            CheckpointError: an async save failed, and nobody has read its error.
        """
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            logger.error("an async save failed too: %s", failed)
