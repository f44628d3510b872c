"""The optional progress bar."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch_xla_ckpt.errors import CheckpointError

_DELAY = 2.0  # seconds until the bar appears


OnProgress = Callable[[int, int], object]
"""A function that is called, in any thread, with the bytes just done and the bytes of the whole operation."""


class Progress:
    """A progress bar in bytes, which appears on a terminal after a delay.

    Args:
        operation: the word before the bar, such as "loading".
        total: returns the bytes of the whole operation. Called only if the progress is shown.
        shown: True shows the bar, and a function is called instead of showing one. If False, all methods do nothing.

    Raises:
        CheckpointError: ``shown`` is True and tqdm is not installed.
    """

    def __init__(self, operation: str, total: Callable[[], int], shown: bool | OnProgress):
        self._bar: Any = None
        self._call: Callable[[int], object] | None = None
        if callable(shown):
            call, whole = shown, total()
            self._call = lambda nbytes: call(nbytes, whole)
        elif shown:
            try:
                from tqdm import tqdm
            except ImportError as error:
                raise CheckpointError(
                    "progress=True needs tqdm. Install it with: pip install 'torch_xla_ckpt[progress]'"
                ) from error
            self._bar = tqdm(
                desc=operation,
                total=total(),
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                delay=_DELAY,
                disable=None,  # shows the bar on terminals only
            )

    def advance(self, nbytes: int) -> None:
        """Count ``nbytes`` more bytes as done."""
        if self._call is not None:
            self._call(nbytes)
        elif self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
