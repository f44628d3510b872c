"""Commit a save in a store: as few requests one after the other as the proofs allow.

Every request costs a round trip. So the manifest is put while the last data files are, one listing then shows the sizes
of all files, and the lease is removed while the size of the new ``.metadata`` is looked at. The old checkpoint is whole
until ``.metadata`` is put, and no file of it is removed before the new ``.metadata`` has been seen whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress

import xxhash

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes, Folder
from torch_xla_ckpt.storage.cancellation import Cancellation, is_interrupt
from torch_xla_ckpt.storage.commit_checks import Candidate
from torch_xla_ckpt.storage.deadline import RequestTimeout, interrupted_call
from torch_xla_ckpt.storage.deadline import start as start_call
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.pieces import joined_pieces, whole
from torch_xla_ckpt.storage.seal import SealedPieces, sealed_save_id

logger = logging.getLogger(__name__)

_LOOKS = 3  # attempts to see a file that was just put
_COMMITS = 3  # attempts to put .metadata into a store that keeps only a part of it
_LATE_MANIFEST = 10.0  # seconds for which a save that has failed waits for its manifest to be put
_LATE_COMMIT = (
    "The store may still carry out this request. Then the new checkpoint appears later, whole. Until then, the "
    "previous one stays"
)


def commit_in_store(
    candidate: Candidate, manifest: Iterable[Bytes], pickled: Iterable[Bytes], await_data: Callable[[], object]
) -> None:
    """Put the manifest, and replace ``.metadata`` after the last checks.

    Args:
        candidate: the save.
        manifest: the bytes of the manifest, in pieces.
        pickled: DCP's metadata, pickled, in pieces.
        await_data: waits until all data files are put.

    Raises:
        ConcurrentSaveError: another program has committed here since the save began.
        CheckpointError: files of this save are missing, or the store has kept only a part of them.
    """
    folder = candidate.folder
    pieces = list(joined_pieces(manifest))
    failing = Cancellation()
    with failing.applied():
        putting = start_call(lambda: _put(folder, candidate.manifest, pieces))
    try:
        sealed = SealedPieces(pickled, candidate.save_id, _checksum(pieces))
        content = whole(sealed)
        await_data()
        if not folder.refuses_parts:
            putting.result()  # so that the listing shows the size of the manifest

        def check() -> None:
            candidate.start.lease.require()
            folder.settle()
            listed = folder.listing()
            candidate.require_files(listed, None if folder.refuses_parts else sum(map(len, pieces)))
            candidate.require_no_other_save(listed)
            putting.result()
            candidate.start.is_committing = True

        try:
            _replace(candidate, content, check)
        except FileChanged as error:
            # A request that is made again, because its answer was lost, finds what it has written itself.
            if not sealed.is_at(folder.version(candidate.metadata).end):
                raise candidate.lost_to_another(candidate.rank) from error
    except BaseException as error:
        if is_interrupt(error):
            failing.cancel()
        raise
    finally:
        # A manifest that is put later would stay after the files of a failed save were removed.
        wait([putting], _LATE_MANIFEST)


def _replace(candidate: Candidate, content: bytes, check: Callable[[], None]) -> None:
    """Put ``.metadata``, again if the store has kept only a part of it.

    Args:
        candidate: the save.
        content: the bytes of ``.metadata``.
        check: the last checks, which raise an error if the save must not be committed.
    """
    folder, name, start = candidate.folder, candidate.metadata, candidate.start
    expected = start.version
    for _ in range(_COMMITS):
        try:
            folder.replace(name, [content], candidate.temporary, expected=expected, check=check)
        except RequestTimeout as error:
            if error.call is not None and error.doing == f"write {name}":
                error.args = (f"{error}. {_LATE_COMMIT}",)
            raise
        except BaseException as error:
            if is_interrupt(error) and interrupted_call(error) is not None:
                logger.warning("%s: the save was interrupted while it put %s. %s", folder.url, name, _LATE_COMMIT)
            raise
        if folder.refuses_parts:
            return
        # Nobody needs the lease any more, and if no old file waits for the proof, nothing else has to be removed.
        removing = None if start.survey.result().replaced else start_call(lambda: _remove_lease(candidate))
        try:
            size = _size_in_store(folder, name)
        except Exception as error:
            raise CheckpointError(
                f"{folder.url} has a new {name}, which could not be looked at: {error}. So it is unknown whether the "
                "store has kept all of it, and no file of the checkpoint before was removed. Check the checkpoint with "
                "torch_xla_ckpt.verify, or save again"
            ) from error
        finally:
            if removing is not None:
                wait([removing])
        if size == len(content):
            return
        expected = folder.version(name)
        if sealed_save_id(expected.end) is not None:  # another save has committed after this one
            return
    raise CheckpointError(
        f"{folder.url} has kept only a part of {name} in {_COMMITS} attempts, although it called each put a success. "
        "There is no checkpoint now. The other files of the checkpoint before it were not removed. Mend the store, and "
        "save again"
    )


def _remove_lease(candidate: Candidate) -> None:
    """Remove the lease of a committed save. An error is ignored, because the end of the save tries again."""
    with suppress(Exception):
        candidate.start.lease.remove()


def _put(folder: Folder, name: str, pieces: Sequence[Bytes]) -> None:
    """Put a file whose name is used once."""
    sink = folder.create(name, unchanged=True)
    try:
        for piece in pieces:
            sink.write(piece)
        sink.close()
    except BaseException:
        sink.abandon()
        raise


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
