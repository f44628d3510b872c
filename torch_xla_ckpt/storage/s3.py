"""Requests that only S3 and stores with its protocol understand: conditional puts, removing many objects at once."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsspec.asyn import sync

from torch_xla_ckpt.protocols import Version
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.remote_requests import Requests
from torch_xla_ckpt.storage.retries import ATTEMPTS

logger = logging.getLogger(__name__)

_DELETE_AT_ONCE = 1000  # objects that S3 deletes in one request
_UNSUPPORTED = frozenset(("NotImplemented", "501"))
_CHANGED = frozenset(("PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"))


class S3Requests:
    """Requests to one folder in S3.

    Args:
        requests: the requests that every store understands.
    """

    def __init__(self, requests: Requests):
        self._requests = requests
        self._bucket, _, self._key = requests.path.partition("/")

    def read(self, name: str) -> tuple[bytes, str]:
        """Return an object's bytes and its ETag, with one request."""
        return self._requests.call(f"read {name}", 0, self._get, name)

    def put_if(self, name: str, data: bytes, expected: Version) -> bool:
        """Put an object if it still is the expected version.

        Returns:
            False if the store does not support conditions, and nothing was put.

        Raises:
            FileChanged: the object is another version.
        """
        condition = {"IfNoneMatch": "*"} if not expected.exists else {"IfMatch": expected.tag}
        options = {"chunksize": max(50 << 20, len(data))}  # a condition needs an object that is put in one request
        fs, path = self._requests.fs, self._requests.full_path(name)

        def put() -> None:  # made a second time after the first was carried out, it finds that the object has changed
            fs.pipe_file(path, data, **options, **condition)

        def is_answered(error: Exception) -> bool:
            return _error_code(error) in _UNSUPPORTED | _CHANGED

        try:
            self._requests.repeat(f"write {name}", len(data), put, is_hopeless=is_answered)
        except Exception as error:
            code = _error_code(error)
            if code in _UNSUPPORTED:
                return False
            if code in _CHANGED:
                raise FileChanged(name) from error
            raise
        return True

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, given by their paths in the filesystem.

        Raises:
            OSError: the store has kept some objects.
        """
        self._requests.forget_listing()
        for start in range(0, len(paths), _DELETE_AT_ONCE):
            self._remove_at_once(paths[start : start + _DELETE_AT_ONCE])

    def abort_uploads(self, matches: Callable[[str], bool]) -> None:
        """Abort unfinished multipart uploads of matching names in the folder. A failure is only logged."""
        prefix = f"{self._key}/" if self._key else ""
        try:
            found = self._call("list_multipart_uploads", Prefix=prefix)
            for upload in found.get("Uploads", ()):
                # A name in a folder below this one contains a slash, and does not match.
                if matches(upload["Key"].removeprefix(prefix)):
                    self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        except Exception as error:  # the user may lack the permission; unfinished uploads only cost money
            logger.info("unfinished uploads in %s were not aborted: %s", self._requests.url, error)

    def _call(self, operation: str, **arguments: Any) -> Any:
        return self._requests.call(operation, 0, self._requests.fs.call_s3, operation, Bucket=self._bucket, **arguments)

    def _get(self, name: str) -> tuple[bytes, str]:
        key = self._requests.full_path(name).partition("/")[2]
        fs = self._requests.fs

        async def get() -> tuple[bytes, str]:
            for attempt in range(1, ATTEMPTS + 1):
                answer = await fs._call_s3("get_object", Bucket=self._bucket, Key=key)
                try:
                    return await answer["Body"].read(), answer["ETag"]
                except Exception:  # the connection broke in the middle of the body
                    if attempt == ATTEMPTS:
                        raise
            raise AssertionError

        return sync(fs.loop, get)  # type: ignore[no-any-return]

    def _remove_at_once(self, paths: Sequence[str]) -> None:
        keys = [{"Key": path.partition("/")[2]} for path in paths]
        answer = self._call("delete_objects", Delete={"Objects": keys, "Quiet": True})
        # S3 reports success and a list of errors.
        errors = [error for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]
        if errors:
            first = errors[0]
            raise OSError(
                errno.EACCES if first.get("Code") == "AccessDenied" else errno.EIO,
                f"the store kept {len(errors)} of {len(paths)} objects that a request should have removed from "
                f"{self._requests.url}. Its answer for {first.get('Key')} is {first.get('Code')}: "
                f"{first.get('Message')}",
            )


def _error_code(error: BaseException) -> str:
    """Return S3's code of an error. s3fs translates the error and keeps the original as the cause."""
    for one in (error, error.__cause__):
        if isinstance(one, FileExistsError):
            return "PreconditionFailed"
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return str(response.get("Error", {}).get("Code", ""))
    return ""
