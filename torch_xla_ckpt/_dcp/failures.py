"""DCP's ``CheckpointException``, which holds one failure for each failed rank, as a single error."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from torch_xla_ckpt.errors import CheckpointError, MismatchError, OtherRankError, ReplacedCheckpointError


def cause(error: CheckpointException, done: str, several: bool, *, interrupts: bool = True) -> BaseException:
    """Return the failure that explains the error best, with its rank in the message.

    Args:
        error: DCP's exception.
        done: "saved" or "loaded", for the message.
        several: whether other ranks took part.
        interrupts: whether to return a KeyboardInterrupt or SystemExit unchanged. Default: True. Pass False for the
            future of an async save, whose reader was not interrupted.
    """
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    for failure in causes.values():
        if interrupts and not isinstance(failure, Exception):  # KeyboardInterrupt, SystemExit
            return failure
    # A rank that only waited for another one explains nothing, unless all ranks did.
    reasons = {rank: failure for rank, failure in causes.items() if not isinstance(failure, OtherRankError)}
    causes = reasons or causes
    # If one rank sees that the checkpoint was replaced, the others may see damage, which is no explanation.
    preferred = (ReplacedCheckpointError, CheckpointError)
    ranks = (rank for kind in preferred for rank, failure in causes.items() if isinstance(failure, kind))
    rank = next(ranks, next(iter(causes)))
    failure = causes[rank]
    # A MismatchError names ranks itself.
    where = f"rank {rank}: " if several and not isinstance(failure, MismatchError) else ""
    others = f" (ranks {', '.join(str(r) for r in causes if r != rank)} failed too)" if len(causes) > 1 else ""
    if isinstance(failure, CheckpointError):
        failure.args = (f"{where}{failure}{others}", *failure.args[1:])
        return failure
    text = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
    if isinstance(failure, AssertionError) and done == "loaded":
        text = "there is no checkpoint there whose metadata can be read"  # DCP asserts that there is metadata
    return CheckpointError(f"the checkpoint could not be {done}: {where}{text}{others}")
