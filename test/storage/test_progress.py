"""Progress bars, and the report of a load."""

import contextlib
import fcntl
import os
import struct
import sys
import termios
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support.meshes import mesh, put, random_bits
from torch_xla_ckpt.storage import progress

base = random_bits((6, 8), torch.int8).float()


class Terminal:
    """A pseudo-terminal in the place of stderr."""

    def __init__(self, patched):
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 25, 80, 0, 0))
        self._out = os.fdopen(slave, "w")
        patched.setattr(sys, "stderr", self._out)
        self._seen = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(self._master, 4096):
                self._seen += data

    def shown(self):
        self._out.close()
        self._reader.join()
        os.close(self._master)
        return self._seen.decode()


WORK = {
    "saving": lambda path, shown: xc.save({"t": base}, path, progress=shown),
    "loading": lambda path, shown: xc.load({"t": torch.zeros_like(base)}, path, progress=shown),
    "verifying": lambda path, shown: xc.verify(path, progress=shown),
}
every_work = pytest.mark.parametrize("work", WORK)


@every_work
def test_progress_shows_a_bar_on_a_terminal_after_the_delay(work, tmp_path, monkeypatch):
    xc.save({"t": base}, tmp_path)

    def shown(wanted, delay):
        with monkeypatch.context() as patched:
            patched.setattr(progress, "_DELAY", delay)
            terminal = Terminal(patched)
            WORK[work](tmp_path, wanted)
            return terminal.shown()

    assert work in (bar := shown(True, 0.0)) and "100%" in bar
    assert shown(False, 0.0) == ""
    assert shown(True, progress._DELAY) == "", "it took no second"


@every_work
def test_progress_writes_no_bar_into_a_log(work, tmp_path, monkeypatch, capfd):
    xc.save({"t": base}, tmp_path)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    capfd.readouterr()
    WORK[work](tmp_path, True)
    assert capfd.readouterr() == ("", "")


@every_work
def test_progress_without_tqdm_fails_and_changes_nothing(work, tmp_path, monkeypatch):
    xc.save({"t": base + 1}, tmp_path)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(xc.CheckpointError, match=r"progress=True needs tqdm\. Install it"):
        WORK[work](tmp_path, True)
    target = {"t": torch.zeros_like(base)}
    xc.load(target, tmp_path)
    assert torch.equal(target["t"], base + 1)
    WORK[work](tmp_path, False)


def test_a_load_report_counts_bytes_and_seconds(tmp_path):
    host = random_bits((1024, 1024), torch.int32)
    xc.save({"t": host, "words": "w" * 1000}, tmp_path)
    target = {"t": put(torch.zeros_like(host), mesh((8,)), ("a", None)), "words": ""}
    start = time.perf_counter()
    report = xc.load(target, tmp_path)
    elapsed = time.perf_counter() - start
    assert host.nbytes + 1000 <= report.bytes_needed <= host.nbytes + 5000
    assert report.bytes_needed <= report.bytes_read <= host.nbytes + 9000
    assert min(report.plan_seconds, report.read_seconds, report.put_seconds) > 0
    assert report.seconds == pytest.approx(report.plan_seconds + report.read_seconds + report.put_seconds)
    assert elapsed - 0.05 <= report.seconds <= elapsed
    assert report.bytes_per_second == pytest.approx(report.bytes_needed / report.seconds)
    assert str(report).startswith(f"loaded 4 MiB in {report.seconds:.2f} s, ")
    assert f"plan {report.plan_seconds:.2f} s, read " in str(report) and str(report).split("\n")[0].endswith(
        "; read 4 MiB"
    )


def test_a_load_report_with_dcps_reader_has_no_byte_counts(tmp_path):
    xc.save({"t": base}, tmp_path)
    report = xc.load({"t": torch.zeros_like(base)}, storage_reader=dcp.FileSystemReader(tmp_path))
    assert report.bytes_needed is report.bytes_read is report.bytes_per_second is None
    assert str(report).startswith(f"loaded in {report.seconds:.2f} s (plan ")


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1023, 1024, 1 << 20, (1 << 30) - 1, 1 << 30, 5 << 40])
def test_a_load_report_prints_sizes_in_binary_units(nbytes):
    report = xc.LoadReport(nbytes, nbytes, 0.5, 0.25, 0.25)
    number, unit = str(report).split()[1:3]
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=0.005) and "e+" not in number
