"""Which failed requests to repeat, and when.

Pauses grow exponentially, up to a limit, and are random ("full jitter"): the processes of a pod that a store has asked
to slow down do not all come back at the same moment.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator, Mapping

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.storage.deadline import RequestTimeout

ATTEMPTS = 5
"""How often a request is attempted, in addition to what the fsspec backend repeats by itself."""
THROTTLED_ATTEMPTS = 9
"""How often a request is attempted if the store asks to slow down."""
FIRST_PAUSE = 0.1
"""The longest pause after the first attempt, in seconds. Each further pause may be twice as long."""
LONGEST_PAUSE = 5.0
"""The longest pause in seconds."""

_FINAL = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    RequestTimeout,
    CheckpointError,
    NotImplementedError,
    TypeError,
    AttributeError,
)
_FINAL_NUMBERS = frozenset((errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG, errno.EDQUOT))
_BUSY_NUMBERS = frozenset((errno.EBUSY, errno.EAGAIN))
_BUSY_STATUS = frozenset((429, 503))


def is_final(error: BaseException) -> bool:
    """Return whether the same request would fail again for the same reason."""
    if not isinstance(error, Exception) or isinstance(error, _FINAL):
        return True
    return isinstance(error, OSError) and error.errno in _FINAL_NUMBERS


def is_throttling(error: BaseException) -> bool:
    """Return whether the store asks to make fewer requests."""
    causes = [one for one in (error, error.__cause__) if one is not None]
    return any(
        _status(one) in _BUSY_STATUS or (isinstance(one, OSError) and one.errno in _BUSY_NUMBERS) for one in causes
    )


def pauses() -> Iterator[float]:
    """Yield the pauses between attempts, in seconds, without end."""
    longest = FIRST_PAUSE
    while True:
        yield random.uniform(0, longest)
        longest = min(2 * longest, LONGEST_PAUSE)


def attempts_for(error: BaseException) -> int:
    """Return how often to attempt a request that has failed with ``error``."""
    if is_final(error):
        return 1
    return THROTTLED_ATTEMPTS if is_throttling(error) else ATTEMPTS


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error; None if it has none. Backends of fsspec keep it in different places."""
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int):
            return found
        if isinstance(found, str) and found.isdecimal():
            return int(found)
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    return None
