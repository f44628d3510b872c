"""RemoteFolder: a folder that fsspec reaches.

Every name is taken literally: no call of fsspec is used that expands patterns (``rm``, ``expand_path``, ``glob``).
Every request has a time limit.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import Any, NamedTuple, ParamSpec, TypeVar

import fsspec
import numpy as np
from fsspec.asyn import sync

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes, Entry, Version, Window
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.deadline import GivenUp, RequestTimeout, call_within
from torch_xla_ckpt.storage.files import FileChanged, check_inside
from torch_xla_ckpt.storage.location import Location

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A read is cut into requests of this many bytes, which run at the same time.
_REQUEST_BYTES = 16 << 20
# Requests that failed on the way are made again this often, beside what the fsspec backend does of itself.
_ATTEMPTS = 3
# Keys that S3 deletes in one request.
_DELETE_AT_ONCE = 1000
# Stores whose backend can create an object only if there is none (fsspec's mode="create").
_CAN_CREATE = frozenset(("abfs", "abfss", "az", "gcs", "gs"))

# Requests to put or remove ``.metadata`` without a condition, by the identity of the folder.
_given_up = GivenUp()

# fsspec's memory filesystem lies in this process, so a lock is all that a comparison and a swap need.
_memory_lock = threading.Lock()


@forks.in_child
def _renew_lock() -> None:
    global _memory_lock
    _memory_lock = threading.Lock()


class RemoteFolder:
    """A folder that fsspec reaches. A put must be atomic, as it is in object stores."""

    remote = True

    def __init__(self, location: Location):
        assert location.filesystem is not None
        self.url = location.url
        self._location = location
        self._fs: fsspec.AbstractFileSystem = location.filesystem
        self._path = location.path

    def make(self) -> None:
        # An object store has no folders, and making one there would make a bucket of a misspelt name.
        if not self._location.is_object_store:
            self._call("make", 0, self._fs.makedirs, self._path, exist_ok=True)

    def settle(self) -> None:
        limit = self._location.request_timeout
        running = _given_up.wait(self._location.identity, limit)
        if running:
            raise CheckpointError(
                f"nothing was saved to {self.url}: an earlier request of this program to {running[0]} got no answer, "
                f"and still runs after another {limit:.0f} s. If the store carries it out later, it destroys what was "
                "saved there in the meantime. Check the network and the store, and save again when the request has "
                "ended; or save to another path"
            )

    def names(self) -> list[str]:
        return list(self.listing())

    def listing(self) -> dict[str, Entry]:
        return {
            name: Entry(int(entry.get("size") or 0), _modified(entry))
            for name, entry in self._listed().items()
            if entry["type"] != "directory"
        }

    def folders(self) -> list[str]:
        return [name for name, entry in self._listed().items() if entry["type"] == "directory"]

    def size(self, name: str) -> int:
        check_inside(name)
        self._forget_listing()
        return int(self._call(f"look at {name}", 0, self._fs.info, self._full(name))["size"])

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        # One request for all of them. What a listing that lags behind does not show is asked for by name.
        listed = self.listing() if listed is None else listed
        return sorted(name for name in files if name not in listed and not self._is_there(name))

    def read(self, name: str) -> bytes:
        return self._read(name)[0]

    def version(self, name: str) -> Version:
        try:
            return Version.of(*self._read(name))
        except FileNotFoundError:
            return Version.none()

    def create(self, name: str) -> _RemoteSink:
        return _RemoteSink(self, name)

    def put(self, name: str, data: bytes) -> None:
        self._call(f"write {name}", len(data), self._fs.pipe_file, self._full(name), data)

    def replace(
        self,
        name: str,
        data: bytes,
        temporary: str,
        *,
        expected: Version | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        if look is not None:
            look()
        if expected is None:
            self._put_lastingly(name, data)
        elif hasattr(self._fs, "call_s3"):
            self._replace_s3(name, data, expected)
        elif "memory" in self._protocols():
            with _memory_lock:
                self._compare_and_put(name, data, expected)
        elif not expected.exists and not _CAN_CREATE.isdisjoint(self._protocols()):
            try:
                self._call(f"write {name}", len(data), self._fs.pipe_file, self._full(name), data, mode="create")
            except FileExistsError as error:
                raise FileChanged(name) from error
        else:
            self._compare_and_put(name, data, expected)

    def append(self, name: str, line: bytes) -> None:
        try:
            before = self.read(name)
        except FileNotFoundError:
            before = b""
        if before and not before.endswith(b"\n"):  # the line before was cut off
            before += b"\n"
        self.put(name, before + line + b"\n")

    def flush(self) -> None:
        pass

    def remove(self, names: Sequence[str]) -> None:
        paths = [self._full(name) for name in names]
        if not paths:
            return
        if hasattr(self._fs, "call_s3"):
            what = f"remove {paths[0]}"
            with self._remembered(what) if any(path.endswith(METADATA) for path in paths) else nullcontext():
                for start in range(0, len(paths), _DELETE_AT_ONCE):
                    self._remove_s3(paths[start : start + _DELETE_AT_ONCE])
            return
        failed: list[tuple[str, Exception]] = []
        for path in paths:
            try:
                with self._remembered(f"remove {path}") if path.endswith(METADATA) else nullcontext():
                    self._call(f"remove {path}", 0, self._fs.rm_file, path)
            except FileNotFoundError:
                pass
            except Exception as error:
                failed.append((path, error))
        if failed:
            first, why = failed[0]
            raise OSError(
                f"{len(failed)} of {len(paths)} files in {self.url} could not be removed, the first is {first}: {why}"
            ) from why

    def abort_uploads(self, of: Callable[[str], bool]) -> None:
        if not hasattr(self._fs, "call_s3"):
            return  # other stores drop them by themselves
        bucket, _, folder = self._path.partition("/")
        prefix = f"{folder}/" if folder else ""
        try:
            found = self._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in found.get("Uploads", ()):
                if of(upload["Key"].removeprefix(prefix)):  # and not what lies in folders below
                    self._call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
        except Exception as error:  # it may not be allowed; nothing is lost but a little money
            logger.info("unfinished uploads in %s were not looked for: %s", self.url, error)

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        for window in windows:
            check_inside(window.name)
        # Untouched pages of an empty array cost no memory, so a window may be larger than its parts.
        buffers = [np.empty(window.stop - window.start, dtype=np.uint8) for window in windows]
        ends = [window.stop - window.start for window in windows]
        requests = [
            _Request(number, window.name, start, min(start + _REQUEST_BYTES, stop))
            for number, window in enumerate(windows)
            for first, stop in window.parts
            for start in range(first, stop, _REQUEST_BYTES)
        ]
        for request, data in zip(requests, self._get(requests)):
            place = request.start - windows[request.window].start
            buffers[request.window][place : place + len(data)] = np.frombuffer(data, dtype=np.uint8)
            if len(data) < request.stop - request.start:
                ends[request.window] = min(ends[request.window], place + len(data))
        return [buffer.data[:end] for buffer, end in zip(buffers, ends)]

    def forget(self, name: str, start: int, stop: int) -> None:
        pass

    def release(self) -> None:
        pass

    def _call(self, what: str, nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the filesystem, within the time limit for a request that moves ``nbytes``.

        Raises:
            RequestTimeout: naming the folder and what was asked.
        """
        try:
            return call_within(self._location.request_timeout + nbytes / (1 << 20), function, *args, **kwargs)
        except RequestTimeout as error:
            raise RequestTimeout(
                f"{self.url}: the request to {what} got {error}. Check the network and the store; raise "
                "request_timeout= if the store is only slow",
                error.call,
            ) from None

    def _get(self, requests: Sequence[_Request]) -> list[bytes]:
        """The answers to byte-range requests; those that failed on the way are made again."""
        self._forget_listing()
        answers: dict[int, bytes] = {}
        for attempt in range(1, _ATTEMPTS + 1):
            asked = [number for number in range(len(requests)) if number not in answers]
            if not asked:
                break
            got = self._call(
                f"read {requests[asked[0]].name}",
                sum(requests[number].stop - requests[number].start for number in asked),
                self._fs.cat_ranges,
                [self._full(requests[number].name) for number in asked],
                [requests[number].start for number in asked],
                [requests[number].stop for number in asked],
                on_error="return",
            )
            for number, answer in zip(asked, got):
                request = requests[number]
                if isinstance(answer, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "no such file", request.name)
                if not isinstance(answer, BaseException):
                    answers[number] = answer
                elif not isinstance(answer, Exception):
                    raise answer
                elif self.size(request.name) <= request.start:  # which object stores call an error
                    answers[number] = b""
                elif attempt == _ATTEMPTS:
                    raise answer
        return [answers[number] for number in range(len(requests))]

    def _listed(self) -> dict[str, dict[str, Any]]:
        """What fsspec says of each file and folder in this one, by name."""
        self._forget_listing()
        try:
            found = self._call("list", 0, self._fs.ls, self._path, detail=True)
        except FileNotFoundError:
            return {}
        # An object named like the folder itself is not in it.
        inside = ((entry["name"].rstrip("/"), entry) for entry in found)
        return {path.rpartition("/")[2]: entry for path, entry in inside if path != self._path}

    def _read(self, name: str) -> tuple[bytes, str | None]:
        """A file's bytes, and what the store calls this version of it."""
        self._forget_listing()
        if hasattr(self._fs, "call_s3"):
            return self._call(f"read {name}", 0, self._get_s3, name)
        return self._call(f"read {name}", 0, self._fs.cat_file, self._full(name)), None

    def _is_there(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def _compare_and_put(self, name: str, data: bytes, expected: Version) -> None:
        if not self.version(name).is_same(expected):
            raise FileChanged(name)
        self._put_lastingly(name, data)

    def _put_lastingly(self, name: str, data: bytes) -> None:
        with self._remembered(f"write {name}"):
            self.put(name, data)

    @contextmanager
    def _remembered(self, what: str) -> Iterator[None]:
        """Remember a request that is given up on, so that the next save here waits for its end."""
        try:
            yield
        except RequestTimeout as error:
            if error.call is not None:
                _given_up.add(self._location.identity, what, error.call)
            raise

    def _call_s3(self, operation: str, **arguments: Any) -> Any:
        return self._call(operation, 0, self._fs.call_s3, operation, **arguments)

    def _get_s3(self, name: str) -> tuple[bytes, str]:
        """An object's bytes and its ETag, in one request."""
        bucket, _, key = self._full(name).partition("/")

        async def get() -> tuple[bytes, str]:
            for attempt in range(1, _ATTEMPTS + 1):
                answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key)
                try:
                    return await answer["Body"].read(), answer["ETag"]
                except Exception:  # the connection broke in the middle of the body
                    if attempt == _ATTEMPTS:
                        raise
            raise AssertionError

        return sync(self._fs.loop, get)  # type: ignore[no-any-return]

    def _replace_s3(self, name: str, data: bytes, expected: Version) -> None:
        condition = {"IfNoneMatch": "*"} if not expected.exists else {"IfMatch": expected.tag}
        whole = {"chunksize": max(50 << 20, len(data))}  # conditions hold for an object that is put in one request
        try:
            self._call(f"write {name}", len(data), self._fs.pipe_file, self._full(name), data, **whole, **condition)
        except Exception as error:
            code = _s3_code(error)
            if code in ("NotImplemented", "501"):
                logger.warning(
                    "%s has no conditional puts, so two programs that save there at the same time may both succeed",
                    self.url,
                )
                self._compare_and_put(name, data, expected)
            elif code in ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404"):
                raise FileChanged(name) from error
            else:
                raise

    def _remove_s3(self, paths: Sequence[str]) -> None:
        """Remove objects in one request.

        Raises:
            OSError: the store has kept some. It answers with success and a list of errors then.
        """
        bucket = self._path.partition("/")[0]
        keys = [{"Key": path.partition("/")[2]} for path in paths]
        self._forget_listing()
        answer = self._call_s3("delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
        errors = [error for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]
        if errors:
            first = errors[0]
            raise OSError(
                errno.EACCES if first.get("Code") == "AccessDenied" else errno.EIO,
                f"the store kept {len(errors)} of {len(paths)} objects that were to be removed from {self.url}; for "
                f"{first.get('Key')} it says {first.get('Code')}: {first.get('Message')}",
            )

    def _protocols(self) -> frozenset[str]:
        named = self._fs.protocol
        return frozenset((named,) if isinstance(named, str) else named)

    def _forget_listing(self) -> None:
        """fsspec remembers what it has listed, and then does not find what others have written since."""
        self._fs.invalidate_cache(self._path)

    def _full(self, name: str) -> str:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise FileNotFoundError(errno.ENOENT, "no file can have this name", name) from error
        return f"{self._path}/{name}"


class _Request(NamedTuple):
    """Bytes to ask for, and the number of the window they belong to."""

    window: int
    name: str
    start: int
    stop: int


class _RemoteSink:
    def __init__(self, folder: RemoteFolder, name: str):
        self._folder = folder
        self._name = name
        self._path = folder._full(name)
        self._owner = forks.Owner()
        self._file = folder._call(f"write {name}", 0, folder._fs.open, self._path, "wb")
        forks.renew_in_child(self, _RemoteSink._forsake)

    def _forsake(self) -> None:
        """In a forked child: never upload the parent's bytes. fsspec would when it deletes the file object."""
        with suppress(Exception):
            self._file.closed = True

    def write(self, data: Bytes) -> None:
        self._folder._call(f"write {self._name}", len(data) + self._buffered(), self._file.write, data)

    def close(self) -> None:
        self._folder._call(f"write {self._name}", self._buffered(), self._file.close)

    def abandon(self) -> None:
        if not self._owner.is_here:  # a forked child unwinds its parent's save, which goes on
            return
        # Closing would publish what is there. What went wrong before is the error to report, not what goes wrong here.
        with suppress(Exception):
            self._folder._call(f"give up {self._name}", 0, self._file.discard)
        with suppress(Exception):
            self._file.closed = True
        with suppress(Exception):
            self._folder._call(f"remove {self._name}", 0, self._folder._fs.rm_file, self._path)

    def _buffered(self) -> int:
        """Bytes that fsspec holds back, and sends with the next ones."""
        return int(getattr(self._file, "blocksize", 0) or 0)


def _modified(entry: Mapping[str, Any]) -> float | None:
    """When a file was last written, in seconds of the store's clock; None if the store does not tell."""
    for key in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return None


def _s3_code(error: BaseException) -> str:
    """What S3 calls an error; s3fs translates it and keeps the original as the cause."""
    for one in (error, error.__cause__):
        if isinstance(one, FileExistsError):
            return "PreconditionFailed"
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            return str(response.get("Error", {}).get("Code", ""))
    return ""
