"""Memory of async saves: copies reuse the memory of earlier copies, fit into free memory, and are freed at the end."""

import gc
import logging
import random
import resource

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.async_saves import DTYPES, agree, layouts, loaded, start
from support.meshes import mesh, put, random_bits, settle
from support.training import Training, compiled, on_host
from torch_xla_ckpt.device import access_of, xla
from torch_xla_ckpt.staging import capture as capturing
from torch_xla_ckpt.staging.capture import Capture

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MIB = 1 << 20


def taken(capture, state):
    return capture.take(state, lambda: None, xc.Timeline())


def end(captured):
    """Release the copies, as the end of a save does."""
    for snapshot in captured.snapshots:
        snapshot.release()


def assembled(snapshot):
    access = access_of(snapshot)
    layout = access.layout(snapshot)
    whole = torch.empty(layout.shape, dtype=layout.dtype)
    for part in sorted(set(layout.parts.values())):
        for box, data in access.fetch(snapshot, layout, part).items():
            whole[box.slices] = data
    return whole


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def large(number=4):
    """Tensors of 16 MiB."""
    return {str(n): put(torch.rand(2048, 2048), mesh((4, 2)), ("a", "b")) for n in range(number)}


# Mode "auto" and the free memory of virtual devices.


def test_auto_copies_on_virtual_devices_with_enough_free_memory(tmp_path):
    state = {"t": put(torch.rand(64, 64), mesh((8,)), ("a", None))}
    with xc.SPMDStager() as stager:
        handle = xc.async_save(state, tmp_path / "c", stager=stager)
        assert handle.choice.mode == "device" and "the device has free" in handle.choice.reason
    agree(loaded(tmp_path / "c"), on_host(state))


def test_auto_copies_to_the_host_if_a_copy_is_larger_than_the_free_memory(tmp_path, monkeypatch):
    state = {"t": put(torch.rand(2048, 2048), mesh((8,)), None)}  # replicated: 16 MiB on each of eight devices
    for left, mode in ((16 * MIB, "device"), (16 * MIB - 1, "host")):
        monkeypatch.setattr(xla, "memory_left", lambda left=left: left)
        with xc.SPMDStager() as stager:
            assert xc.async_save(state, tmp_path / "c", stager=stager).choice.mode == mode


def test_memory_kept_for_the_next_copy_counts_as_free(monkeypatch):
    state = large(1)
    capture = Capture("auto", None, 1 << 30, True, access_of)
    left = [2 * MIB]
    monkeypatch.setattr(xla, "memory_left", lambda: left[0])
    end(taken(capture, state))
    left[0] = 0  # all free memory is kept for the next copy now
    captured = taken(capture, state)
    assert captured.choice.mode == "device"
    agree({"0": assembled(captured.snapshots[0])}, on_host(state))


def test_one_warning_names_the_option_to_set_for_devices_that_report_no_memory(tmp_path, monkeypatch, caplog):
    state = {"t": put(torch.ones(8, 1024), mesh((8,)), ("a", None))}  # 4096 bytes on each device
    monkeypatch.setattr(xla, "memory_left", lambda: None)
    monkeypatch.setattr(capturing, "_warned", False)
    for n in range(2):
        with xc.SPMDStager() as stager:
            for m in range(2):
                xc.async_save(state, tmp_path / f"{n}{m}", stager=stager)
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    for words in ("device_memory_limit=", "4,096 bytes on each device", 'mode="host"', "blocks training"):
        assert words in warning.getMessage()


@pytest.mark.parametrize("options", [{"mode": "host"}, {"mode": "device"}, {"device_memory_limit": 1}])
def test_an_explicit_mode_or_limit_gets_no_warning(tmp_path, monkeypatch, caplog, options):
    monkeypatch.setattr(xla, "memory_left", lambda: None)
    monkeypatch.setattr(capturing, "_warned", False)
    with xc.SPMDStager(**options) as stager:
        xc.async_save({"t": put(torch.ones(8), mesh((8,)), ("a",))}, tmp_path / "c", stager=stager)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Copies on virtual devices overwrite earlier copies.


def test_a_copy_on_virtual_devices_touches_no_new_memory():
    state = large()  # 64 MiB: 16,384 pages
    capture = Capture("device", None, 4 * MIB, True, access_of)
    for number in range(5):
        with torch.no_grad():
            for tensor in state.values():
                tensor.add_(1)
        settle()
        before, graphs = faults(), compiled()
        captured = taken(capture, state)
        xm.wait_device_ops()
        touched = faults() - before
        if number > 1:
            assert touched < 1000 and compiled() == graphs
        agree({key: assembled(s) for key, s in zip(state, captured.snapshots)}, on_host(state))
        end(captured)


def test_a_copy_that_is_still_in_use_is_not_overwritten():
    state = {"t": put(torch.zeros(1024, 1024), mesh((4, 2)), ("a", "b"))}
    capture = Capture("device", None, MIB, True, access_of)
    held = []
    for number in range(6):
        with torch.no_grad():
            state["t"].fill_(number)
        held.append(taken(capture, state))
        if number % 2:
            end(held[number - 1])
        for before, captured in enumerate(held):
            if before == number or (number % 2 == 0 and before % 2) or before % 2:
                assert assembled(captured.snapshots[0]).eq(before).all()


def test_a_copy_that_a_fetch_still_reads_is_not_overwritten_after_its_save():
    state = {"t": put(torch.zeros(1024, 1024), mesh((4, 2)), ("a", "b"))}
    capture = Capture("device", None, 1 << 30, True, access_of)
    first = taken(capture, state)
    data = first.snapshots[0].data_or_raise()  # as a thread of a cancelled save still holds it
    end(first)
    with torch.no_grad():
        state["t"].fill_(1)
    second = taken(capture, state)
    layout = data.layout()
    assert all(shard.eq(0).all() for shard in data.fetch(0).values()) and layout.shape == (1024, 1024)
    assert assembled(second.snapshots[0]).eq(1).all()


@pytest.mark.parametrize("part_bytes", [1 << 30, 1 << 20])
def test_every_dtype_is_exact_in_a_copy_that_overwrites_another(part_bytes):
    on = mesh((2, 4))
    capture = Capture("device", None, part_bytes, True, access_of)
    for round_ in range(2):
        hosts = {str(dtype): random_bits((1024, 1024), dtype, n + round_) for n, dtype in enumerate(DTYPES)}
        state = {key: put(t, on, ((None, "b"), ("b", "a"), None)[n % 3]) for n, (key, t) in enumerate(hosts.items())}
        captured = taken(capture, state)
        with torch.no_grad():
            for tensor in state.values():
                tensor.zero_()
        torch_xla.sync()
        agree({key: assembled(s) for key, s in captured.state.items()}, hosts)
        end(captured)
        del state, captured


@settings(max_examples=30)
@given(st.lists(layouts(), min_size=1, max_size=3), st.integers(1, 200))
def test_any_layout_is_exact_in_a_copy_that_overwrites_another(cases, part_bytes):
    least, xla.copies._LEAST_KEPT = xla.copies._LEAST_KEPT, 0
    try:
        capture = Capture("device", None, part_bytes, True, access_of)
        for round_ in range(3):
            hosts, state = {}, {}
            for n, (shape, grid, order, spec) in enumerate(cases):
                hosts[str(n)] = random_bits(shape, torch.float32, n + 10 * round_)
                state[str(n)] = put(hosts[str(n)], mesh(grid, order), spec)
            settle()
            captured = taken(capture, state)
            for tensor in state.values():
                tensor.zero_()
            torch_xla.sync()
            agree({key: assembled(s) for key, s in captured.state.items()}, hosts)
            end(captured)
    finally:
        xla.copies._LEAST_KEPT = least


def test_tensors_that_share_data_get_separate_copies_every_time():
    t = put(torch.rand(1024, 1024), mesh((4, 2)), ("a", "b"))
    state = {"a": t, "b": t, "c": t.detach(), "d": t.view(-1)}
    capture = Capture("device", None, 1 << 30, True, access_of)
    for number in range(4):
        with torch.no_grad():
            t.add_(number)
        captured = taken(capture, state)
        agree({key: assembled(s) for key, s in captured.state.items()}, on_host(state))
        end(captured)


@pytest.mark.parametrize("max_pending", [1, 3])
@pytest.mark.parametrize("mode", ["auto", "device", "host"])
def test_each_of_twenty_saves_that_reuse_memory_holds_its_own_step(tmp_path, mode, max_pending, monkeypatch):
    monkeypatch.setattr(xla.copies, "_LEAST_KEPT", 0)
    training, chance, handles, step = Training(), random.Random(11), {}, 0
    with xc.SPMDStager(mode, part_bytes=4096, max_pending=max_pending) as stager:
        while len(handles) < 20:
            training.step()
            step += 1
            if step > 4 and chance.random() < 0.7:
                handles[step] = start("xc", training.state(), tmp_path / str(step), stager)
    replayed = Training()
    for number in range(1, step + 1):
        replayed.step()
        if number in handles:
            assert agree(loaded(tmp_path / str(number)), on_host(replayed.state()))


# Kept memory is bounded, and freed.


def kept_bytes(capture):
    kept = capture._kept
    on_devices = 0 if kept is None else kept.nbytes * 8
    storages = {s.untyped_storage() for shards in capture._fetched.values() for s in shards.values()}
    return on_devices + sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize("mode", ["device", "host"])
def test_at_most_one_copy_is_kept_and_none_after_close(mode):
    state = large()
    nbytes = sum(t.nbytes for t in state.values())
    with xc.SPMDStager(mode) as stager:
        capture = stager._capture
        several = [taken(capture, state) for _ in range(3)]  # as with max_pending=3
        while several:
            end(several.pop())
        gc.collect()
        assert kept_bytes(capture) == nbytes
        end(taken(capture, {"0": state["0"]}))  # a smaller state keeps less
        assert kept_bytes(capture) == nbytes // 4
        end(taken(capture, state))
        assert kept_bytes(capture) == nbytes
        last = taken(capture, state)
    assert kept_bytes(capture) == 0
    end(last)  # after close, its memory is freed
    assert kept_bytes(capture) == 0


@pytest.mark.parametrize("mode", ["device", "host"])
def test_no_memory_is_kept_without_reuse_buffers(mode):
    state = large(1)
    with xc.SPMDStager(mode, reuse_buffers=False) as stager:
        for _ in range(2):
            captured = taken(stager._capture, state)
            agree({"0": assembled(captured.snapshots[0])}, on_host(state))
            end(captured)
            assert kept_bytes(stager._capture) == 0


def test_kept_memory_is_freed_when_the_host_runs_short(monkeypatch):
    state = large(1)
    capture = Capture("auto", None, 1 << 30, True, access_of)
    end(taken(capture, state))
    assert kept_bytes(capture) == 16 * MIB
    monkeypatch.setattr(xla, "memory_left", lambda: -2 * MIB)
    captured = taken(capture, state)
    assert captured.choice.mode == "host" and capture._kept.nbytes == 0
    agree({"0": assembled(captured.snapshots[0])}, on_host(state))


def test_accelerators_keep_no_copies(monkeypatch):
    monkeypatch.setattr(xla, "keeps_copies", lambda: False)
    state = large(1)
    capture = Capture("device", None, 1 << 30, True, access_of)
    for _ in range(2):
        captured = taken(capture, state)
        agree({"0": assembled(captured.snapshots[0])}, on_host(state))
        end(captured)
    assert capture._kept is None


# Copies in host memory.


def test_a_host_copy_touches_no_new_memory():
    state = large()  # 16,384 pages, in shards that the allocator keeps on its heap
    capture = Capture("host", None, 16 * MIB, True, access_of)
    touched = []
    for _ in range(6):
        settle()
        before = faults()
        captured = taken(capture, state)
        touched.append(faults() - before)
        agree({key: assembled(s) for key, s in captured.state.items()}, on_host(state))
        end(captured)
        del captured
    assert min(touched[2:]) < 4000, touched
    assert not capture._buffers._free  # those buffers are for tensors of the program in host memory
