"""Replace a file in a store, only if it still is the version that was read before.

S3 compares and puts in one step. fsspec's memory does so under a lock, and Google's and Azure's stores for a new file.
Elsewhere, the version is compared right before the put.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch_xla_ckpt.protocols import Version
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.cancellation import pause
from torch_xla_ckpt.storage.deadline import together
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.remote_requests import Requests
from torch_xla_ckpt.storage.request_errors import gave_up
from torch_xla_ckpt.storage.retries import attempts_for, pauses
from torch_xla_ckpt.storage.s3 import S3Requests

logger = logging.getLogger(__name__)

_FRESH = 1.0  # seconds for which a comparison holds that was made while other requests ran
# Protocols whose backends can create a file only if there is none (fsspec's mode="create").
_CAN_CREATE = frozenset(("abfs", "abfss", "az", "gcs", "gs"))

# fsspec's memory filesystem is in this process, so a lock makes comparing and replacing one step.
_memory_lock = threading.Lock()


@forks.in_child
def _renew_memory_lock() -> None:
    global _memory_lock
    _memory_lock = threading.Lock()


class Replacing:
    """Replaces files of one folder.

    Args:
        requests: the requests to the folder.
        s3: requests that only S3 understands; None for other stores.
        version: returns the current version of a file.
    """

    def __init__(self, requests: Requests, s3: S3Requests | None, version: Callable[[str], Version]):
        self._requests = requests
        self._fs = requests.fs
        self._s3 = s3
        self._version = version

    def replace(self, name: str, data: bytes, expected: Version | None, check: Callable[[], None] | None) -> None:
        """Put a file. See ``Folder.replace``.

        Args:
            name: the file's name.
            data: the new bytes.
            expected: the version that the file must have; None for any.
            check: called before the put, which it prevents if it raises. None: nothing is called.

        Raises:
            FileChanged: the file is another version.
        """
        protocols = self._protocols()
        compares_slowly = expected is not None and self._s3 is None and "memory" not in protocols
        if check is not None and not compares_slowly:
            check()
            check = None
        if expected is None:
            self._put(name, data)
        elif self._s3 is not None:
            if not self._s3.put_if(name, data, expected):
                logger.warning(
                    "%s has no conditional puts, so two programs that save there at the same time may both succeed. "
                    "Let only one program save to a path",
                    self._requests.url,
                )
                self._compare_and_put(name, data, expected)
        elif "memory" in protocols:
            with _memory_lock:
                self._compare_and_put(name, data, expected)
        elif not expected.exists and not _CAN_CREATE.isdisjoint(protocols):
            if check is not None:
                check()
            self._put_new(name, data)
        else:
            self._compare_and_put(name, data, expected, check)

    def _put_new(self, name: str, data: bytes) -> None:
        """Put a file if there is none, in one step."""
        path = self._requests.full_path(name)
        try:
            self._requests.call(f"write {name}", len(data), self._fs.pipe_file, path, data, mode="create")
        except FileExistsError as error:
            raise FileChanged(name) from error

    def _compare_and_put(
        self, name: str, data: bytes, expected: Version, check: Callable[[], None] | None = None
    ) -> None:
        """Put a file if it still is the expected version.

        Args:
            name: the file's name.
            data: the new bytes.
            expected: the version that the file must have.
            check: a function that runs while the versions are compared, and prevents the put if it raises.
        """

        def compare() -> None:
            if not self._version(name).is_same(expected):
                raise FileChanged(name)

        began = time.monotonic()
        together([*([] if check is None else [check]), compare])
        if time.monotonic() - began > _FRESH:  # ``check`` took long
            compare()
        began = time.monotonic()
        for attempt, seconds in enumerate(pauses(), 1):
            try:
                self._put(name, data)
                return
            except Exception as error:
                most = attempts_for(error)
                if most == 1:
                    raise
                if attempt >= most:
                    elapsed = time.monotonic() - began
                    raise gave_up(self._requests.url, f"write {name}", attempt, elapsed, error) from error
            pause(seconds)
            if self._version(name).is_same(Version.of(data)):  # the put was carried out, and its answer was lost
                return
            compare()

    def _put(self, name: str, data: bytes) -> None:
        path = self._requests.full_path(name)
        with self._requests.remembered(f"write {name}"):
            self._requests.call(f"write {name}", len(data), self._fs.pipe_file, path, data)

    def _protocols(self) -> frozenset[str]:
        named = self._fs.protocol
        return frozenset((named,) if isinstance(named, str) else named)
