"""Files in S3 being written: one request for a small file, and parts that are uploaded at the same time for others."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from torch_xla_ckpt.protocols import Bytes, Sink
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.deadline import start
from torch_xla_ckpt.storage.remote_requests import Requests
from torch_xla_ckpt.storage.remote_sinks import BLOCK_BYTES

_PARTS_AT_ONCE = 4  # parts of one file that are uploaded at the same time
_LAST_PARTS = 5.0  # seconds to wait for parts that are under way when an upload is given up


class S3Sink(Sink):
    """A file that is uploaded in parts, each of which is copied when it is full.

    Args:
        requests: the requests to the file's folder.
        name: the file's name.
        replaces: whether there may be an older file of this name.
    """

    def __init__(self, requests: Requests, name: str, replaces: bool):
        self._requests = requests
        self._name = name
        self._replaces = replaces
        bucket, _, key = requests.full_path(name).partition("/")
        self._object = {"Bucket": bucket, "Key": key}
        self._part_bytes = min(single_bytes(requests), BLOCK_BYTES)
        self._part = bytearray()
        self._size = 0
        self._upload: str | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._owner = forks.Owner()

    def write(self, data: Bytes) -> None:
        rest = memoryview(data)
        self._size += len(rest)
        while rest:
            piece = rest[: self._part_bytes - len(self._part)]
            self._part += piece
            rest = rest[len(piece) :]
            if len(self._part) == self._part_bytes:
                self._send_part()

    def close(self) -> None:
        if self._upload is None:
            self._requests.put(self._name, bytes(self._part))
            return
        if self._part:
            self._send_part()
        parts = [
            {"PartNumber": number, **{key: value for key, value in part.result().items() if key in _OF_PART}}
            for number, part in enumerate(self._parts, 1)
        ]
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except Exception:
            # A request that was repeated because its answer was lost finds that the upload is over.
            with suppress(Exception):
                if self._requests.size(self._name) == self._size:
                    return
            raise

    def abandon(self) -> None:
        if self._upload is None or not self._owner.is_here:  # in a forked child, the save goes on in the parent
            return
        wait(self._parts, _LAST_PARTS)  # a part that arrives later would cost money until somebody removes it
        with suppress(Exception):
            self._call("abort_multipart_upload", UploadId=self._upload)
        if self._replaces:
            return
        with suppress(Exception):
            path = self._requests.full_path(self._name)
            self._requests.call(f"remove {self._name}", 0, self._requests.fs.rm_file, path)

    def _send_part(self) -> None:
        """Upload the part that is full, in another thread."""
        if self._upload is None:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        running = [part for part in self._parts if not part.done()]
        if len(running) >= _PARTS_AT_ONCE:
            running[0].result()
        for part in self._parts:
            if part.done():
                part.result()  # raises the error of a part that failed
        body, self._part = bytes(self._part), bytearray()
        number = len(self._parts) + 1

        def upload() -> dict[str, Any]:
            return self._call("upload_part", len(body), UploadId=self._upload, PartNumber=number, Body=body)

        self._parts.append(start(upload))

    def _call(self, operation: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        """Call an operation of S3. All of them may be repeated."""

        def call() -> dict[str, Any]:
            return self._requests.fs.call_s3(operation, **self._object, **arguments)  # type: ignore[no-any-return]

        return self._requests.repeat(f"write {self._name}", nbytes, call)


_OF_PART = frozenset(("ETag", "ChecksumCRC32", "ChecksumCRC32C", "ChecksumSHA1", "ChecksumSHA256", "ChecksumCRC64NVME"))


def single_bytes(requests: Requests) -> int:
    """Return the largest file in bytes that is put in one request: fsspec's block size of the store."""
    return max(5 << 20, int(requests.fs.default_block_size))
