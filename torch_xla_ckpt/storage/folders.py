"""Choose the folder for a location: local or remote."""

from __future__ import annotations

from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage.files import LocalFolder
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.remote import RemoteFolder


def open_folder(location: Location, *, sync: bool = True) -> Folder:
    """Return the folder at a location.

    Args:
        location: the location of the folder.
        sync: fsync local files, so that they survive a power failure. Object stores always do. Default True.
    """
    if location.is_local:
        return LocalFolder(location.path, sync)
    return RemoteFolder(location)
