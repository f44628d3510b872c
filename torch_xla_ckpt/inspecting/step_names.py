"""Names of a run's steps in paths: ``RUN/latest``, ``RUN/best``, ``RUN/best:METRIC`` and ``RUN/best:METRIC:max``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager import RunFolder
from torch_xla_ckpt.storage import Location, PathLike

_NAME = re.compile(r"latest|best(?::(?P<metric>[^:]+)(?::(?P<mode>min|max))?)?")


@dataclass(frozen=True)
class StepName:
    """A name that stands for a step of a run.

    Args:
        run: the run.
        name: the name, such as "latest" or "best:loss".
    """

    run: RunFolder
    name: str

    def location(self) -> Location:
        """Return the location of the step that the name stands for now.

        Raises:
            CheckpointError: no step has the metric, or no step looks whole.
        """
        match = _NAME.fullmatch(self.name)
        assert match is not None
        if self.name == "latest":
            step, what = self.run.latest(), "step that looks whole"
        else:
            step = self.run.best(match["metric"], "max" if match["mode"] == "max" else "min")
            what = f"step with the metric {match['metric']!r}"
        if step is None:
            raise CheckpointError(f"{self.run.location} has no {what}. It has {some_steps(self.run.committed())}")
        return self.run.at(step)


def step_name(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> StepName | None:
    """Return the name of a step in a path such as ``RUN/latest``; None if the path has no such name.

    The last part of the path counts only if the part before it leads to a run.

    Args:
        path: a local path or any fsspec URL.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.
    """
    parent, slash, name = os.fspath(path).rstrip("/").rpartition("/")
    if not _NAME.fullmatch(name):
        return None
    run = RunFolder(Location.of(parent or ("/" if slash else "."), storage_options))
    return StepName(run, name) if is_run(run) else None


def require_new_name(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> None:
    """Check that a path to write to does not name a step of a run.

    Raises:
        CheckpointError: it does. A folder of that name would be hidden by the step, or hide it.
    """
    asked = step_name(path, storage_options)
    if asked is not None:
        raise CheckpointError(
            f"{os.fspath(path)!r} names a step of the run {asked.run.location}, so no new folder can have that name. "
            "Nothing was written. Choose another path, such as one outside of the run"
        )


def is_run(run: RunFolder) -> bool:
    """Return whether a folder is a run's; False if it cannot be listed."""
    try:
        return run.is_run
    except OSError:
        return False


def some_steps(steps: list[int]) -> str:
    """Return a few words that name the steps of a run: all of them, or the first and the last ones."""
    if not steps:
        return "no steps"
    named = [str(step) for step in steps]
    if len(named) > 6:
        named[3:-3] = ["..."]
    return f"the steps {', '.join(named)}"
