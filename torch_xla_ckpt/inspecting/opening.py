"""Opening a path: a checkpoint, a run, or a step of a run that ``step_names`` knows."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import is_weights
from torch_xla_ckpt.inspecting.step_names import StepName, is_run, some_steps, step_name
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

logger = logging.getLogger(__name__)

Writer = Literal["torch_xla_ckpt", "dcp", "lightning", "torch_xla", "safetensors", "torch.save"]
LIGHTNINGS_FILE = "meta.pt"
"""The file beside DCP's in sharded checkpoints of Lightning's own strategies: an archive of ``torch.save``."""
_LIGHTNINGS_KEY = "pytorch-lightning_version"  # what every checkpoint file of Lightning has
_OWN_METADATA = re.compile(r"__(\d+)\.metadata")


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

    In a run, ``latest`` and ``best`` name steps, even if there is a folder of that name. A warning tells then that the
    folder is not opened. The folder is opened if the name names no step.

    Args:
        path: a checkpoint's folder, a run's folder, or ``RUN/latest``, ``RUN/best``, ``RUN/best:METRIC`` and
            ``RUN/best:METRIC:max``: a local path or any fsspec URL.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.
        ranks_own: whether to accept a folder in which each rank has a checkpoint of its own. Default: False.

    Raises:
        CheckpointError: there is neither a checkpoint nor a run, or the storage does not answer.
    """
    location = Location.of(path, storage_options)
    asked = None if isinstance(path, Location) else step_name(path, storage_options)
    if asked is not None and (found := _step(asked, location)) is not None:
        return found
    folder = open_folder(location, sync=False)
    if _is_file(location):
        return Checkpoint(location, folder, frozenset())
    names = names_of(folder)
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
    if is_run(run):
        return run
    return _raise_nothing_there(location, folder, names)


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
        f"{found.location} is the folder of a run with {some_steps(steps)}. Name one step, as in "
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


def names_of(folder: Folder) -> frozenset[str]:
    """Return the names of the files in a folder; none if there is no folder.

    Raises:
        CheckpointError: the storage does not answer.
    """
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


def _step(asked: StepName, literal: Location) -> Checkpoint | None:
    """Return the step that a name asks for; None if it names no step, and a folder or file has that name.

    Args:
        asked: the name.
        literal: the path that was given. A folder with the name of a step may be there.

    Raises:
        CheckpointError: the name names no step, and nothing has that name.
    """
    is_there = _is_file(literal) or bool(names_of(open_folder(literal, sync=False)))
    try:
        location = asked.location()
    except CheckpointError:
        if is_there:
            return None
        raise
    if is_there and literal.identity != location.identity:
        logger.warning(
            "%s means step %s of the run. The folder %r in the run is not opened; rename it if you need it",
            literal,
            location.name,
            asked.name,
        )
    folder = open_folder(location, sync=False)
    return Checkpoint(location, folder, names_of(folder))


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
