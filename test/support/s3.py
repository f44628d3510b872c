"""A real S3 API on loopback, moto's, that keeps a record of what it was asked and fails when it is told to.

Clients are not touched: requests cross a socket, and faults happen at the server's end of it. Nothing waits for a
clock; what a test wants to be slow is held until the test, or another request, lets it go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import io
import logging
import re
import socket
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator

import boto3
import torch
import torch.distributed as dist
from botocore.config import Config
from moto.server import ThreadedMotoServer

import torch_xla_ckpt as xc
from support.programs import PROCESSES

HELD_AT_MOST = 60  # seconds; then a request that is held is let go, so that a test fails instead of hanging

# What S3 calls a request, by method, by whether it has a key, and by the first of these words in its query.
_OPERATIONS = {
    ("GET", True): {"uploadId": "ListParts", "": "GetObject"},
    ("GET", False): {"uploads": "ListMultipartUploads", "location": "GetBucketLocation", "": "ListObjects"},
    ("HEAD", True): {"": "HeadObject"},
    ("HEAD", False): {"": "HeadBucket"},
    ("PUT", True): {"partNumber": "UploadPart", "": "PutObject"},
    ("PUT", False): {"": "CreateBucket"},
    ("POST", True): {"uploads": "CreateMultipartUpload", "uploadId": "CompleteMultipartUpload"},
    ("POST", False): {"delete": "DeleteObjects"},
    ("DELETE", True): {"uploadId": "AbortMultipartUpload", "": "DeleteObject"},
    ("DELETE", False): {"": "DeleteBucket"},
}


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, as the server saw it.

    Attributes:
        operation: S3's name for it, "GetObject" for example.
        bucket, key: the object; the key is empty when the whole bucket is meant, and a copy names its source as well.
        start, stop: the byte range that was asked for; ``stop`` is None for the end, both are when there was none.
        received, sent: bytes of the body of the request, and of the answer.
    """

    operation: str
    bucket: str
    key: str
    start: int | None = None
    stop: int | None = None
    received: int = 0
    sent: int = 0

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @classmethod
    def of(cls, environ: dict) -> Request:
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        method, query = environ["REQUEST_METHOD"], urllib.parse.parse_qs(environ["QUERY_STRING"], True)
        known = _OPERATIONS.get((method, bool(key)), {})
        operation = next((known[word] for word in known if word in query or not word), method)
        if operation == "PutObject" and "HTTP_X_AMZ_COPY_SOURCE" in environ:
            operation = "CopyObject"
        start = stop = None
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", environ.get("HTTP_RANGE", "")):
            start, stop = int(found[1]), int(found[2]) + 1 if found[2] else None
        return cls(operation, bucket, key, start, stop, received=int(environ.get("CONTENT_LENGTH") or 0))


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer; ``cut`` is how much of the body is sent before the connection breaks, if it does."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes
    cut: int | None = None

    def with_body(self, body: bytes) -> Answer:
        """The same answer with another body, of which the headers tell no lie."""
        headers = [(name, value) for name, value in self.headers if name.lower() != "content-length"]
        return dataclasses.replace(self, headers=[*headers, ("Content-Length", str(len(body)))], body=body)


Forward = Callable[[], Answer]
Fault = Callable[[Request, Forward], Answer]
When = Callable[[Request], bool]


def asks(operation: str, name: str = "*") -> When:
    """Whether a request is such an operation, on an object whose name, without the folder, is like that."""
    return lambda request: request.operation == operation and fnmatch.fnmatchcase(request.name, name)


# Faults: each is given the request and a way to have it really answered.


def _error(status: str, code: str, message: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body)


def slow_down(request: Request, forward: Forward) -> Answer:
    """Not done: come again later."""
    return _error("503 Slow Down", "SlowDown", "Please reduce your request rate.")


def refused(request: Request, forward: Forward) -> Answer:
    """Not done, and no use in trying again."""
    return _error("403 Forbidden", "AccessDenied", "the bucket is closed today")


def not_there(request: Request, forward: Forward) -> Answer:
    """Not done: there is no such object, says a server that lags behind."""
    return _error("404 Not Found", "NoSuchKey", "The specified key does not exist.")


def broken_before(request: Request, forward: Forward) -> Answer:
    """Not done, and the connection breaks without an answer."""
    return Answer("200 OK", [], b"", cut=0)


def broken_after(request: Request, forward: Forward) -> Answer:
    """Done, and the connection breaks without an answer."""
    return dataclasses.replace(forward(), cut=0)


def broken_off(request: Request, forward: Forward) -> Answer:
    """The connection breaks in the middle of the answer's body."""
    answer = forward()
    return dataclasses.replace(answer, cut=len(answer.body) // 2)


def cut_short(request: Request, forward: Forward) -> Answer:
    """Half the body, with headers that call it whole."""
    answer = forward()
    return answer.with_body(answer.body[: len(answer.body) // 2])


def bit_flipped(request: Request, forward: Forward) -> Answer:
    """One bit of the body is another one, in its middle."""
    answer = forward()
    middle = len(answer.body) // 2
    return answer.with_body(answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :])


class Hold:
    """A fault that keeps requests waiting until they are let go, and then breaks the connection without an answer.

    Args:
        done: whether they are done before they wait; otherwise they are never done.
    """

    def __init__(self, done: bool = False):
        self.done = done
        self.here = threading.Event()
        self.free = threading.Event()

    def __call__(self, request: Request, forward: Forward) -> Answer:
        if self.done:
            forward()
        self.here.set()
        self.free.wait(HELD_AT_MOST)
        return broken_before(request, forward)


class Together:
    """A fault that keeps requests waiting until so many have come; ``met`` is set when they have."""

    def __init__(self, number: int):
        self.met = threading.Event()
        self._barrier = threading.Barrier(number, self.met.set, HELD_AT_MOST)

    def __call__(self, request: Request, forward: Forward) -> Answer:
        if not self.met.is_set():
            with contextlib.suppress(threading.BrokenBarrierError):
                self._barrier.wait()
        return forward()


@dataclasses.dataclass
class _Rule:
    fault: Fault
    when: When
    times: int | None
    met: list[Request] = dataclasses.field(default_factory=list)

    def takes(self, request: Request) -> bool:
        return (self.times is None or len(self.met) < self.times) and self.when(request)


class _Middleware:
    """Between werkzeug's server and moto's application."""

    def __init__(self, application):
        self._application = application
        self._lock = threading.Lock()
        self.rules: list[_Rule] = []
        self.logs: list[list[Request]] = []

    def __call__(self, environ, start_response):
        request = Request.of(environ)
        with self._lock:
            rule = next((rule for rule in self.rules if rule.takes(request)), None)
            if rule:
                rule.met.append(request)

        def forward() -> Answer:
            head = []
            parts = self._application(environ, lambda status, headers, _=None: head.extend((status, headers)))
            try:
                return Answer(head[0], head[1], b"".join(parts))
            finally:
                if hasattr(parts, "close"):
                    parts.close()

        if rule:  # No client waits for an answer before it has sent the whole request.
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(request.received))
        answer = rule.fault(request, forward) if rule else forward()
        with self._lock:
            for log in self.logs:
                log.append(dataclasses.replace(request, sent=len(answer.body)))
        if answer.cut is None:
            start_response(answer.status, answer.headers)
            return [answer.body]
        return self._break(environ["werkzeug.socket"], answer, start_response)

    @staticmethod
    def _break(connection: socket.socket, answer: Answer, start_response) -> Iterator[bytes]:
        if answer.cut:
            start_response(answer.status, answer.headers)
            yield answer.body[: answer.cut]
        connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError  # which werkzeug takes for the client's doing


class Server:
    """The server; a context manager. ``options`` are what fsspec needs to reach it.

    They also leave repeating to s3fs, as botocore's own pauses are long and random, and make parts as small as S3
    allows, so that a few MiB are uploaded in several.
    """

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)

    def __enter__(self) -> Server:
        self._moto.start()
        self._app = _Middleware(self._moto._server.app)
        self._moto._server.app = self._app
        self.url = "http://{}:{}".format(*self._moto.get_host_and_port())
        self.options = {
            "key": "nobody",
            "secret": "nothing",
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"retries": {"total_max_attempts": 1, "mode": "legacy"}, "proxies": {}},
            "default_block_size": 5 << 20,
        }
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="nobody",
            aws_secret_access_key="nothing",
            region_name="us-east-1",
            config=Config(proxies={}),
        )
        return self

    def __exit__(self, *_):
        self.client.close()
        self._moto.stop()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Request]]:
        """All requests answered in the meantime, in the order of their answers."""
        log: list[Request] = []
        self._app.logs.append(log)
        try:
            yield log
        finally:
            self._app.logs.remove(log)

    @contextlib.contextmanager
    def failing(self, fault: Fault, when: When, times: int | None = None) -> Iterator[list[Request]]:
        """Answer such requests by the fault, the first ``times`` of them or all. Yields those it has met."""
        rule = _Rule(fault, when, times)
        self._app.rules.append(rule)
        try:
            yield rule.met
        finally:
            self._app.rules.remove(rule)
            if isinstance(fault, Hold):
                fault.free.set()

    @contextlib.contextmanager
    def bucket(self, name: str) -> Iterator[Bucket]:
        """A bucket that is there for a while."""
        self.client.create_bucket(Bucket=name)
        try:
            yield Bucket(self, name)
        finally:
            bucket = Bucket(self, name)
            for upload in self.client.list_multipart_uploads(Bucket=name).get("Uploads", ()):
                self.client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
            for last in (False, False, True):
                for key in bucket.objects():
                    del bucket[key]
                try:
                    self.client.delete_bucket(Bucket=name)
                    break
                except self.client.exceptions.ClientError:  # a put that a second put has overtaken came late
                    if last:
                        raise


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What lies in a bucket, seen and changed behind the back of everybody's caches."""

    server: Server
    name: str

    def objects(self) -> list[str]:
        """The keys of all objects."""
        pages = self.server.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def pending(self) -> list[str]:
        """The keys of uploads that were begun, and neither completed nor aborted."""
        uploads = self.server.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())
        return [upload["Key"] for upload in uploads]

    def __getitem__(self, key: str) -> bytes:
        return self.server.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def __setitem__(self, key: str, body: bytes) -> None:
        self.server.client.put_object(Bucket=self.name, Key=key, Body=body)

    def __delitem__(self, key: str) -> None:
        self.server.client.delete_object(Bucket=self.name, Key=key)


def count(requests: list[Request]) -> Counter[str]:
    return Counter(request.operation for request in requests)


# Processes that save.


def host_state(seed: int, tensors: int = 4) -> dict[str, torch.Tensor]:
    """Tensors of 2 MiB each."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{n}": torch.randint(-(2**31), 2**31, (512, 1024), dtype=torch.int32, generator=generator)
        for n in range(tensors)
    }


class Saving:
    """A process, or one for each of ``world`` ranks, that saves ``host_state(seed)``; every rank its own tensors."""

    def __init__(self, url: str, options: dict, seed: int, world: int = 1, rendezvous: str = ""):
        self.processes, self._ends = [], []
        for rank in range(world):
            here, there = PROCESSES.Pipe(duplex=False)
            arguments = (there, url, options, seed, rank, world, rendezvous)
            self.processes.append(PROCESSES.Process(target=_save, args=arguments, daemon=True))
            self._ends.append(here)
            self.processes[-1].start()
            there.close()

    def kill(self) -> None:
        """SIGKILL, to all of them."""
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, seconds: float = 60) -> list[str]:
        """What each of them ended with: the error's text, or nothing."""
        try:
            for end in self._ends:
                assert end.poll(seconds), "a process that saves said nothing"
            return [end.recv() for end in self._ends]
        finally:
            self.kill()


def _save(end, url: str, options: dict, seed: int, rank: int, world: int, rendezvous: str) -> None:
    said = ""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    try:
        state = {f"rank{rank}": host_state(seed + rank)} if world > 1 else host_state(seed)
        xc.save(state, url, storage_writer=xc.ShardWriter(url, threads=1, storage_options=options))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    end.send(said)
