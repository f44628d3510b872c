"""Errors of requests that failed for good: which request to which file, how often, for how long, and the remedy."""

from __future__ import annotations

import errno

from torch_xla_ckpt.storage.retries import is_throttling


class RequestRefused(PermissionError):
    """The store refused a request, and would refuse it again."""


def gave_up(url: str, doing: str, attempts: int, seconds: float, error: Exception) -> OSError:
    """Return the error for a request that failed again and again.

    Args:
        url: the folder's URL.
        doing: what the request does: "write .metadata", for example.
        attempts: how often it was made.
        seconds: seconds from the first attempt to the last answer.
        error: the last answer.
    """
    remedy = (
        "The store asks for fewer requests: save or load later, or with fewer threads="
        if is_throttling(error)
        else "Check the network and the store, and try again"
    )
    times = "once" if attempts == 1 else f"{attempts} times"
    return OSError(
        errno.EIO,
        f"{url}: the request to {doing} failed {times} in {seconds:.1f} s. The last answer was "
        f"{type(error).__name__}: {error}. {remedy}",
    )


def refused(url: str, doing: str, error: PermissionError) -> RequestRefused:
    """Return the error for a request that the store refused.

    Args:
        url: the folder's URL.
        doing: what the request does.
        error: the store's answer.
    """
    if isinstance(error, RequestRefused):
        return error
    return RequestRefused(
        error.errno or errno.EACCES,
        f"{url}: the store refused the request to {doing}. Its answer was {error}. Check the credentials, and the "
        "permissions for this path",
    )
