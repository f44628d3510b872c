"""Opening a path: a checkpoint, a run, or a step of a run that is named by ``latest``, ``best`` or its number."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import is_weights
from torch_xla_ckpt.manager import RunFolder
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import (
    Listing,
    Location,
    PathLike,
    ShardReader,
    is_file,
    listing_of,
    open_folder,
    read_foreign,
    read_listing,
)

Writer = Literal["torch_xla_ckpt", "dcp", "lightning", "torch_xla", "safetensors", "torch.save"]
LIGHTNINGS_FILE = "meta.pt"
"""The file beside DCP's in sharded checkpoints of Lightning's own strategies: an archive of ``torch.save``."""
_LIGHTNINGS_KEY = "pytorch-lightning_version"  # what every checkpoint file of Lightning has
_OWN_METADATA = re.compile(r"__(\d+)\.metadata")
_STEP_NAME = re.compile(r"latest|best(?::(?P<metric>[^:]+)(?::(?P<mode>min|max))?)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint at a path.

    Args:
        location: the checkpoint's folder, or a file.
        folder: the same folder, for reading.
        names: the names of the files in the folder; none for a file.
    """

    location: Location
    folder: Folder
    names: frozenset[str]

    def listing(self) -> Listing:
        """Return the checkpoint's keys and facts, without what reading data needs."""
        if METADATA in self.names:
            return read_listing(self.folder)
        found = read_foreign(self.location, self.folder)
        if found is None:
            raise CheckpointError(f"there is no checkpoint at {self.location} any more. Check the path")
        return listing_of(found.index, found.contents.kind)

    def writer(self, listing: Listing) -> Writer:
        """Return the kind of program that wrote the checkpoint."""
        if listing.kind == "dcp" and LIGHTNINGS_FILE in self.names:
            return "lightning"
        if listing.kind == "torch.save" and any(one.key == _LIGHTNINGS_KEY for one in listing.keys):
            return "lightning"
        if listing.kind == "dcp" and ".manager_metadata" in self.names:
            return "torch_xla"
        return listing.kind  # type: ignore[return-value]

    def reader(self) -> tuple[ShardReader, Metadata]:
        """Return a storage reader that is ready to read, and DCP's metadata.

        Raises:
            CorruptCheckpointError: ``.metadata`` or the manifest is not what was written.
            UnsafeObjectError: ``.metadata`` names something that could run code.
        """
        reader = ShardReader(self.location)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        return reader, metadata


def open_path(
    path: PathLike | Location, storage_options: Mapping[str, Any] | None = None, *, ranks_own: bool = False
) -> Checkpoint | RunFolder:
    """Return the checkpoint or the run at a path.

    Args:
        path: a checkpoint's folder, a run's folder, or ``RUN/latest``, ``RUN/best``, ``RUN/best:METRIC`` and
            ``RUN/best:METRIC:max``: a local path or any fsspec URL.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.
        ranks_own: whether to accept a folder in which each rank has a checkpoint of its own. Default: False.

    Raises:
        CheckpointError: there is neither a checkpoint nor a run, or the storage does not answer.
    """
    location = Location.of(path, storage_options)
    folder = open_folder(location, sync=False)
    if _is_file(location):
        return Checkpoint(location, folder, frozenset())
    names = _names(folder)
    if METADATA in names or any(is_weights(name) for name in names):
        return Checkpoint(location, folder, names)
    if own := sorted(name for name in names if _OWN_METADATA.fullmatch(name)):
        if ranks_own:
            return Checkpoint(location, folder, names)
        raise CheckpointError(
            f"{location} holds a checkpoint for each of {len(own)} ranks ({own[0]} is one of them), because they saved "
            "without collectives. 'xc verify' checks all of them; load each one on its rank with no_dist=True"
        )
    run = RunFolder(location)
    if _is_run(run):
        return run
    named = _named_step(path, storage_options) if not names and not isinstance(path, Location) else None
    return named or _raise_nothing_there(location, folder, names)


def open_checkpoint(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Return the checkpoint at a path, which must not be a run.

    Raises:
        CheckpointError: there is no checkpoint. If it is a run, its steps are named.
    """
    found = open_path(path, storage_options)
    if isinstance(found, Checkpoint):
        return found
    steps = found.committed()
    raise CheckpointError(
        f"{found.location} is the folder of a run with {_shortened(steps)}. Name one step, as in "
        f"{found.location.url.rstrip('/')}/{steps[-1] if steps else 'NUMBER'} or .../latest"
    )


def path_of_checkpoint(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the path or URL of a checkpoint that may be named as a step of a run, such as ``RUN/latest``.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    return open_checkpoint(path, storage_options).location.url


def open_run(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> RunFolder:
    """Return the run at a path.

    Raises:
        CheckpointError: there is no run.
    """
    found = open_path(path, storage_options)
    if isinstance(found, RunFolder):
        return found
    raise CheckpointError(
        f"{found.location} is one checkpoint, not the folder of a run. Pass the folder that holds the run's steps"
    )


def _is_file(location: Location) -> bool:
    try:
        return is_file(location)
    except Exception:  # a store that does not answer says so when the folder is listed
        return False


def _names(folder: Folder) -> frozenset[str]:
    try:
        return frozenset(folder.names())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"cannot list {folder.url} ({type(error).__name__}: {error}). Check the path, the access rights and the "
            "storage options"
        ) from error


def _is_run(run: RunFolder) -> bool:
    try:
        return run.is_run
    except OSError:
        return False


def _named_step(path: PathLike, storage_options: Mapping[str, Any] | None) -> Checkpoint | None:
    """Return the step that a path such as ``RUN/latest`` names; None if it is no such path, or there is no run."""
    parent, slash, name = os.fspath(path).rstrip("/").rpartition("/")
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    run = RunFolder(Location.of(parent or ("/" if slash else "."), storage_options))
    if not _is_run(run):
        return None
    step = run.latest() if name == "latest" else run.best(match["metric"], "max" if match["mode"] == "max" else "min")
    if step is None:
        what = "step that looks whole" if name == "latest" else f"step with the metric {match['metric']!r}"
        raise CheckpointError(f"{run.location} has no {what}. It has {_shortened(run.committed())}")
    location = run.at(step)
    folder = open_folder(location, sync=False)
    return Checkpoint(location, folder, _names(folder))


def _raise_nothing_there(location: Location, folder: Folder, names: Iterable[str]) -> Checkpoint:
    names = sorted(names)
    if names:
        problem = f"its {len(names)} files include no {METADATA}, and no folder in it is named by a step's number"
    elif location.is_local and not os.path.exists(location.path):
        problem = "it does not exist"
    else:
        problem = "it is empty, or does not exist"
    steps = ""
    with suppress(OSError, CheckpointError):
        inside = sorted(folder.folders())[:3]
        steps = f". It has the folders {', '.join(inside)}" if inside else ""
    raise CheckpointError(
        f"there is neither a checkpoint nor a run at {location}: {problem}{steps}. Check the path. An interrupted save "
        "leaves no checkpoint"
    )


def _shortened(steps: list[int]) -> str:
    if not steps:
        return "no steps"
    named = [str(step) for step in steps]
    if len(named) > 6:
        named[3:-3] = ["..."]
    return f"the steps {', '.join(named)}"
