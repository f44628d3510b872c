"""Data loaders that go on in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.types import _Stateful as Stateful

from torch_xla_ckpt.state import random_state, set_random_state

logger = logging.getLogger(__name__)

_MARK = "torch_xla_ckpt_batches"
_NONE = object()
"""Stands for the batch after the last one."""


class ResumableLoader:
    """A training loader with a state, around any iterable of batches.

    A loader that has ``state_dict`` itself, such as torchdata's ``StatefulDataLoader``, keeps its own state. For all
    others, the state is the number of batches that this epoch has had, and the random generators at its start. To
    resume, the epoch begins as it did before, and these batches are read and dropped.

    Args:
        loader: the loader.
        is_epoch_over: returns whether the last batch that was handed out ended the epoch.
        unused: returns the number of batches that were handed out and not yet trained on.
        beginning: returns a context in which an epoch begins and its first batch is read.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        is_epoch_over: Callable[[], bool],
        unused: Callable[[], int],
        beginning: Callable[[], AbstractContextManager[None]],
    ):
        self._loader = loader
        self._beginning = beginning
        self._is_epoch_over = is_epoch_over
        self._unused = unused
        self._count = 0
        self._start: dict[str, Any] | None = None  # the random generators when the epoch began
        self._resume: dict[str, Any] | None = None
        self._states: list[dict[str, Any]] = []  # of the loader, before each of the last two batches

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while the object is copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def _iterator(self) -> Any:
        """The loader's own iterator, whose workers Lightning stops at the end."""
        return getattr(self._loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if hasattr(self._loader, "_iterator"):
            self._loader._iterator = value

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next batch follows."""
        ahead = self._unused()
        if isinstance(self._loader, Stateful):
            return self._states[-ahead] if 0 < ahead <= len(self._states) else self._loader.state_dict()
        if self._resume is not None:
            return {_MARK: dict(self._resume)}
        is_over = self._is_epoch_over() and not ahead
        return {_MARK: {"count": 0 if is_over else self._count - ahead, "start": None if is_over else self._start}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch go on where ``state_dict`` was called."""
        if isinstance(self._loader, Stateful):
            self._loader.load_state_dict(state)
        elif _MARK in state:
            self._resume = dict(state[_MARK])
        else:
            logger.warning(
                "the checkpoint has the state of a %s, and the loader is a %s: the epoch begins again",
                "data loader with a state of its own",
                type(self._loader).__name__,
            )

    def _epoch(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is None or resume["start"] is None:
            with self._beginning():
                self._count, self._start = 0, self._generators()
                batches = iter(self._loader)
                batch = self._next(batches)
        else:
            self._count, self._start = resume["count"], resume["start"]
            with _same_random_numbers():
                if self._start.get("has_workers"):
                    iter(self._loader)  # workers that persist draw other numbers in their first epoch
                self._set_generators(self._start)
                batches = iter(self._loader)
                for _ in range(self._count):
                    next(batches, None)
            batch = self._next(batches)
        while batch is not _NONE:
            self._count += 1
            yield batch
            batch = self._next(batches)

    def _next(self, batches: Iterator[Any]) -> Any:
        if isinstance(self._loader, Stateful):
            self._states = [*self._states[-1:], self._loader.state_dict()]
        return next(batches, _NONE)

    def _generators(self) -> dict[str, Any]:
        """Return all that the order of the batches may depend on: generators, and whether workers persist."""
        own = [one.get_state() for one in self._own_generators()]
        return {"program": random_state(), "own": own, "has_workers": self._iterator is not None}

    def _set_generators(self, states: dict[str, Any]) -> None:
        set_random_state(states["program"])
        for generator, state in zip(self._own_generators(), states["own"]):
            generator.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        sampler = getattr(self._loader, "sampler", None)
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        holders = (self._loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def is_own_state(state: Any) -> bool:
    """Return whether a loader's state is that of a ``ResumableLoader``, which stock Lightning does not know."""
    return isinstance(state, dict) and _MARK in state


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Let the block draw random numbers without changing those that the program draws later."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
