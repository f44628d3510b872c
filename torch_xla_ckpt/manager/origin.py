"""Where a run starts from: another run's newest step, or a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.storage import Location, holds_checkpoint, is_file


@dataclass(frozen=True)
class Origin:
    """A run or a checkpoint that another run starts from.

    Args:
        location: the folder of the run or of the checkpoint, or a file.
        is_run: True for a run.
    """

    location: Location
    is_run: bool


def origin_of(path: Location, storage_options: Mapping[str, Any] | None) -> Origin:
    """Find the run or the checkpoint, of any format, at a path.

    A run that has no step of its own leads to the run that it started from, which its journal names.

    Raises:
        CheckpointError: there is neither a run nor a checkpoint.
    """
    seen: list[Location] = []
    while True:
        seen.append(path)
        steps = Steps(path)
        if steps.retries.run(functools.partial(is_file, path), "looking for a checkpoint"):
            return Origin(path, False)
        if any(folder.kind in ("committed", "damaged") for folder in steps.looks(steps.numbers()).values()):
            return Origin(path, True)
        if steps.retries.run(functools.partial(holds_checkpoint, path), "looking for a checkpoint"):
            return Origin(path, False)
        began = [event.get("source") for event in Journal(steps).events() if event.get("event") == "began"]
        if not began or not isinstance(began[-1], str):
            break
        path = Location.of(began[-1], None if path.is_local else storage_options)
        if path in seen:
            break
    raise CheckpointError(
        f"initial_path={seen[0]} holds neither a step of a run nor a checkpoint"
        + ("" if len(seen) == 1 else f", nor does {seen[-1]}, which it leads to")
        + ". Pass the folder of a run or of a checkpoint"
    )
