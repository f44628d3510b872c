"""Saves onto a disk that is full, may not be written to, or lets no file grow: real ones.

``fork_server.py`` runs them.
"""

import contextlib
import ctypes
import errno
import multiprocessing
import os
import resource
import tempfile
from pathlib import Path

import pytest

import torch_xla_ckpt as xc
from support.crash_points import NEW, NEXT, OLD, checkpoint_files, loads, names, save

MIB = 1 << 20
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _REMOUNT, _REC, _PRIVATE = 1, 32, 16384, 1 << 18


def full_disk(folder):
    """A disk that gets full at any point of a save, be it at the last byte of the data or at the commit."""
    disk = _disk(Path(folder), 12 * MIB)
    path, filler = disk / "checkpoint", disk / "filler"
    save(OLD, path)
    page = os.sysconf("SC_PAGESIZE")
    sizes = [(path / name).stat().st_size for name in checkpoint_files(path) if name.endswith(".distcp")]
    data = sum(-(-size // page) * page for size in sizes)
    for room in (0, page, MIB, data - page, data, data + page):
        with open(filler, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * page - room)
        _refused(path, "No space left on device")
        filler.unlink()
    _goes_on(path)


def read_only_disk(folder):
    disk = _disk(Path(folder), 12 * MIB)
    path = disk / "checkpoint"
    save(OLD, path)
    _mount(None, disk, None, _REMOUNT | _RDONLY)
    _refused(path, "Read-only file system")
    with pytest.raises(xc.CheckpointError, match="Read-only file system"):
        save(NEW, disk / "another")
    assert loads(disk / "another") == "nothing"
    _mount(None, disk, None, _REMOUNT)
    _goes_on(path)


def file_size_limit(folder):
    """Python ignores SIGXFSZ, so the write that goes beyond the limit fails."""
    path = Path(folder) / "checkpoint"
    save(OLD, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, MIB, 4 * MIB):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with contextlib.ExitStack() as stack:
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
            _refused(path, "File too large")
    _goes_on(path)


def no_permission(folder):
    """A folder of somebody else; root has to become somebody for that, in a folder that everybody can reach."""
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        path = Path(shared) / "checkpoint"
        save(OLD, path)
        assert loads(path) == OLD  # imports what nobody else may import
        path.chmod(0o555)
        somebody = multiprocessing.get_context("fork").Process(target=_as_nobody, args=(path,))
        somebody.start()
        somebody.join(60)
        assert somebody.exitcode == 0
        path.chmod(0o755)


def _as_nobody(path):
    if not os.getuid():
        os.setgid(65534)
        os.setuid(65534)
    _refused(path, "Permission denied")


def _refused(path, reason):
    before = names(path)
    with pytest.raises(xc.CheckpointError, match=reason):
        save(NEW, path)
    assert names(path) == before
    assert loads(path) == OLD


def _goes_on(path):
    save(NEXT, path)
    assert names(path) == checkpoint_files(path)
    assert loads(path) == NEXT


def _disk(folder, size):
    """A small disk in memory, which only this process sees; skips where that is not permitted."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNS | (_NEWUSER if uid else 0)):
        pytest.skip(f"no disks may be mounted here: {os.strerror(ctypes.get_errno())}")
    if uid:
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _mount(None, Path("/"), None, _REC | _PRIVATE)
    _mount("tmpfs", folder, f"size={size}", 0)
    return folder


def _mount(kind, path, options, flags):
    libc = ctypes.CDLL(None, use_errno=True)
    kind, options = (text and text.encode() for text in (kind, options))
    if libc.mount(b"none", os.fsencode(path), kind, ctypes.c_ulong(flags), options):
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.EACCES):
            pytest.skip("no disks may be mounted here")
        raise OSError(number, os.strerror(number), str(path))
