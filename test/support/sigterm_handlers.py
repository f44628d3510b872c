"""Handlers of SIGTERM that come and go in any order, in a process of their own.

``fork_server.py`` runs ``chain``.
"""

import gc
import multiprocessing
import os
import signal

from torch_xla_ckpt.manager.sigterm import SigtermListener

PATIENCE = 60  # seconds until a child counts as hanging


def chain(operations):
    """What a process does on SIGTERM after operations on its handlers, and what it would do without our listeners."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_chained, args=(sender, operations))
    child.start()
    sender.close()
    said = []
    while receiver.poll(PATIENCE):
        try:
            said.append(receiver.recv())
        except EOFError:
            break
    child.join(PATIENCE)
    return {"said": said, "exit": child.exitcode}


class User:
    """A handler of the program, which does what well-behaved ones do: it goes on to the handler before it.

    Args:
        number: told when it is called.
        shadow: the handler that would be before it if there were no listeners.
    """

    def __init__(self, number, shadow, say):
        self.number, self.shadow, self._say = number, shadow, say
        self.before = signal.signal(signal.SIGTERM, self)

    def __call__(self, number, frame):
        self._say(["called", self.number])
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _chained(sender, operations):
    gc.disable()  # what is dropped goes by its reference count, in this thread
    listeners, users, shadow = {}, 0, None
    for number, (verb, which) in enumerate(operations):
        if verb == "listen":
            listeners[number] = SigtermListener()
            listeners[number].install()
        elif verb in ("close", "drop") and listeners:
            listener = listeners.pop(sorted(listeners)[which % len(listeners)])
            if verb == "close":
                listener.restore()
            del listener
        elif verb == "replace":
            shadow = User(number, shadow, sender.send)
            users += 1
        elif verb == "put back" and shadow is not None:
            signal.signal(signal.SIGTERM, shadow.before)
            shadow = shadow.shadow
        if not users and listeners:
            os.kill(os.getpid(), signal.SIGTERM)
            assert all(listener.received for listener in listeners.values())
        elif not users:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    for listener in listeners.values():
        listener.restore()
    would = []
    while shadow is not None:
        would.append(["called", shadow.number])
        shadow = shadow.shadow
    sender.send(["without", would])
    os.kill(os.getpid(), signal.SIGTERM)
    sender.send(["survived", None])
