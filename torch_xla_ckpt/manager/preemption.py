"""Noticing that the machine is about to be taken away, in all processes at the same step."""

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
    """Notes a SIGTERM instead of dying of it. The handler that was installed before is called too.

    All listeners of a process share one handler, a link in the chain of handlers. The handler goes with the last
    listener, whether that was closed or garbage-collected, in whichever order. Forked children never listen.
    """

    def __init__(self) -> None:
        self.received = False
        self._owner = forks.Owner()
        self._link: _Link | None = None

    def install(self) -> None:
        """Begin to listen. If that is impossible, log a warning; then nothing is ever received."""
        try:
            self._link = _installed(self)
        except ValueError as error:  # not in the main thread
            logger.warning("SIGTERM is not noticed, so nothing is saved on preemption: %s", error)
        else:
            weakref.finalize(self, _take_out).atexit = False

    def restore(self) -> None:
        """Stop listening. The last listener puts back the handler that was installed before."""
        self._link = None
        _listeners.discard(self)
        _take_out()

    def was_received(self) -> bool:
        """Whether a SIGTERM has been received."""
        return self.received

    def hears(self, link: _Link | None = None) -> bool:
        """Whether this listens, in this process; with ``link``, whether through that link."""
        return self._owner.is_here and self._link is not None and link in (None, self._link)


class _Link:
    """A handler of SIGTERM that notes the signal for its listeners, then calls the handler installed before.

    A program may keep a link for longer than there are listeners: another handler was installed over it and calls it,
    or the program puts it back. The link then does what the handler before it would do.

    Args:
        before: that handler, as ``signal.getsignal`` returns it.
    """

    def __init__(self, before: Any):
        # None stands for a handler that was not installed from Python, which nobody can put back.
        self.before = signal.SIG_DFL if before is None else before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for listener in self.listeners():
            listener.received = True
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL and not any(listener.hears() for listener in list(_listeners)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def listeners(self) -> list[SigtermListener]:
        return [listener for listener in list(_listeners) if listener.hears(self)]


_listeners: weakref.WeakSet[SigtermListener] = weakref.WeakSet()
_masks = threading.local()  # the signal mask of a thread that forks


def _installed(listener: SigtermListener) -> _Link:
    """The link that ``listener`` hears SIGTERM through: the one that is installed, or a new one.

    Raises:
        ValueError: this is not the main thread.
    """
    current = signal.getsignal(signal.SIGTERM)
    link = current if isinstance(current, _Link) else _Link(current)
    # A listener first: a garbage collection before the next line must not take the link out.
    listener._link = link
    _listeners.add(listener)
    try:
        signal.signal(signal.SIGTERM, link)
    except ValueError:
        listener._link = None
        _listeners.discard(listener)
        raise
    if current is None:
        logger.warning(
            "SIGTERM had a handler that was not installed from Python. It is not called any more, and cannot be put "
            "back. Pass chkpt_on_preemption=False to keep it"
        )
    return link


def _take_out() -> None:
    """Put back what was installed before links that nobody listens through.

    Only the main thread can. In another one, such links stay and do what the handler before them would do.
    """
    while threading.current_thread() is threading.main_thread():
        current = signal.getsignal(signal.SIGTERM)
        if not isinstance(current, _Link) or current.listeners():
            return
        signal.signal(signal.SIGTERM, current.before)


def _before_fork() -> None:
    """Hold SIGTERM back until the child is rid of the handler; a signal in between would be lost."""
    _masks.before = None
    if any(listener.hears() for listener in list(_listeners)):
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    mask, _masks.before = getattr(_masks, "before", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    _listeners.clear()
    _take_out()
    _after_fork()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
