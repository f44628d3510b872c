"""LoadReport: the outcome of every key of a load, with bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from torch_xla_ckpt.reports.requests import RequestCounts
from torch_xla_ckpt.reports.sizes import format_bytes

Status = Literal["loaded", "created", "kept", "missing", "unexpected", "not requested"]
STATUSES: tuple[Status, ...] = get_args(Status)
_PRINTED = ("loaded", "resharded", "cast", "renamed", "created", "kept", "missing", "unexpected", "not requested")
_SHOWN = 5  # keys of each kind that a printed report names


@dataclass(frozen=True)
class Outcome:
    """The outcome of one key.

    Args:
        status: "loaded": the target's value was replaced. "created": the target lacked the key, and has it now.
            "kept": the target keeps its value, because the checkpoint has another shape (``shape="keep"``).
            "missing": the checkpoint lacks the key. "unexpected": the target lacks the key, although it names this part
            of the tree, and the key was not created. "not requested": the target does not name this part of the tree,
            or ``only`` or ``exclude`` left the key out.
        renamed: the key in the checkpoint, if it differs.
        cast: the saved dtype and the target's dtype, if they differ.
        resharded: whether the target's boxes differ from the saved boxes.
        shapes: the saved shape and the target's shape, if the status is "kept".
    """

    status: Status
    renamed: str | None = None
    cast: tuple[torch.dtype, torch.dtype] | None = None
    resharded: bool = False
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class LoadReport:
    """The result of a load. ``outcomes`` is the same on every rank; bytes and seconds are those of this process.

    The three times add up to the time of the whole load. Print the report for a summary.

    Args:
        bytes_needed: bytes of the requested tensors and objects; None if the storage reader does not count them.
        bytes_read: bytes read from the checkpoint's data files; None if the storage reader does not count them. More
            than ``bytes_needed``, because checksums cover whole blocks.
        plan_seconds: seconds before the first read: metadata, matching, proofs, and waiting for other ranks.
        read_seconds: seconds of reading and checking.
        put_seconds: seconds of moving tensors to their devices, while other threads keep reading.
        outcomes: the outcome of every key of the target, and of every key of the checkpoint.
        restarts: how often the load began again because another save replaced the checkpoint; default 0.
        bytes_received: bytes that other ranks read and passed on to this one (``cooperative``); None if the storage
            reader does not count them.
        requests: requests to the store, after the last restart; None if the storage reader does not count them.
    """

    bytes_needed: int | None
    bytes_read: int | None
    plan_seconds: float
    read_seconds: float
    put_seconds: float
    outcomes: Mapping[str, Outcome] = field(default_factory=dict, repr=False)
    restarts: int = 0
    requests: RequestCounts | None = None
    bytes_received: int | None = None

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the target whose values were replaced."""
        return self._keys(lambda outcome: outcome.status == "loaded")

    @property
    def created(self) -> tuple[str, ...]:
        """Keys that the target lacked, and has now."""
        return self._keys(lambda outcome: outcome.status == "created")

    @property
    def kept(self) -> tuple[str, ...]:
        """Keys of the target that keep their values, because the checkpoint has another shape."""
        return self._keys(lambda outcome: outcome.status == "kept")

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the target that the checkpoint lacks."""
        return self._keys(lambda outcome: outcome.status == "missing")

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Keys of the checkpoint that the target still lacks, although it names their part of the tree."""
        return self._keys(lambda outcome: outcome.status == "unexpected")

    @property
    def not_requested(self) -> tuple[str, ...]:
        """Keys of the checkpoint or the target that were left out on purpose."""
        return self._keys(lambda outcome: outcome.status == "not requested")

    @property
    def resharded(self) -> tuple[str, ...]:
        """Keys whose boxes in the target differ from the saved boxes."""
        return self._keys(lambda outcome: outcome.resharded)

    @property
    def cast(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Keys whose dtype was converted, with the saved dtype and the target's dtype."""
        return {key: outcome.cast for key, outcome in self.outcomes.items() if outcome.cast}

    @property
    def renamed(self) -> dict[str, str]:
        """Keys that have another name in the checkpoint, with this name."""
        return {key: outcome.renamed for key, outcome in self.outcomes.items() if outcome.renamed}

    def _keys(self, has: Callable[[Outcome], bool]) -> tuple[str, ...]:
        return tuple(key for key, outcome in self.outcomes.items() if has(outcome))

    @property
    def seconds(self) -> float:
        """Seconds of the whole load."""
        return self.plan_seconds + self.read_seconds + self.put_seconds

    @property
    def bytes_per_second(self) -> float | None:
        """``bytes_needed`` divided by ``seconds``; None if bytes were not counted."""
        return None if self.bytes_needed is None else self.bytes_needed / self.seconds

    def __str__(self) -> str:
        lines = [self._speed()]
        if self.restarts:
            lines.append(f"  restarted {self.restarts} times, because the checkpoint was replaced while it was read")
        if self.requests is not None and self.requests.total:
            lines.append(f"  {self.requests}")
        for name in _PRINTED:
            keys = list(getattr(self, name.replace(" ", "_")))
            if keys:
                names_keys = name not in ("loaded", "resharded")
                shown = [self._shown(name, key) for key in keys[:_SHOWN]] if names_keys else []
                more = ["..."] if names_keys and len(keys) > _SHOWN else []
                lines.append(f"  {name:<13} {len(keys):>6}  {', '.join([*shown, *more])}".rstrip())
        return "\n".join(lines)

    def _shown(self, name: str, key: str) -> str:
        outcome = self.outcomes[key]
        if name == "cast" and outcome.cast:
            return f"{key} ({outcome.cast[0]} -> {outcome.cast[1]})".replace("torch.", "")
        if name == "kept" and outcome.shapes:
            return f"{key} (target {outcome.shapes[1]}, checkpoint {outcome.shapes[0]})"
        return f"{key} (was {outcome.renamed})" if name == "renamed" else key

    def _speed(self) -> str:
        phases = f"plan {self.plan_seconds:.2f} s, read {self.read_seconds:.2f} s, put {self.put_seconds:.2f} s"
        if self.bytes_needed is None or self.bytes_read is None or self.bytes_per_second is None:
            return f"loaded in {self.seconds:.2f} s ({phases})"
        received = f", got {format_bytes(self.bytes_received)} from other ranks" if self.bytes_received else ""
        return (
            f"loaded {format_bytes(self.bytes_needed)} in {self.seconds:.2f} s, "
            f"{format_bytes(self.bytes_per_second)}/s ({phases}); read {format_bytes(self.bytes_read)}{received}"
        )
