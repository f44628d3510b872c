"""Passing parcels of bytes between ranks, over a gloo group that serves one load.

gloo has no way to cancel an operation, and takes a message that is too short for a whole one. So each rank sends the
checksums of its parcels beside them. A rank that fails closes its connections, which ends the waits of all other ranks.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from torch_xla_ckpt.cooperation.needs import Parcel
from torch_xla_ckpt.errors import OtherRankError

AnyBytes = np.ndarray[Any, np.dtype[np.uint8]]

_ABORT = timedelta(milliseconds=1)
_TAG_OF_ABORT = 0  # of a message that is never sent


class Exchange:
    """The connections of one load.

    Args:
        new_group: creates a gloo group of the ranks. All ranks must call it at the same point.
        ranks: the ranks of the group, as numbered in the default group, for errors.
        doing: the operation, for errors.
    """

    def __init__(self, new_group: Callable[[], dist.ProcessGroup], ranks: list[int], doing: str):
        self._group = new_group()
        self._ranks = ranks
        self._rank = dist.get_rank(self._group)
        self._doing = doing
        self._lock = threading.Lock()
        self._is_aborted = False

    def send(self, data: AnyBytes, rank: int, tag: int) -> dist.Work:
        """Begin to send bytes to a rank, which must receive the same number of bytes with the same tag."""
        return self._begun(lambda: dist.isend(_tensor(data), group=self._group, group_dst=rank, tag=tag), rank)

    def receive(self, data: AnyBytes, rank: int, tag: int) -> dist.Work:
        """Begin to receive bytes from a rank."""
        return self._begun(lambda: dist.irecv(_tensor(data), group=self._group, group_src=rank, tag=tag), rank)

    def wait(self, work: dist.Work, rank: int, what: str) -> None:
        """Wait until a rank has sent or received.

        Args:
            work: the operation.
            rank: the other rank, as numbered in the group.
            what: what is passed on, for the error.

        Raises:
            OtherRankError: the other rank failed or left, or did not come in time.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._error(rank, what, error) from error

    def abort(self) -> None:
        """End all waits of this rank, and the waits of other ranks for this one, with an error."""
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
        # A wait that takes too long closes all connections of a gloo group, and gloo has no other way to do so. It must
        # be a wait for a rank whose connection is still there.
        for rank in range(len(self._ranks)):
            if rank != self._rank:
                with suppress(RuntimeError, OtherRankError):
                    self.receive(np.empty(1, dtype=np.uint8), rank, _TAG_OF_ABORT).wait(_ABORT)

    def close(self) -> None:
        """Close the connections. All ranks must have ended their waits."""
        with suppress(ValueError, AssertionError, RuntimeError):  # the program has destroyed the group
            dist.destroy_process_group(self._group)

    def _begun(self, begin: Callable[[], dist.Work | None], rank: int) -> dist.Work:
        try:
            work = begin()
        except RuntimeError as error:
            raise self._error(rank, "bytes", error) from error
        assert work is not None, "the rank is in the group"
        return work

    def _error(self, rank: int, what: str, error: RuntimeError) -> OtherRankError:
        return OtherRankError(
            f"{self._doing} failed: the connection to rank {self._ranks[rank]}, which reads {what} together with this "
            f"rank, broke or was silent for too long ({type(error).__name__}: {error}). If another rank has an error, "
            "that is the reason. If the network between the ranks is slow or not reliable, pass cooperative=False"
        )


class RoundOfMessages:
    """The messages of one round on this rank.

    Args:
        exchange: the connections.
        rank: this rank, as numbered in the group.
        parcels: the parcels of the round that this rank reads for others or gets from others, in order.
    """

    def __init__(self, exchange: Exchange, rank: int, parcels: list[Parcel]):
        self._exchange = exchange
        self._sent: dict[int, list[Parcel]] = defaultdict(list)
        self._expected: dict[int, list[Parcel]] = defaultdict(list)
        for parcel in parcels:
            if parcel.reader == rank:
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
        for work, reader, what in self._receiving:
            self._exchange.wait(work, reader, what)
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
        for work, receiver, what in self._sending:
            self._exchange.wait(work, receiver, what)
        self._sending.clear()


def _tag(parcel: Parcel, digests: bool) -> int:
    """Return the number by which both ranks know a message. The first parcel's number stands for the checksums."""
    return 2 * parcel.number + 2 + digests


def _tensor(data: AnyBytes) -> torch.Tensor:
    return torch.from_numpy(data)
