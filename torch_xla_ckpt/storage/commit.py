"""Commit a save, so that a folder always holds the old checkpoint or the new one, whole.

A save writes its data files, then its manifest, and then replaces ``.metadata`` in one step. This step is the commit,
because readers begin with ``.metadata``. Only after the commit does the save remove the files of the previous save. So
whenever a save breaks off, all files that ``.metadata`` leads to are there.

Two programs may save to one folder. The commit compares and swaps: it succeeds only if ``.metadata`` is the version
that the save found when it began. So the first of two overlapping saves to commit wins.

``save_start`` begins a save, ``commit_checks`` has the last checks, and ``save_end`` removes files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import xxhash

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes, Folder
from torch_xla_ckpt.storage.commit_checks import lost_to_another, require_files, require_no_other_save
from torch_xla_ckpt.storage.deadline import together
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.file_names import manifest_name, metadata_name, temporary_name
from torch_xla_ckpt.storage.pieces import joined_pieces, whole
from torch_xla_ckpt.storage.save_start import SaveStart
from torch_xla_ckpt.storage.seal import SealedPieces, sealed_save_id

_LOOKS = 3  # attempts to see a file that was just put
_COMMITS = 3  # attempts to put .metadata into a store that keeps only a part of it


def publish(
    folder: Folder,
    save_id: str,
    files: Mapping[str, int],
    manifest: Iterable[Bytes],
    pickled: Iterable[Bytes],
    rank: int | None = None,
    *,
    start: SaveStart | None = None,
) -> None:
    """Write the manifest and commit a save whose data files are written.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.
        files: the size in bytes of each data file, by name.
        manifest: the bytes of the manifest, in pieces.
        pickled: DCP's metadata, pickled, in pieces.
        rank: the rank of a save without collectives. Default: a save of all ranks.
        start: the state of the folder when the save began. Default: replace whatever is there.

    Raises:
        ConcurrentSaveError: another program has committed here since the save began.
        CheckpointError: files of this save are missing, so nobody could load the checkpoint.
    """
    if start is not None:
        start.lease.require()
        folder.settle()
    name, temporary, own = metadata_name(rank), temporary_name(rank, save_id), manifest_name(save_id)
    # Nobody reads the manifest before the commit, so a store gets it during the last checks.
    late = list(joined_pieces(manifest)) if start is not None and folder.remote else None
    if late is None:
        size, manifest_checksum = _write_manifest(folder, own, joined_pieces(manifest))
        files = {**files, own: size}
    else:
        manifest_checksum = _checksum(late)
    data = SealedPieces(pickled, save_id, manifest_checksum)
    try:
        if start is None:
            folder.replace(name, data, temporary)
        elif late is None:
            _replace_local(folder, data, temporary, files, rank, start)
        else:
            _replace_remote(folder, data, temporary, files, rank, start, lambda: _put_manifest(folder, own, late))
    except FileChanged as error:
        # A request that is made again, because its answer was lost, finds what it has written itself.
        if not data.is_at(folder.version(name).end):
            raise lost_to_another(folder, rank) from error


def _write_manifest(folder: Folder, name: str, pieces: Iterable[Bytes]) -> tuple[int, bytes]:
    """Write the manifest, and return its size in bytes and its checksum."""
    hasher, size = xxhash.xxh3_64(), 0
    sink = folder.create(name, unchanged=True)
    try:
        for piece in pieces:
            hasher.update(piece)
            size += len(piece)
            sink.write(piece)
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    folder.flush()
    return size, hasher.digest()


def _put_manifest(folder: Folder, name: str, pieces: Iterable[Bytes]) -> None:
    """Write the manifest to a store.

    Raises:
        CheckpointError: the store has kept only a part of it.
    """
    size, _ = _write_manifest(folder, name, pieces)
    if not folder.refuses_parts and (kept := _size_in_store(folder, name)) != size:
        raise CheckpointError(
            f"the checkpoint was not committed: {folder.url} has kept {kept} of {size} bytes of {name}, although it "
            "called the put a success. Save again"
        )


def _size_in_store(folder: Folder, name: str) -> int:
    """Return the size of a file that was just put; 0 if there is none.

    fsspec's backends look into the last listing of a folder. Another thread's may be from before the put.
    """
    for _ in range(_LOOKS):
        with suppress(FileNotFoundError):
            return folder.size(name)
    return 0


def _checksum(pieces: Iterable[Bytes]) -> bytes:
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def _replace_local(
    folder: Folder, data: SealedPieces, temporary: str, files: Mapping[str, int], rank: int | None, start: SaveStart
) -> None:
    """Replace ``.metadata`` on a local disk after the last checks: the commit.

    Args:
        folder: the checkpoint's folder.
        data: the new bytes of ``.metadata``, in pieces.
        temporary: the name of the temporary file.
        files: the files of the save, with their sizes in bytes.
        rank: the rank of a save without collectives.
        start: the state of the folder when the save began.
    """
    require_files(folder, files, folder.names(), start, rank)

    def check() -> None:  # the folder is locked by now, so a second listing is exact
        require_no_other_save(folder, folder.names(), start, rank)

    folder.replace(metadata_name(rank), data, temporary, expected=start.version, check=check)


def _replace_remote(
    folder: Folder,
    data: SealedPieces,
    temporary: str,
    files: Mapping[str, int],
    rank: int | None,
    start: SaveStart,
    write_manifest: Callable[[], object],
) -> None:
    """Replace ``.metadata`` in a store after the last checks: the commit.

    Args:
        folder, data, temporary, rank, start: as for a local disk.
        files: the data files of the save, with their sizes in bytes.
        write_manifest: writes the manifest. It runs at the same time as the checks.
    """

    def check_files() -> None:
        listed = folder.listing()
        require_files(folder, files, listed, start, rank)
        require_no_other_save(folder, listed, start, rank)

    def check() -> None:
        together([write_manifest, check_files])

    name, content = metadata_name(rank), whole(data)
    expected = start.version
    for _ in range(_COMMITS):
        folder.replace(name, [content], temporary, expected=expected, check=check)
        if folder.refuses_parts or _size_in_store(folder, name) == len(content):
            return
        expected = folder.version(name)
        if sealed_save_id(expected.end) is not None:  # another save has committed after this one
            return
    raise CheckpointError(
        f"{folder.url} has kept only a part of {name} in {_COMMITS} attempts, although it called each put a success. "
        "There is no checkpoint now. The other files of the checkpoint before it were not removed. Mend the store, and "
        "save again"
    )
