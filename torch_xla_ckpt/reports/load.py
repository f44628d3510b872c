"""What a load did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from torch_xla_ckpt.reports.sizes import format_bytes

Status = Literal["loaded", "created", "kept", "missing", "unexpected", "not requested"]
STATUSES: tuple[Status, ...] = get_args(Status)
_PRINTED = ("loaded", "resharded", "cast", "renamed", "created", "kept", "missing", "unexpected", "not requested")
_SHOWN = 5  # keys of each kind, when a report is printed


@dataclass(frozen=True)
class Outcome:
    """What became of one key.

    Args:
        status: "loaded" into the target; "created", because the target lacked it; "kept": the target keeps its value,
            because the checkpoint has another shape, under ``shape="keep"``; "missing" from the checkpoint;
            "unexpected", which means that the target names the part of the tree it lies in, lacks the key, and it was
            not created; "not requested" by the target, or left out by ``only`` or ``exclude``.
        renamed: the key it had in the checkpoint, if that is another.
        cast: the saved and the target's dtype, if they differ.
        resharded: the boxes of the target are not those that were saved.
        shapes: the saved shape and the target's, if the target keeps its value because they differ.
    """

    status: Status
    renamed: str | None = None
    cast: tuple[torch.dtype, torch.dtype] | None = None
    resharded: bool = False
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class LoadReport:
    """What ``load`` did. ``outcomes`` is the same on every rank, the rest is of this process.

    The three times add up to that of the whole call.

    Args:
        bytes_needed: of the tensors and objects that were asked for; None when the storage reader does not say.
        bytes_read: of the checkpoint's data files; more than is needed, because checksums cover whole blocks.
        plan_seconds: until the first byte was read: metadata, matching, proofs, and waiting for other processes.
        read_seconds: reading and checking.
        put_seconds: handing tensors to their devices; reading goes on meanwhile.
        restarts: how often the load began again, because another save had replaced the checkpoint.
        outcomes: what became of every key: the target's, and the checkpoint's that are not in the target.
    """

    bytes_needed: int | None
    bytes_read: int | None
    plan_seconds: float
    read_seconds: float
    put_seconds: float
    outcomes: Mapping[str, Outcome] = field(default_factory=dict, repr=False)
    restarts: int = 0

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the target that were filled."""
        return self._keys(lambda outcome: outcome.status == "loaded")

    @property
    def created(self) -> tuple[str, ...]:
        """Keys that the target lacked and has now."""
        return self._keys(lambda outcome: outcome.status == "created")

    @property
    def kept(self) -> tuple[str, ...]:
        """Keys of the target that have another shape in the checkpoint, and keep the values that the target has."""
        return self._keys(lambda outcome: outcome.status == "kept")

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of the target that the checkpoint lacks."""
        return self._keys(lambda outcome: outcome.status == "missing")

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Keys of the checkpoint that the target lacks still, though it names the part of the tree they lie in."""
        return self._keys(lambda outcome: outcome.status == "unexpected")

    @property
    def not_requested(self) -> tuple[str, ...]:
        """Keys that were left out on purpose."""
        return self._keys(lambda outcome: outcome.status == "not requested")

    @property
    def resharded(self) -> tuple[str, ...]:
        """Keys whose boxes in the target are not those that were saved."""
        return self._keys(lambda outcome: outcome.resharded)

    @property
    def cast(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Keys whose dtype was changed: from, to."""
        return {key: outcome.cast for key, outcome in self.outcomes.items() if outcome.cast}

    @property
    def renamed(self) -> dict[str, str]:
        """Keys that had another name in the checkpoint, and that name."""
        return {key: outcome.renamed for key, outcome in self.outcomes.items() if outcome.renamed}

    def _keys(self, has: Callable[[Outcome], bool]) -> tuple[str, ...]:
        return tuple(key for key, outcome in self.outcomes.items() if has(outcome))

    @property
    def seconds(self) -> float:
        """Of the whole call."""
        return self.plan_seconds + self.read_seconds + self.put_seconds

    @property
    def bytes_per_second(self) -> float | None:
        """Needed bytes by the time of the whole call."""
        return None if self.bytes_needed is None else self.bytes_needed / self.seconds

    def __str__(self) -> str:
        lines = [self._speed()]
        if self.restarts:
            lines.append(f"  began again {self.restarts} times: the checkpoint was replaced while it was read")
        for name in _PRINTED:
            keys = list(getattr(self, name.replace(" ", "_")))
            if keys:
                telling = name not in ("loaded", "resharded")
                shown = [self._shown(name, key) for key in keys[:_SHOWN]] if telling else []
                more = ["..."] if telling and len(keys) > _SHOWN else []
                lines.append(f"  {name:<13} {len(keys):>6}  {', '.join([*shown, *more])}".rstrip())
        return "\n".join(lines)

    def _shown(self, name: str, key: str) -> str:
        outcome = self.outcomes[key]
        if name == "cast" and outcome.cast:
            return f"{key} ({outcome.cast[0]} -> {outcome.cast[1]})".replace("torch.", "")
        if name == "kept" and outcome.shapes:
            return f"{key} ({outcome.shapes[0]} -> {outcome.shapes[1]})"
        return f"{key} (was {outcome.renamed})" if name == "renamed" else key

    def _speed(self) -> str:
        phases = f"plan {self.plan_seconds:.2f} s, read {self.read_seconds:.2f} s, put {self.put_seconds:.2f} s"
        if self.bytes_needed is None or self.bytes_read is None or self.bytes_per_second is None:
            return f"loaded in {self.seconds:.2f} s ({phases})"
        return (
            f"loaded {format_bytes(self.bytes_needed)} in {self.seconds:.2f} s, "
            f"{format_bytes(self.bytes_per_second)}/s ({phases}); read {format_bytes(self.bytes_read)}"
        )
