"""verify: read a whole checkpoint and report all damage."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    Damage,
    IncompleteCheckpointError,
    ReplacedCheckpointError,
)
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.absent import no_checkpoint
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex, read_index, version_of
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.foreign import LACKING, read_foreign
from torch_xla_ckpt.storage.limits import default_threads
from torch_xla_ckpt.storage.location import Location, PathLike
from torch_xla_ckpt.storage.progress import OnProgress, Progress
from torch_xla_ckpt.storage.stored import Stored
from torch_xla_ckpt.storage.verify_files import FileCheck, cannot_verify, check_archive, checks_of
from torch_xla_ckpt.storage.verify_report import VerifyReport

_RESTARTS = 10  # of a verification during which a save replaces the checkpoint
_RANKS_OWN = re.compile(r"__(\d+)" + re.escape(METADATA))
_AHEAD = 4  # checks for each thread that wait or whose results wait
_LIGHTNINGS_FILE = "meta.pt"  # what Lightning saves beside DCP's files: an archive of torch.save


def verify(
    path: PathLike | Location,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool | OnProgress = False,
) -> VerifyReport:
    """Read a whole checkpoint and report every damaged key, file and byte range.

    A checkpoint of ``ShardWriter`` is compared with its manifest: every byte of every file counts. A checkpoint of
    stock DCP has no checksums but the CRC-32 in its archives; this CRC-32 is checked. Tensors in a checkpoint of
    ``ShardWriter`` whose manifest is lost have no checksums; the report lists them as ``unchecked``. Safetensors files
    have none either: their headers, sizes and index are checked. No process group and no device is needed.

    Args:
        path: the checkpoint's folder, or a safetensors or ``torch.save`` file: a local path or any fsspec URL.
        storage_options: options of the fsspec filesystem behind a URL, such as ``{"anon": True}`` or
            ``{"endpoint_url": ...}``. Local paths ignore them. Default: none.
        progress: show a progress bar on a terminal if verifying takes long, which needs tqdm; or a function that is
            called from several threads with the bytes just checked and the bytes of the whole checkpoint. Default:
            False.

    Returns:
        The report. It is true if no damage was found, so that ``if not verify(path): ...`` handles damage.

    Raises:
        CheckpointError: the folder holds no checkpoint, or the storage does not give access to all of it. If it is the
            folder of a run, the run's steps are named.
        UnsafeObjectError: ``.metadata`` names something that could run code.
    """
    location = Location.of(path, storage_options)
    folder = open_folder(location)
    if _has_no_metadata(folder):
        try:
            foreign = _verify_foreign(location, folder, progress)
        except OSError as error:
            raise cannot_verify(folder, "the model's files", error) from error
        if foreign is not None:
            return foreign
    for _ in range(_RESTARTS):
        try:
            report = _report(folder, progress)
        except FileNotFoundError:
            continue  # a save removed or replaced the checkpoint after the first look at its metadata
        except CheckpointError:
            raise
        except Exception as error:
            raise cannot_verify(folder, f"{METADATA} or the manifest", error) from error
        if report is not None:
            return report
    raise ReplacedCheckpointError(
        f"the checkpoint in {folder.url} was replaced {_RESTARTS} times while it was verified. Verify it while no "
        "program saves there"
    )


def require_undamaged(location: Location) -> None:
    """Read a whole checkpoint that will be copied: the copy's new checksums would hide damage.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: as for ``verify``.
    """
    report = verify(location)
    if report.damages:
        raise CorruptCheckpointError(
            f"{location} is damaged, and nothing was copied:\n{report}\nCopy another checkpoint", report.damages
        )


def _verify_foreign(location: Location, folder: Folder, progress: bool | OnProgress) -> VerifyReport | None:
    """Verify a checkpoint in another format; None if there is none at the path."""
    try:
        found = read_foreign(location, folder)
    except CorruptCheckpointError as error:
        return VerifyReport(folder.url, error.damages, {}, 0, 0, "structure")
    except IncompleteCheckpointError as error:
        return VerifyReport(folder.url, (), dict.fromkeys(error.keys or ("",), str(error)), 0, 0, "structure")
    if found is None:
        return None
    contents = found.contents
    if contents.kind == "safetensors":
        nbytes = {key: math.prod(place.shape) * place.dtype.itemsize for key, place in contents.tensors.items()}
        unchecked = [key for key, size in nbytes.items() if size]
        return VerifyReport(
            folder.url,
            (),
            {},
            len(contents.files),
            contents.bytes_read,
            "structure",
            unchecked=tuple(unchecked),
            bytes_unchecked=sum(nbytes.values()),
        )
    keys = tuple(contents.tensors)
    with Progress("verifying", lambda: sum(contents.files.values()), progress) as bar:
        checks = [check_archive(found.folder, name, size, keys, bar) for name, size in contents.files.items()]
    return VerifyReport(
        folder.url,
        tuple(damage for check in checks for damage in check.damages),
        {},
        len(checks),
        sum(check.bytes_read for check in checks),
        "crc32",
        unchecked=tuple(key for check in checks for key, _ in check.unchecked),
        bytes_unchecked=sum(nbytes for check in checks for _, nbytes in check.unchecked),
    )


def _report(folder: Folder, progress: bool | OnProgress) -> VerifyReport | None:
    """Verify the checkpoint that is there now; None if a save replaced it meanwhile."""
    ranks = _ranks(folder)
    before = [version_of(folder, rank) for rank in ranks]
    report = _joined(folder, [_verify(folder, rank, progress) for rank in ranks])
    folder.release()
    # Only a checkpoint that is still there is damaged: a newer save removes the files of the previous one.
    return report if report.ok or before == [version_of(folder, rank) for rank in ranks] else None


def _has_no_metadata(folder: Folder) -> bool:
    try:
        return version_of(folder) is None
    except NotADirectoryError:  # the path leads to a file
        return True
    except Exception as error:
        raise cannot_verify(folder, METADATA, error) from error


def _ranks(folder: Folder) -> list[int | None]:
    """Return the ranks that have a checkpoint of their own; [None] if there is one checkpoint of all ranks.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    if version_of(folder) is not None:
        return [None]
    # Ranks that save without collectives have one checkpoint each in the same folder.
    own = sorted(int(match[1]) for name in folder.names() if (match := _RANKS_OWN.fullmatch(name)))
    if not own:
        raise no_checkpoint(folder, LACKING)
    return [*own]


def _joined(folder: Folder, reports: Sequence[VerifyReport]) -> VerifyReport:
    """Join the reports of the ranks' own checkpoints."""
    return VerifyReport(
        folder.url,
        damages=tuple(damage for report in reports for damage in report.damages),
        incomplete={key: what for report in reports for key, what in report.incomplete.items()},
        files=sum(report.files for report in reports),
        bytes_read=sum(report.bytes_read for report in reports),
        checked_by=reports[0].checked_by,
        unchecked=tuple(dict.fromkeys(key for report in reports for key in report.unchecked)),
        bytes_unchecked=sum(report.bytes_unchecked for report in reports),
    )


def _verify(folder: Folder, rank: int | None, progress: bool | OnProgress) -> VerifyReport:
    """Verify the checkpoint of all ranks, or the one of a rank that saved by itself."""
    damages: list[Damage] = []
    try:
        found = _read_index(folder, rank, damages)
    except CorruptCheckpointError as error:
        return VerifyReport(folder.url, error.damages, {}, 0, 0, "xxh3_64")
    by_file: dict[str, list[tuple[str, Stored]]] = defaultdict(list)
    for index, entry in (found.metadata.storage_data or {}).items():
        item = Stored.of(entry)
        by_file[item.relative_path].append((index.fqn, item))
    sizes = found.manifest.files if found.manifest is not None else {}
    bytes_read = 0
    unchecked: dict[str, int] = defaultdict(int)
    with Progress("verifying", lambda: _total(by_file), progress) as bar:
        checks = (checks_of(folder, name, items, sizes.get(name), bar) for name, items in sorted(by_file.items()))
        for checked in _results(chain.from_iterable(checks), default_threads(remote=folder.remote)):
            damages += checked.damages
            bytes_read += checked.bytes_read
            for key, nbytes in checked.unchecked:
                unchecked[key] += nbytes
    if found.manifest is None and rank is None and _LIGHTNINGS_FILE in folder.names():
        checked = check_archive(folder, _LIGHTNINGS_FILE, folder.size(_LIGHTNINGS_FILE), (), bar)
        damages += checked.damages
    return VerifyReport(
        folder.url,
        damages=tuple(dict.fromkeys(damages)),
        incomplete=_incomplete(found.metadata),
        files=len(by_file),
        bytes_read=bytes_read,
        checked_by="xxh3_64" if found.manifest is not None else "crc32",
        unchecked=tuple(unchecked),
        bytes_unchecked=sum(unchecked.values()),
    )


def _results(checks: Iterable[Callable[[], FileCheck]], threads: int) -> Iterator[FileCheck]:
    """Run checks in threads, and yield their results in order. If the caller stops, no further check begins."""
    running: deque[Future[FileCheck]] = deque()
    with ThreadPoolExecutor(threads, "verify") as pool:
        try:
            for check in checks:
                running.append(pool.submit(check))
                if len(running) > _AHEAD * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def _read_index(folder: Folder, rank: int | None, damages: list[Damage]) -> CheckpointIndex:
    """Return the checkpoint's index. If either ``.metadata`` or the manifest is damaged, read the other one.

    Args:
        folder: the checkpoint's folder.
        rank: the rank that saved by itself; None for the checkpoint of all ranks.
        damages: the list to which such damage is added.
    """
    try:
        return read_index(folder, rank)
    except CorruptCheckpointError as error:
        try:
            found = read_index(folder, rank, verify=False)
        except CheckpointError:
            raise error from None
        every_key = tuple(found.metadata.state_dict_metadata)
        damages += [Damage(d.file, d.start, d.stop, every_key, d.what) for d in error.damages]
        return found


def _total(by_file: Mapping[str, Sequence[tuple[str, Stored]]]) -> int:
    """Return the number of bytes to check."""
    every_item = (item for items in by_file.values() for _, item in items)
    return sum(item.length if item.checksums is None else item.extent for item in every_item)


def _incomplete(metadata: Metadata) -> dict[str, str]:
    """Return the tensors that the stored chunks do not cover exactly once, and the problem of each."""
    unstored = _dcp.unstored(metadata, metadata.state_dict_metadata)
    found = {key: "; ".join(items[:3]) for key, items in unstored.items()}
    for key, saved in metadata.state_dict_metadata.items():
        if key not in found and isinstance(saved, TensorStorageMetadata) and (flaws := _dcp.cover_flaws(saved)):
            found[key] = "; ".join(map(str, flaws))
    return found
