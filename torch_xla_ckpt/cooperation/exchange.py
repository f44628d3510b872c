"""Passing parcels between ranks, over a gloo group that serves one load.

gloo has no way to cancel an operation. It takes a message that is too short for a whole one. It can also forget an
operation that begins while the other rank closes the connection. So each rank sends the checksums of its parcels beside
them, and threads that can be left behind wait for gloo. A rank that fails closes its connections. Each rank watches the
connection to the next rank, and closes its own when that one breaks. So all ranks learn of an error.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from torch_xla_ckpt.cooperation.needs import Parcel
from torch_xla_ckpt.errors import CheckpointError, OtherRankError

AnyBytes = np.ndarray[Any, np.dtype[np.uint8]]

_AT_ONCE = timedelta(milliseconds=1)
_AT_THE_END = timedelta(seconds=5)
_ALWAYS = timedelta(days=365)
# Tags of messages: one that is never sent, and the one that each rank sends to the rank before it at the end.
_ABORT, _END, _FIRST = 0, 1, 2


class Exchange:
    """The connections of one load.

    Args:
        new_group: creates a gloo group of the ranks. All ranks must call it at the same point.
        ranks: the ranks of the group, as numbered in the default group, for errors.
        doing: the operation, for errors.

    Attributes:
        rank: this rank, as numbered in the group.

    Raises:
        OtherRankError: a rank did not come.
    """

    def __init__(self, new_group: Callable[[], dist.ProcessGroup], ranks: list[int], doing: str):
        try:
            self._group = new_group()
        except CheckpointError as error:
            raise OtherRankError(f"{error}") from error
        self.rank = dist.get_rank(self._group)
        self._ranks = ranks
        self._doing = doing
        self._lock = threading.Lock()
        self._is_over = False
        self._waiting: set[Future[None]] = set()
        end = self.receive(np.zeros(1, dtype=np.uint8), (self.rank + 1) % len(ranks), _END)
        threading.Thread(target=self._watch, args=(end,), name="cooperation-watch", daemon=True).start()

    def send(self, data: AnyBytes, rank: int, tag: int) -> dist.Work:
        """Begin to send bytes to a rank, which must receive the same number of bytes with the same tag."""
        return self._begun(lambda: dist.isend(_tensor(data), group=self._group, group_dst=rank, tag=tag), rank)

    def receive(self, data: AnyBytes, rank: int, tag: int) -> dist.Work:
        """Begin to receive bytes from a rank."""
        return self._begun(lambda: dist.irecv(_tensor(data), group=self._group, group_src=rank, tag=tag), rank)

    def wait(self, operations: list[tuple[dist.Work, int, str]]) -> None:
        """Wait until messages are sent or received.

        Args:
            operations: each operation with the other rank, as numbered in the group, and with what is passed on, for
                the error.

        Raises:
            OtherRankError: another rank failed or left, or did not come in time.
        """

        def wait_for_all() -> None:
            for work, rank, what in operations:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._error(rank, what, error) from error

        if operations:
            self._left_behind_if_over(wait_for_all)

    def abort(self) -> None:
        """End all waits of this rank, and the waits of other ranks for this one, with an error."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            waiting = list(self._waiting)
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(self._error_of_another())
        # A wait that takes too long closes all connections of a gloo group, and gloo has no other way to do so. It must
        # be a wait for a rank whose connection is still there.
        for rank in range(len(self._ranks)):
            if rank != self.rank:
                with suppress(RuntimeError, OtherRankError):
                    self.receive(np.empty(1, dtype=np.uint8), rank, _ABORT).wait(_AT_ONCE)

    @contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Abort if the block raises."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        """Close the connections. All ranks must have ended their waits."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        with suppress(ValueError, AssertionError, RuntimeError, OtherRankError):  # the program destroyed the group
            if not was_over:
                self.send(np.zeros(1, dtype=np.uint8), (self.rank - 1) % len(self._ranks), _END).wait(_AT_THE_END)
            dist.destroy_process_group(self._group)

    def _watch(self, end: dist.Work) -> None:
        """Wait until the next rank closes its connections, and abort if that is not the end."""
        try:
            end.wait(_ALWAYS)
        except RuntimeError:
            self.abort()

    def _left_behind_if_over(self, function: Callable[[], None]) -> None:
        """Call a function in a thread. Leave the thread behind if the exchange is aborted."""
        done: Future[None] = Future()

        def call() -> None:
            try:
                function()
                with suppress(InvalidStateError):
                    done.set_result(None)
            except BaseException as error:
                with suppress(InvalidStateError):
                    done.set_exception(error)

        with self._lock:
            if self._is_over:
                raise self._error_of_another()
            self._waiting.add(done)
        threading.Thread(target=call, name="cooperation-wait", daemon=True).start()
        try:
            done.result()
        finally:
            with self._lock:
                self._waiting.discard(done)

    def _begun(self, begin: Callable[[], dist.Work | None], rank: int) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise self._error(rank, "files", error) from error
        assert work is not None, "the rank is in the group"
        return work

    def _error(self, rank: int, what: str, error: RuntimeError) -> OtherRankError:
        return OtherRankError(
            f"{self._doing} failed: the connection to rank {self._ranks[rank]}, which reads {what} together with this "
            f"rank, broke or was silent for too long ({type(error).__name__}: {error}). If another rank has an error, "
            "that is the reason. If the network between the ranks is slow or not reliable, pass cooperative=False"
        )

    def _error_of_another(self) -> OtherRankError:
        return OtherRankError(
            f"{self._doing} failed: another rank, which reads together with this one, failed or left. The reason is in "
            "its error"
        )


class RoundOfMessages:
    """The messages of one round on this rank.

    Args:
        exchange: the connections.
        parcels: the parcels of the round that this rank reads for others or gets from others, in order.
    """

    def __init__(self, exchange: Exchange, parcels: list[Parcel]):
        self._exchange = exchange
        self._sent: dict[int, list[Parcel]] = defaultdict(list)
        self._expected: dict[int, list[Parcel]] = defaultdict(list)
        for parcel in parcels:
            if parcel.reader == exchange.rank:
                for receiver in parcel.receivers:
                    self._sent[receiver].append(parcel)
            else:
                self._expected[parcel.reader].append(parcel)
        self._sending: list[tuple[dist.Work, int, str]] = []
        self._receiving: list[tuple[dist.Work, int, str]] = []
        self._digests: dict[int, AnyBytes] = {}
        self._arrays: Mapping[int, AnyBytes] = {}

    @property
    def outgoing(self) -> list[Parcel]:
        """The parcels that this rank reads for others."""
        return list({parcel.number: parcel for parcels in self._sent.values() for parcel in parcels}.values())

    @property
    def incoming(self) -> list[Parcel]:
        """The parcels that this rank gets from others."""
        return [parcel for parcels in self._expected.values() for parcel in parcels]

    def send(self, arrays: Mapping[int, AnyBytes]) -> None:
        """Begin to send. The arrays must stay as they are until ``finish`` returns.

        Args:
            arrays: the bytes of each outgoing parcel, by its number.
        """
        digests = {number: np.frombuffer(xxhash.xxh3_64_digest(data.data), np.uint8) for number, data in arrays.items()}
        for receiver, parcels in self._sent.items():
            table = np.concatenate([digests[parcel.number] for parcel in parcels])
            self._sending.append((self._exchange.send(table, receiver, _tag(parcels[0], True)), receiver, "checksums"))
            for parcel in parcels:
                work = self._exchange.send(arrays[parcel.number], receiver, _tag(parcel, False))
                self._sending.append((work, receiver, parcel.file))

    def receive(self, arrays: Mapping[int, AnyBytes]) -> None:
        """Begin to receive.

        Args:
            arrays: the memory for each incoming parcel, by its number.
        """
        self._arrays = arrays
        for reader, parcels in self._expected.items():
            table = self._digests[reader] = np.zeros(8 * len(parcels), dtype=np.uint8)
            self._receiving.append((self._exchange.receive(table, reader, _tag(parcels[0], True)), reader, "checksums"))
            for parcel in parcels:
                work = self._exchange.receive(arrays[parcel.number], reader, _tag(parcel, False))
                self._receiving.append((work, reader, parcel.file))

    def received(self) -> list[Parcel]:
        """Wait for all incoming parcels. Return those that have not arrived as they were sent.

        Raises:
            OtherRankError: another rank failed or left.
        """
        self._exchange.wait(self._receiving)
        self._receiving.clear()
        return [
            parcel
            for reader, parcels in self._expected.items()
            for parcel, digest in zip(parcels, self._digests[reader].reshape(-1, 8))
            if xxhash.xxh3_64_digest(self._arrays[parcel.number].data) != digest.tobytes()
        ]

    def finish(self) -> None:
        """Wait until the other ranks have got everything.

        Raises:
            OtherRankError: another rank failed or left.
        """
        self._exchange.wait(self._sending)
        self._sending.clear()


def _tag(parcel: Parcel, digests: bool) -> int:
    """Return the number by which both ranks know a message. The first parcel's number stands for the checksums."""
    return 2 * parcel.number + _FIRST + digests


def _tensor(data: AnyBytes) -> torch.Tensor:
    return torch.from_numpy(data)
