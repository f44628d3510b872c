"""A progress bar for those who asked for one."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch_xla_ckpt.errors import CheckpointError

_DELAY = 2.0  # seconds; what is done before that shows no bar


class Progress:
    """Shows bytes done of ``total()`` on a terminal, after a delay; does nothing when not ``shown``.

    Raises:
        CheckpointError: it is to be shown, and tqdm is not installed.
    """

    def __init__(self, what: str, total: Callable[[], int], shown: bool):
        self._bar: Any = None
        if shown:
            try:
                from tqdm import tqdm
            except ImportError as error:
                raise CheckpointError(
                    "progress=True needs tqdm. Install it with: pip install 'torch_xla_ckpt[progress]'"
                ) from error
            # disable=None: only where someone is looking, that is on a terminal.
            self._bar = tqdm(
                desc=what, total=total(), unit="B", unit_scale=True, unit_divisor=1024, delay=_DELAY, disable=None
            )

    def advance(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
