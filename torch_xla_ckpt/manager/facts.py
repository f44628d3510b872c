"""What a step's manifest says. Anybody can write a manifest, so nothing in it is taken for granted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch_xla_ckpt.manager.keep import Saved
from torch_xla_ckpt.storage import Manifest

KEY = "torch_xla_ckpt.manager"
"""The key of a manifest's user metadata under which the manager stores metrics and metadata."""


@dataclass(frozen=True)
class Facts:
    """What is known of a committed step.

    Args:
        saved: the step as retention policies see it.
        files: sizes of the data files in bytes, by name.
        by_manager: True if our ``CheckpointManager`` or torch_xla's wrote the step. Retention deletes no other steps.
    """

    saved: Saved
    files: Mapping[str, int]
    by_manager: bool = False

    @property
    def nbytes(self) -> int:
        """Size of all data files in bytes."""
        return sum(self.files.values())


def facts_of(step: int, manifest: Manifest) -> Facts:
    """Return what a manifest says of a step. Metrics and times that no manager wrote count as not recorded."""
    user: Any = manifest.user_metadata
    user = user if isinstance(user, Mapping) else {}
    given = user.get(KEY)
    given = given if isinstance(given, Mapping) else {}
    return Facts(
        Saved(step, _time(manifest.time), _metrics(given.get("metrics")), given.get("metadata")),
        {name: size for name, size in manifest.files.items() if isinstance(name, str) and isinstance(size, int)},
        by_manager=KEY in user,
    )


def _metrics(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return {}
    numbers = {name: _number(value) for name, value in given.items() if isinstance(name, str)}
    return {name: value for name, value in numbers.items() if value is not None}


def _number(value: Any) -> float | None:
    """Return a metric; None if the value is none. NaN and infinities are stored as text."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    try:
        return value if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:
        return None


def _time(text: Any) -> datetime | None:
    """Parse a time; None if ``text`` is not a time. A time without a time zone counts as UTC, which we write."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)
