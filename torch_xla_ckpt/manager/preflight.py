"""A check at construction: the run's folder can be written, and all ranks see the same folder."""

from __future__ import annotations

import logging
import secrets

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage import path_mismatch

logger = logging.getLogger(__name__)


def require_shared_folder(steps: Steps, processes: Processes) -> None:
    """Check that the run's folder can be written, and that all ranks see the same one.

    Rank 0 writes a token, all ranks read it, and rank 0 deletes it. A warning says if it could not be deleted.

    Raises:
        CheckpointError: the folder cannot be written, or some ranks do not see it. They are named.
    """
    path = steps.location
    doing = f"opening {path}"
    token = processes.from_first(lambda: _write_token(steps), doing)
    found: list[tuple[str | None, str]] = []
    if not processes.alone:
        found = processes.gather((_visibility_error(steps.root, token), path.identity), doing)
    if processes.rank == 0:
        try:
            steps.root.remove([token])
        except Exception as error:
            logger.warning(
                "%s in %s could not be deleted (%s: %s). Without the permission to delete, no step is ever deleted",
                token,
                path,
                type(error).__name__,
                error,
            )
    blind = [(rank, error) for rank, (error, _) in zip(processes.ranks, found) if error is not None]
    if blind:
        apart = path_mismatch("looks", "in", [identity for _, identity in found])
        raise CheckpointError(
            f"ranks {', '.join(str(rank) for rank, _ in blind)} do not see what rank 0 has written to {found[0][1]} "
            f"({blind[0][1]}). All ranks must use one shared folder: on a local disk of its own, each host would keep "
            "a part of each checkpoint that nobody can restore" + (f". {apart}" if apart else "")
        )


def _write_token(steps: Steps) -> str:
    """Write a file with a new name into the run's folder, and return the name."""
    token = f"preflight-{secrets.token_hex(8)}"
    try:
        steps.root.make()
        steps.root.replace(token, [b""], f"{token}.tmp")
    except Exception as error:
        raise CheckpointError(
            f"{steps.location} cannot be written: {error}. Check the path and its permissions"
        ) from error
    return token


def _visibility_error(folder: Folder, token: str) -> str | None:
    """Return why this process does not see a file; None if it does. Asks by name, because a listing may lag."""
    try:
        folder.read(token)
    except FileNotFoundError:
        return f"{token} is not there"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
