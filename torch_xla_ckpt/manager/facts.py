"""What a manifest tells a manager. Anybody can write a manifest, so nothing in it is taken for granted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch_xla_ckpt.manager.keep import Saved
from torch_xla_ckpt.storage import Manifest

# Where a manifest's user metadata has what the manager was given.
KEY = "torch_xla_ckpt.manager"


@dataclass(frozen=True)
class Facts:
    """What is known of a committed step.

    Args:
        saved: for policies.
        files: bytes of each data file, by name.
        by_manager: a ``CheckpointManager``, ours or torch_xla's, wrote the step. Retention deletes no other.
    """

    saved: Saved
    files: Mapping[str, int]
    by_manager: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def facts_of(step: int, manifest: Manifest) -> Facts:
    """What a manifest tells of a step. Metrics and times of another shape than a manager's count as not recorded."""
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
    return {name: value for name, value in given.items() if isinstance(name, str) and _is_number(value)}


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def _time(text: Any) -> datetime | None:
    """A time with a time zone; None if there is none. A time without a zone is taken for UTC, as we write it."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)
