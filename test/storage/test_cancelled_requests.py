"""Cancelling saves and loads while a store does not answer: they end at once, and late puts are harmless.

Without the cancellation, each of these tests would wait for the time limit of a request, which is 600 s.
"""

import pickle
import signal
import threading
from concurrent.futures import Future

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import random_bits, same_bits
from support.simulated_store import Fault, Store, asks
from torch_xla_ckpt.storage import cancellation
from torch_xla_ckpt.storage.cancellation import Cancellation, clean_up
from torch_xla_ckpt.storage.deadline import GivenUp, RequestTimeout, call_within, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RUN = "run/step-1"
PUTS = {"lease": "lease-*", "data": "*.distcp", "manifest": "manifest-*", "commit": ".metadata"}


@pytest.fixture
def store():
    with Store() as store:
        yield store


@pytest.fixture
def interrupt():
    """A function that sends SIGINT to the main thread, as Ctrl-C does.

    A signal that comes right before a thread waits for a lock does not end the wait. So it is sent until it is noticed.
    """
    noticed = threading.Event()

    def handle(*_):
        noticed.set()
        raise KeyboardInterrupt

    def send():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not noticed.wait(1.0):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    yield lambda: threading.Thread(target=send, daemon=True).start()
    noticed.set()
    signal.signal(signal.SIGINT, before)


class Stall:
    """Lets the first matching request of a store wait, until the block ends.

    Attributes:
        began: an event that is set when the request waits.
    """

    def __init__(self, store, when, *, then=lambda: None, times=1):
        self.began, self._carried_out = threading.Event(), threading.Semaphore(0)
        self._store, self._then = store, then
        self._put = store.put
        store.put = self._record
        self._failing = store.failing(
            Fault(until=threading.Event()), lambda request: self._is_met(when, request), times
        )

    def _is_met(self, when, request):
        if not when(request):
            return False
        if not self.began.is_set():
            self.began.set()
            self._then()
        return True

    def _record(self, path, data):
        self._put(path, data)
        if self._met and path == self._met[0].path:
            self._carried_out.release()

    def __enter__(self):
        self._met = self._failing.__enter__()
        return self

    def __exit__(self, *error):
        self._failing.__exit__(*error)

    def wait_until_carried_out(self):
        """Wait until the store has carried out the put, after the block."""
        assert self._carried_out.acquire(timeout=60)


def state(seed):
    return {f"t{n}": random_bits((512, 1024), torch.float32, seed * 100 + n) for n in range(6)}


def writer(store):
    return xc.ShardWriter(store.url(RUN), storage_options=store.options)


def save(store, seed):
    return xc.save(state(seed), storage_writer=writer(store))


def holds(store, seed):
    """Return whether the checkpoint is whole, and has every bit of a state."""
    target = {key: torch.zeros_like(tensor) for key, tensor in state(seed).items()}
    xc.load(target, storage_reader=xc.ShardReader(store.url(RUN), storage_options=store.options))
    return all(same_bits(target[key], tensor) for key, tensor in state(seed).items())


def require_next_saves_work(store, stall, request):
    """Let the store carry out the late put, and check the checkpoint before and after the next save."""
    stall.wait_until_carried_out()
    assert holds(store, 1 if request == "commit" else 0)
    save(store, 2)
    assert holds(store, 2)
    names = store.names(RUN)
    save(store, 3)
    assert holds(store, 3) and len(store.names(RUN)) == len(names), "something of the cancelled save is left"


@pytest.mark.parametrize("request_", PUTS)
def test_a_cancelled_save_does_not_wait_for_a_stalled_put(store, request_):
    save(store, 0)
    stager = xc.SPMDStager("host")
    with Stall(store, asks("put", PUTS[request_])) as stall:
        handle = xc.async_save(state(1), storage_writer=writer(store), stager=stager)
        assert stall.began.wait(60)
        stager.close(cancel=True)
        with pytest.raises(xc.CheckpointError, match=r"given up|the save was cancelled") as caught:
            handle.result()
        assert ("the new checkpoint appears later" in str(caught.value)) == (request_ == "commit")
        assert holds(store, 0)
    require_next_saves_work(store, stall, request_)


@pytest.mark.parametrize("request_", PUTS)
def test_an_interrupted_save_does_not_wait_for_a_stalled_put(store, request_, interrupt, caplog):
    save(store, 0)
    with Stall(store, asks("put", PUTS[request_]), then=interrupt) as stall:
        with pytest.raises(KeyboardInterrupt):
            save(store, 1)
        assert ("the new checkpoint appears later" in caplog.text) == (request_ == "commit")
        assert holds(store, 0)
    require_next_saves_work(store, stall, request_)


@pytest.mark.parametrize("name", ["*.distcp", ".metadata", "manifest-*"])
def test_an_interrupted_load_does_not_wait_for_a_stalled_read(store, name, interrupt):
    save(store, 0)
    with Stall(store, asks("get", name), then=interrupt), pytest.raises(KeyboardInterrupt):
        holds(store, 0)
    assert holds(store, 0)


def test_a_cancelled_save_ends_while_the_store_answers_nothing(store, monkeypatch):
    monkeypatch.setattr(cancellation, "_CLEAN_UP", 0.1)
    save(store, 0)
    stager = xc.SPMDStager("host")
    begun = []

    def silent(request):
        begun.extend([request] if asks("put", "*.distcp")(request) else [])
        return bool(begun)

    with Stall(store, silent, times=None) as stall:
        handle = xc.async_save(state(1), storage_writer=writer(store), stager=stager)
        assert stall.began.wait(60)
        stager.close(cancel=True)
        with pytest.raises(xc.CheckpointError, match=r"given up|the save was cancelled"):
            handle.result()
    assert holds(store, 0)
    save(store, 2)
    assert holds(store, 2)


def test_the_first_save_at_a_path_that_is_carried_out_late_looks_unfinished(store):
    stager = xc.SPMDStager("host")
    with Stall(store, asks("put", "*.distcp")) as stall:
        xc.async_save({"x": torch.ones(1000)}, storage_writer=writer(store), stager=stager)
        assert stall.began.wait(60)
        stager.close(cancel=True)
    stall.wait_until_carried_out()
    assert any(name.startswith("lease-") for name in store.names(RUN)), store.names(RUN)
    with pytest.raises(xc.CheckpointError):
        holds(store, 0)
    save(store, 2)
    assert holds(store, 2)


def test_the_failure_of_one_call_gives_up_the_others_and_is_the_error():
    never = threading.Event()
    waiting = threading.Event()

    def waits():
        call_within(600, lambda: (waiting.set(), never.wait()))

    def fails():
        assert waiting.wait(60)
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        together([waits, fails, waits])
    never.set()


def test_cancelled_requests_do_not_begin_and_cleaning_up_goes_on():
    outer = Cancellation()
    with outer.applied():
        inner = Cancellation()
    begun = []
    outer.cancel()
    outer.cancel()
    with inner.applied():
        with pytest.raises(GivenUp):
            call_within(600, begun.append, 1)
        with clean_up():
            call_within(600, begun.append, 2)
        with pytest.raises(GivenUp):
            call_within(600, begun.append, 3)
    assert begun == [2] and inner.is_cancelled
    call_within(600, begun.append, 4)
    assert begun == [2, 4]


def test_errors_about_requests_can_be_sent_to_other_ranks():
    for error in (RequestTimeout("no answer", Future(), "read x"), GivenUp("given up", Future(), "read x")):
        other = pickle.loads(pickle.dumps(error))
        assert type(other) is type(error) and str(other) == str(error) and other.call is None
