"""Location: the folder that a path or URL names, parsed once and absolute from then on.

A path is parsed here, when the user passes it, and all further code uses the ``Location``. So a path has one meaning
everywhere, and a later ``os.chdir`` changes nothing. No part of a path is ever taken for a pattern.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import registry

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
REQUEST_TIMEOUT = 600.0
"""The default time limit of a request to a store, in seconds; see ``Location.request_timeout``."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_COLLAPSED = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):/(?!/)")
_LOCAL = frozenset(("file", "local"))
# Protocols whose first path component is a bucket. They have no folders, and their puts are atomic.
OBJECT_STORES = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "oci", "oss", "r2", "s3", "s3a"))


@dataclass(frozen=True)
class Location:
    """A folder on a local disk, or in a store that fsspec reaches. Made by ``Location.of``.

    Args:
        url: an absolute path, or a URL.
        path: the folder's path in its filesystem.
        filesystem: fsspec's filesystem; None for the local filesystem.
        request_timeout: the time limit of a request to a remote store, in seconds. Each MiB that the request moves adds
            another second.
    """

    url: str
    path: str
    filesystem: fsspec.AbstractFileSystem | None = None
    request_timeout: float = REQUEST_TIMEOUT

    @classmethod
    def of(
        cls,
        path: PathLike | Location,
        storage_options: Mapping[str, Any] | None = None,
        *,
        request_timeout: float = REQUEST_TIMEOUT,
    ) -> Location:
        """Parse a path.

        Text that begins with a protocol that fsspec knows (``s3://``, ``memory://``, ...) is a URL, and the rest of it
        is taken literally. All other text is a local path. ``~`` in a local path is expanded, and a relative path is
        joined to the current folder.

        Args:
            path: a local path or an fsspec URL. A ``Location`` is returned unchanged.
            storage_options: options for fsspec's filesystem.
            request_timeout: the time limit of a request in seconds; see the class. Default 600.

        Raises:
            ValueError: the path is empty, has a null character, or names no bucket.
            ImportError: the backend of the protocol is not installed.
            TypeError: the path is neither text nor an ``os.PathLike``.
        """
        if isinstance(path, Location):
            return path
        text = os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) else path
        if not isinstance(text, str):
            raise TypeError(
                f"a path is a str or an os.PathLike, not a {type(text).__name__}. In a call, the state comes first: "
                "save(state, path)"
            )
        if not text:
            raise ValueError("the path is empty. Give the folder of the checkpoint; '.' is the current folder")
        if "\0" in text:
            raise ValueError(f"the path {text!r} has a null character, which no file name can have")
        options = dict(storage_options or {})
        protocol = _protocol(text)
        if protocol is None:
            return _local(text)
        if protocol in _LOCAL:
            return _local(text.partition("://")[2])
        return replace(_remote(text, protocol, options), request_timeout=request_timeout)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a disk of the operating system, and not behind fsspec."""
        return self.filesystem is None

    @property
    def is_object_store(self) -> bool:
        """Whether the folder is in an object store, which has no folders and whose puts are atomic."""
        return self.filesystem is not None and not OBJECT_STORES.isdisjoint(_protocols(self.filesystem))

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def identity(self) -> str:
        """A text that is the same for all locations of one folder. Local links are followed."""
        if self.filesystem is None:
            return os.path.realpath(self.path)
        return f"{_protocols(self.filesystem)[0]}://{self.path}"

    @property
    def parent(self) -> Location:
        """The location of the folder that contains this path."""
        head = self.path.rpartition("/")[0]
        return replace(self, url=self.url.rpartition("/")[0] or "/", path=head or ("/" if self.is_local else ""))

    def child(self, name: str) -> Location:
        """Return the location of the folder ``name`` in this folder."""
        return replace(self, url=_join(self.url, name), path=_join(self.path, name))

    def __str__(self) -> str:
        return self.url


def path_mismatch(verb: str, preposition: str, paths: Sequence[str], first: int = 0) -> str:
    """Return a sentence that names the path of each rank; "" if all ranks use the same path.

    Args:
        verb: what each rank does: "saves", for example.
        preposition: the word between verb and path: "to", for example.
        paths: the path of each rank.
        first: the rank of the first path. Default 0.
    """
    others = [f"rank {n} {preposition} {path}" for n, path in enumerate(paths, first) if path != paths[0]]
    if not others:
        return ""
    more = f", and {len(others) - 5} more" if len(others) > 5 else ""
    return (
        f"rank {first} {verb} {preposition} {paths[0]}, {', '.join(others[:5])}{more}. If these are not the same "
        "folder, pass the same path on all ranks"
    )


def _join(parent: str, name: str) -> str:
    return parent + name if parent.endswith("/") else f"{parent}/{name}"


def _protocols(filesystem: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    named = filesystem.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def _known_protocols() -> frozenset[str]:
    """Return fsspec's own protocols, and protocols that the program has registered."""
    return frozenset((*fsspec.available_protocols(), *registry))


def _protocol(text: str) -> str | None:
    """Return the protocol of a URL; None for a local path."""
    known = _known_protocols()
    if _is_chain(text):
        return text.partition("::")[0].partition("://")[0]
    match = _SCHEME.match(text)
    if match is not None and match[1] in known:
        return match[1]
    odd = match or _COLLAPSED.match(text)
    if odd is not None and (match is not None or odd[1] in known) and odd[1] not in _LOCAL:
        why = f"fsspec knows no protocol {odd[1]!r}" if match is not None else "a URL has '//' after its protocol"
        logger.warning("%r is used as a folder on the local disk, because %s", text, why)
    return None


def _is_chain(text: str) -> bool:
    """Return whether text is a chain of URLs, as fsspec defines them: ``simplecache::s3://bucket/run``, for example."""
    known = _known_protocols()
    first, *rest = text.split("::")
    if not rest:
        return False
    head = _SCHEME.match(first)
    return (first in known or (head is not None and head[1] in known)) and all(
        part in known or ((match := _SCHEME.match(part)) is not None and match[1] in known) for part in rest
    )


def _local(text: str) -> Location:
    path = os.path.expanduser(text)
    if not path:
        raise ValueError("the path is empty. Give the folder of the checkpoint")
    if not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path)
    # Where ".." follows a link, only the file system knows the parent folder.
    path = os.path.realpath(path) if ".." in path.split(os.sep) else os.path.normpath(path)
    return Location(path, path)


def _remote(text: str, protocol: str, options: dict[str, Any]) -> Location:
    if _is_chain(text):
        filesystem, path = url_to_fs(text, **options)
    else:
        kind = fsspec.get_filesystem_class(protocol)
        filesystem = kind(**{**kind._get_kwargs_from_urls(text), **options})
        path = str(kind._strip_protocol(text))
    root = getattr(filesystem, "root_marker", "")
    if root and not path.startswith(root):
        path = root + path
    head, separator, rest = text.partition("://")
    location = Location(head + separator + rest.rstrip("/"), path.rstrip("/"), filesystem)
    if location.is_object_store and not location.path:
        raise ValueError(f"{text!r} names no bucket. Write {protocol}://bucket/folder")
    return location
