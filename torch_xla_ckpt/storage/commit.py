"""Commit a save, so that a folder always holds the old checkpoint or the new one, whole.

A save writes its data files, then its manifest, and then replaces ``.metadata`` in one step. This step is the commit,
because readers begin with ``.metadata``. Only after the commit does the save remove the files of the previous save. So
whenever a save breaks off, all files that ``.metadata`` leads to are there.

Two programs may save to one folder. The commit compares and swaps: it succeeds only if ``.metadata`` is the version
that the save found when it began. So the first of two overlapping saves to commit wins.

``save_start`` begins a save, ``commit_checks`` has the last checks, ``store_commit`` the order of requests in a store,
and ``save_end`` removes files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.storage.commit_checks import Candidate
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.pieces import joined_pieces
from torch_xla_ckpt.storage.seal import SealedPieces
from torch_xla_ckpt.storage.store_commit import commit_in_store


def publish(
    candidate: Candidate, manifest: Iterable[Bytes], pickled: Iterable[Bytes], await_data: Callable[[], object]
) -> None:
    """Write the manifest and commit a save.

    Args:
        candidate: the save.
        manifest: the bytes of the manifest, in pieces.
        pickled: DCP's metadata, pickled, in pieces.
        await_data: waits until all data files are written. In a store, the manifest is put meanwhile.

    Raises:
        ConcurrentSaveError: another program has committed here since the save began.
        CheckpointError: files of this save are missing, so nobody could load the checkpoint.
    """
    if candidate.folder.remote:
        commit_in_store(candidate, manifest, pickled, await_data)
    else:
        await_data()
        _commit_on_disk(candidate, manifest, pickled)


def _commit_on_disk(candidate: Candidate, manifest: Iterable[Bytes], pickled: Iterable[Bytes]) -> None:
    """Write the manifest on a local disk, and replace ``.metadata`` after the last checks."""
    candidate.start.lease.require()
    folder = candidate.folder
    size, manifest_checksum = _write_manifest(candidate, joined_pieces(manifest))
    candidate.require_files(folder.names(), size)

    def check() -> None:  # the folder is locked by now, so a second listing is exact
        candidate.require_no_other_save(folder.names())

    data = SealedPieces(pickled, candidate.save_id, manifest_checksum)
    try:
        folder.replace(candidate.metadata, data, candidate.temporary, expected=candidate.start.version, check=check)
    except FileChanged as error:
        raise candidate.lost_to_another(candidate.rank) from error


def _write_manifest(candidate: Candidate, pieces: Iterable[Bytes]) -> tuple[int, bytes]:
    """Write the manifest, and return its size in bytes and its checksum."""
    hasher, size = xxhash.xxh3_64(), 0
    sink = candidate.folder.create(candidate.manifest)
    try:
        for piece in pieces:
            hasher.update(piece)
            size += len(piece)
            sink.write(piece)
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    candidate.folder.flush()
    return size, hasher.digest()
