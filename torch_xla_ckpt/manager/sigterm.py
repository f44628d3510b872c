"""A listener for SIGTERM that leaves the program's own handler in place."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any

from torch_xla_ckpt.runtime import forks

logger = logging.getLogger(__name__)


class SigtermListener:
    """Takes note of SIGTERM, instead of letting it end the process. Then calls the handler installed before.

    All listeners of a process share one handler. The last listener removes it, when it is closed or garbage-collected.
    Forked children never listen.

    Attributes:
        received: True after a SIGTERM.
    """

    def __init__(self) -> None:
        self.received = False
        self._owner = forks.Owner()
        self._handler: _Handler | None = None

    def install(self) -> None:
        """Begin to listen. Log a warning if that is impossible, as it is outside the main thread."""
        try:
            self._handler = _install(self)
        except ValueError as error:  # not in the main thread
            logger.warning("SIGTERM is not noticed, so no step is saved on preemption: %s", error)
        else:
            weakref.finalize(self, _remove_unused).atexit = False

    def restore(self) -> None:
        """Stop listening. The last listener puts back the handler that was installed before."""
        self._handler = None
        _listeners.discard(self)
        _remove_unused()

    def was_received(self) -> bool:
        """Return whether this process has received a SIGTERM."""
        return self.received

    def is_listening(self, handler: _Handler | None = None) -> bool:
        """Return whether this listens in this process; with ``handler``, whether it listens through that handler."""
        return self._owner.is_here and self._handler is not None and handler in (None, self._handler)


class _Handler:
    """A handler of SIGTERM: tells its listeners, then calls the handler installed before.

    A program may keep a handler longer than its listeners: another handler was installed over it and calls it, or the
    program puts it back. Without listeners, it only does what the handler before it would do.

    Args:
        before: the handler installed before, as ``signal.getsignal`` returns it.
    """

    def __init__(self, before: Any):
        # None stands for a handler that was not installed from Python. Python cannot put it back.
        self.before = signal.SIG_DFL if before is None else before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for listener in self.listeners():
            listener.received = True
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL and not any(listener.is_listening() for listener in list(_listeners)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def listeners(self) -> list[SigtermListener]:
        """The objects that listen through this handler."""
        return [listener for listener in list(_listeners) if listener.is_listening(self)]


_listeners: weakref.WeakSet[SigtermListener] = weakref.WeakSet()
_masks = threading.local()  # the signal mask of a thread that forks


def _install(listener: SigtermListener) -> _Handler:
    """Install a handler for ``listener``, or return the one that is installed already.

    Raises:
        ValueError: this is not the main thread.
    """
    current = signal.getsignal(signal.SIGTERM)
    handler = current if isinstance(current, _Handler) else _Handler(current)
    # Add the listener first: a garbage collection before the next line must not remove the handler.
    listener._handler = handler
    _listeners.add(listener)
    try:
        signal.signal(signal.SIGTERM, handler)
    except ValueError:
        listener._handler = None
        _listeners.discard(listener)
        raise
    if current is None:
        logger.warning(
            "SIGTERM had a handler that was not installed from Python. That handler is not called any more, and cannot "
            "be put back. Pass chkpt_on_preemption=False to keep it"
        )
    return handler


def _remove_unused() -> None:
    """Remove our handlers that have no listeners, and put back the handler before them.

    Only the main thread can. After a call from another thread, such handlers stay and do what the handler before them
    would do.
    """
    while threading.current_thread() is threading.main_thread():
        current = signal.getsignal(signal.SIGTERM)
        if not isinstance(current, _Handler) or current.listeners():
            return
        signal.signal(signal.SIGTERM, current.before)


def _before_fork() -> None:
    """Block SIGTERM until the child has removed the handler. A signal in between would be lost."""
    _masks.before = None
    if any(listener.is_listening() for listener in list(_listeners)):
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    mask, _masks.before = getattr(_masks, "before", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    _listeners.clear()
    _remove_unused()
    _after_fork()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
