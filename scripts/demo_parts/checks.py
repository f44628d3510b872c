"""The demo's claims, each computed from the losses, digests and layouts that the processes wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_parts.pictures import pretty

# Meshes add in different orders, so losses agree to rounding: below 1e-6 was seen. Without the state
# of one random generator, a resumed run was off by 8e-3 or more.
TOLERANCE = 1e-4  # nats per byte


@dataclass(frozen=True)
class Run:
    """The results of a training process.

    Args:
        mesh: the mesh's name, for example "4x2".
        losses: the loss of each step; steps are counted from 0.
        digests: the digest of every item of the state, at the checkpoint.
        layouts: the layout of every tensor of the state, at the checkpoint.
    """

    mesh: str
    losses: Mapping[int, float]
    digests: Mapping[str, str]
    layouts: Mapping[str, Any]

    @classmethod
    def read(cls, mesh: str, losses: Path, report: Path) -> Run:
        """Read the files of a training process. Of a step that was taken again, the last loss counts."""
        found = {}
        for line in losses.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a killed process may leave a torn line
                event = json.loads(line)
                found[event["step"]] = event["loss"]
        return cls(mesh, found, **json.loads(report.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Check:
    """A claim of the demo, with its evidence."""

    claim: str
    found: str
    passed: bool


def check_all(full: Run, resumed: Sequence[Run], plain: Mapping[str, Any], saved_at: int, steps: int) -> list[Check]:
    """Check all claims.

    Args:
        full: the uninterrupted run.
        resumed: the runs that went on from its checkpoint.
        plain: the event of the process with stock PyTorch.
        saved_at: the number of steps before the checkpoint.
        steps: the number of steps of the whole run.
    """
    exact = [
        check_exact(
            f"restored on {pretty(run.mesh)} into a meta-device model, read from the devices",
            full.digests,
            run.digests,
            moved(full, run),
        )
        for run in resumed
    ]
    opened = check_exact(f"opened by stock torch {plain['torch']}", full.digests, plain["digests"])
    follow = [check_losses(full, run, range(saved_at, steps)) for run in resumed]
    return [*exact, opened, *follow, check_learning(full, steps)]


def check_exact(claim: str, saved: Mapping[str, str], found: Mapping[str, str], note: str = "") -> Check:
    different = sorted(key for key in saved.keys() | found.keys() if saved.get(key) != found.get(key))
    if different:
        return Check(claim, f"{len(different)} of {len(saved)} items differ: {', '.join(different[:5])}", False)
    return Check(claim, f"all {len(saved)} items bit-exact{note}", True)


def check_losses(full: Run, resumed: Run, steps: range) -> Check:
    claim = f"resumed on {pretty(resumed.mesh)}, follows the uninterrupted run"
    if sorted(resumed.losses) != list(steps):
        return Check(claim, f"the steps {steps.start} to {steps.stop - 1} are not complete", False)
    apart = [abs(loss - full.losses[step]) for step, loss in resumed.losses.items()]
    found = f"{len(apart)} losses, largest difference {max(apart):.1e} (allowed: {TOLERANCE:.0e})"
    return Check(claim, found, all(difference <= TOLERANCE for difference in apart))


def check_learning(run: Run, steps: int) -> Check:
    first, last = run.losses[0], sum(run.losses[step] for step in range(steps - 8, steps)) / 8
    return Check("the model learns", f"loss {first:.2f} at first, {last:.2f} over the last 8 steps", last < first - 1)


def moved(saved: Run, resumed: Run) -> str:
    """Return how many tensors lie in other boxes than when they were saved, in words."""
    tiled = [key for key, layout in saved.layouts.items() if len(layout["shards"]) > 1]
    other = sum(saved.layouts[key]["shards"] != resumed.layouts[key]["shards"] for key in tiled)
    return f"; {other} of {len(tiled)} tensors in other boxes"
