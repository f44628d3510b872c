"""Async saves in both modes, by our call and by DCP's: they save the state of the call, and report their errors."""

import asyncio
import datetime
import json
import logging
import random
import re
import threading
import warnings
from concurrent.futures import TimeoutError

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.core.xla_model as xm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import torch_xla_ckpt as xc
from support.async_saves import DTYPES, agree, layouts, loaded, start
from support.meshes import mesh, put, random_bits, same_bits, settle, spec_of
from support.training import Training, compiled, on_host
from torch_xla_ckpt.device import Snapshot, access_of, xla
from torch_xla_ckpt.device.host import HostAccess
from torch_xla_ckpt.staging import Upload
from torch_xla_ckpt.staging.capture import Capture
from torch_xla_ckpt.staging.dcp_async import StagedState

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MODES = ("device", "host")
WAYS = ("xc", "dcp")


def values_of(path, *keys):
    """Load some keys of a checkpoint without a target."""
    found = dict.fromkeys(keys)
    xc.load(found, path)
    return found


class Gate(xc.ShardWriter):
    """Storage whose writes wait until ``opened`` is set, and then raise ``error`` if there is one."""

    def __init__(self, path, error=None, **options):
        super().__init__(path, sync=False, **options)
        self.reached, self.opened, self.error = threading.Event(), threading.Event(), error

    def write_data(self, plan, planner):
        self.reached.set()
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        return super().write_data(plan, planner)


# The copy.


@pytest.mark.parametrize("mode", MODES)
def test_each_of_fifteen_saves_during_training_holds_the_state_of_its_step(tmp_path, mode):
    training, chance = Training(), random.Random(7)
    expected, handles = {}, {}
    compiled_after = []
    step = 0
    with xc.SPMDStager(mode, part_bytes=4096) as stager:
        while len(handles) < 15:
            training.step()
            step += 1
            if step > 4 and chance.random() < 0.5:  # the compiler has settled on the shardings by then
                before = compiled()
                handles[step] = start(WAYS[step % 2], training.state(), tmp_path / str(step), stager)
                training.step()  # changes and donates everything at once
                step += 1
                compiled_after.append(compiled() - before)
                handles[step - 1].upload_completion.result(60) if chance.random() < 0.3 else None
    replayed = Training()
    for number in range(1, step + 1):
        replayed.step()
        if number in handles:
            expected[number] = on_host(replayed.state())
    for number, handle in handles.items():
        handle.upload_completion.result(0)
        assert agree(loaded(tmp_path / str(number)), expected[number])
    assert sum(compiled_after[2:]) == 0, compiled_after


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_changes_after_the_call_are_not_saved(tmp_path, mode, way):
    on = mesh((4, 2))
    state = {
        "tiled": put(torch.ones(8, 6), on, ("a", "b")),
        "replicated": put(torch.ones(5), on, None),
        "host": torch.ones(4),
        "view": torch.ones(4, 4)[1:3, 1:],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "numpy": np.ones(3),
        "list": [1, [2, 3]],
        "tuple": (1, [2], np.ones(2)),
        "nested": {"dict": {"a": 1}, "set": {1, 2}, "many": [torch.ones(2), {"x": 1}]},
        "bytes": bytearray(b"old"),
        "inside": (put(torch.ones(6), on, ("a",)), torch.ones(2)),
        "random": random.Random(3),
        "empty": {},
        "step": 7,
    }
    state["random"] = state["random"].getstate()
    expected = {
        "tiled": torch.ones(8, 6),
        "replicated": torch.ones(5),
        "host": torch.ones(4),
        "view": torch.ones(2, 3),
        "parameter": torch.ones(3),
    }
    gate = Gate(tmp_path / "c")
    with xc.SPMDStager(mode) as stager:
        handle = start(way, state, None, stager, gate)
        handle.staging_completion.result(0)  # done already
        for key in ("tiled", "replicated", "host", "view"):
            state[key].add_(1)
        with torch.no_grad():
            state["parameter"].add_(1)
            state["inside"][0].add_(1), state["inside"][1].add_(1)
        torch_xla.sync()
        state["numpy"] += 1
        state["list"][1].append(4)
        state["tuple"][1].append(5)
        state["tuple"][2][:] = 9
        state["nested"]["dict"]["b"] = 2
        state["nested"]["set"].add(3)
        state["nested"]["many"][0].add_(1)
        state["nested"]["many"][1]["x"] = 2
        state["nested"]["many"].append(torch.zeros(1))
        state["bytes"][:] = b"new"
        state["more"] = 1
        state["step"] = 8
        del state["empty"]
        gate.opened.set()
        handle.upload_completion.result(60)
    found = {key: torch.zeros(tensor.shape) for key, tensor in expected.items()}
    found |= dict.fromkeys(["numpy", "list", "tuple", "nested", "bytes", "inside", "random", "empty", "step"])
    xc.load(found, tmp_path / "c")
    for key, tensor in expected.items():
        assert same_bits(found[key], tensor), key
    assert np.array_equal(found["numpy"], np.ones(3)) and found["list"] == [1, [2, 3]]
    assert found["tuple"][:2] == (1, [2]) and np.array_equal(found["tuple"][2], np.ones(2))
    assert found["nested"]["dict"] == {"a": 1} and found["nested"]["set"] == {1, 2}
    assert torch.equal(found["nested"]["many"][0], torch.ones(2)) and found["nested"]["many"][1:] == [{"x": 1}]
    assert torch.equal(found["inside"][0], torch.ones(6)) and torch.equal(found["inside"][1], torch.ones(2))
    assert found["random"] == random.Random(3).getstate()
    assert found["bytes"] == b"old" and found["empty"] == {} and found["step"] == 7
    assert not any(key.startswith("more") for key in loaded(tmp_path / "c"))


@pytest.mark.parametrize("part_bytes", [1 << 30, 100])
@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_is_copied_exactly(tmp_path, mode, part_bytes):
    on = mesh((2, 4))
    hosts = {str(dtype): random_bits((8, 12), dtype, n) for n, dtype in enumerate(DTYPES)}
    state = {key: put(host, on, (None, "b") if n % 2 else ("b", "a")) for n, (key, host) in enumerate(hosts.items())}
    with xc.SPMDStager(mode, part_bytes=part_bytes) as stager:
        xc.async_save(state, tmp_path / "c", stager=stager).result(60)
    assert agree(loaded(tmp_path / "c"), hosts)


def test_a_dtype_that_torch_cannot_copy_is_saved(tmp_path):
    host = torch.arange(24, dtype=torch.uint8).view(4, 6).T.view(torch.float4_e2m1fn_x2)
    for reuse in (True, False):
        with xc.SPMDStager("host", reuse_buffers=reuse) as stager:
            saving = xc.async_save({"t": host}, tmp_path / str(reuse), stager=stager)
            saving.result(60)
        target = {"t": torch.zeros(6, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
        xc.load(target, tmp_path / str(reuse))
        assert torch.equal(target["t"].view(torch.uint8), host.view(torch.uint8))


@pytest.mark.parametrize("mode", [*MODES, None])
def test_a_dtype_that_torch_cannot_pickle_is_refused_by_key(tmp_path, mode):
    tensors = [torch.empty(6, dtype=dtype) for dtype in (torch.uint2, torch.int4, torch.uint7)]
    tensors.append(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))
    for tensor in tensors:
        with pytest.raises(xc.CheckpointError, match=rf"'layer\.w': .*{tensor.dtype}.* cannot be saved"):
            if mode is None:
                xc.save({"layer": {"w": tensor}}, tmp_path)
            else:
                with xc.SPMDStager(mode) as stager:
                    xc.async_save({"layer": {"w": tensor}}, tmp_path, stager=stager)


@settings(max_examples=60)
@given(st.lists(layouts(), min_size=1, max_size=3), st.integers(1, 200))
def test_any_layout_is_copied_exactly_in_parts_of_any_size(cases, part_bytes):
    hosts, state = {}, {}
    for n, (shape, grid, order, spec) in enumerate(cases):
        hosts[str(n)] = random_bits(shape, torch.float32, n)
        state[str(n)] = put(hosts[str(n)], mesh(grid, order), spec)
    settle()
    whole_everywhere = {key for key, tensor in state.items() if spec_of(tensor) in ("", "{replicated}")}
    capture = Capture("device", None, part_bytes, False, access_of)
    copied = capture.take(state, lambda: None, xc.Timeline()).state
    for tensor in state.values():
        tensor.zero_()
    torch_xla.sync()
    for key, host in hosts.items():
        layout = access_of(copied[key]).layout(copied[key])
        whole = torch.full(host.shape, 7.0)
        for part in sorted(set(layout.parts.values())):
            for box, data in access_of(copied[key]).fetch(copied[key], layout, part).items():
                whole[box.slices] = data
        assert same_bits(whole, host)
        if part_bytes < host.nbytes and key in whole_everywhere and host.numel() > 1:
            assert len(set(layout.parts.values())) > 1  # the tensor really has several parts


def test_no_more_than_part_bytes_are_fetched_at_a_time(tmp_path):
    on = mesh((4, 2))
    state = {
        "fully tiled": put(torch.rand(64, 64), on, ("a", "b")),
        "one dimension": put(torch.rand(64, 64), on, (None, "a")),
        "replicated": put(torch.rand(64, 64), on, None),
        "vector": put(torch.rand(4096), on, (("a", "b"),)),
    }
    with xc.SPMDStager("device", part_bytes=4096) as stager:
        handle = xc.async_save(state, storage_writer=xc.ShardWriter(tmp_path / "c"), stager=stager)
        handle.result(60)
    agree(loaded(tmp_path / "c"), on_host(state))
    copied = Capture("device", None, 4096, False, access_of).take(state, lambda: None, xc.Timeline()).state
    for key, snapshot in copied.items():
        access = access_of(snapshot)
        layout = access.layout(snapshot)
        parts = sorted(set(layout.parts.values()))
        assert len(parts) >= 4, key
        assert max(access.host_bytes(snapshot, layout, part) for part in parts) <= 4096, key


def test_a_save_changes_neither_random_numbers_nor_the_pending_step(tmp_path):
    def run(save):
        xm.set_rng_state(5)
        tensor = put(torch.zeros(64), mesh((8,)), ("a",))
        torch_xla.sync()
        drawn = []
        with xc.SPMDStager("device") as stager:
            for step in range(3):
                tensor.add_(torch.rand(64, device="xla"))  # not synced when the save begins
                if save:
                    xc.async_save({"t": tensor}, tmp_path / str(step), stager=stager)
                torch_xla.sync()
                drawn.append(tensor.cpu().clone())
        return drawn

    alone, beside = run(False), run(True)
    assert all(map(same_bits, alone, beside))
    for step in range(3):
        assert same_bits(loaded(tmp_path / str(step))["t"], alone[step])


# Modes.


def test_auto_copies_to_the_host_if_the_device_does_not_report_its_memory(tmp_path, caplog, monkeypatch):
    state = {"t": put(torch.ones(8, 1024), mesh((8,)), ("a", None))}  # 4096 bytes on each device
    monkeypatch.setattr(xla, "memory_left", lambda: None)
    caplog.set_level(logging.INFO, "torch_xla_ckpt")
    for limit, mode, reason in (
        (None, "host", "does not report its free memory"),
        (4095, "host", "a copy takes 4,096 bytes on each device, and device_memory_limit is 4,095"),
        (4096, "device", "a copy takes 4,096 bytes on each device, and device_memory_limit is 4,096"),
    ):
        caplog.clear()
        with xc.SPMDStager(device_memory_limit=limit) as stager:
            handle = xc.async_save(state, tmp_path / "c", stager=stager)
            assert handle.choice.mode == mode == stager.choice.mode and reason in handle.choice.reason
            assert f"copied in mode '{mode}'" in caplog.text and reason in caplog.text


def test_auto_copies_on_devices_that_report_enough_free_memory(tmp_path, monkeypatch):
    state = {"t": put(torch.ones(8, 1024), mesh((8,)), ("a", None))}
    for used, mode in ((10_000 - 4096, "device"), (10_000 - 4095, "host")):
        info = {"bytes_limit": 10_000, "bytes_used": 1, "peak_bytes_used": used}
        monkeypatch.setattr(xm, "get_memory_info", lambda info=info: info)
        with xc.SPMDStager() as stager:
            assert xc.async_save(state, tmp_path / "c", stager=stager).choice.mode == mode


def test_a_limit_splits_the_state_between_devices_and_host(tmp_path):
    hosts = {str(n): torch.rand(8, 128 * (n + 1)) for n in range(4)}  # 512 to 2048 bytes on each device
    state = {key: put(host, mesh((8,)), ("a", None)) for key, host in hosts.items()}
    with xc.SPMDStager("device", device_memory_limit=3000) as stager:
        handle = xc.async_save(state, tmp_path / "c", stager=stager)
        for tensor in state.values():
            tensor.zero_()
        torch_xla.sync()
        assert handle.choice.mode == "device" and "of 5,120 on each device, 2,560 were copied" in handle.choice.reason
    agree(loaded(tmp_path / "c"), hosts)


@pytest.mark.parametrize("reuse", [True, False])
def test_host_mode_reuses_memory_only_with_reuse_buffers(tmp_path, reuse):
    state = {"t": put(torch.rand(512, 1024), mesh((8,)), None)}  # 2 MiB
    at = []
    with xc.SPMDStager("host", reuse_buffers=reuse) as stager:
        for n in range(3):
            capture = stager._capture.take(state, lambda: None, xc.Timeline())
            (data,) = capture.snapshots[0].data_or_raise().fetch(0).values()
            at.append(data.data_ptr())
            held = [data] if n == 1 else []  # memory in use is not reused
            capture.snapshots[0].release()
            del data, capture
            agree({"t": held[0]} if held else {}, {"t": state["t"].cpu()} if held else {})
    assert (at[0] == at[1]) >= reuse


# Order of saves.


@pytest.mark.parametrize("way", WAYS)
def test_a_second_save_waits_for_a_slot_and_logs_it(tmp_path, caplog, way):
    caplog.set_level(logging.INFO, "torch_xla_ckpt")
    gate = Gate(tmp_path / "first")
    with xc.SPMDStager("host") as stager:
        first = start(way, {"t": torch.ones(3)}, None, stager, gate)
        assert gate.reached.wait(60)
        second = []
        thread = threading.Thread(
            target=lambda: second.append(start(way, {"t": torch.zeros(3)}, tmp_path / "second", stager))
        )
        thread.start()
        while "waits for a free slot" not in caplog.text:
            thread.join(0.05)
            assert thread.is_alive()
        assert f"1 of 1 saves are under way (max_pending), the oldest to {tmp_path / 'first'}" in caplog.text
        assert not first.upload_completion.done()
        gate.opened.set()
        thread.join(60)
        second[0].upload_completion.result(60)
        assert first.upload_completion.done()


def test_pending_saves_are_committed_in_order(tmp_path):
    gates = [Gate(tmp_path / str(n)) for n in range(4)]
    with xc.SPMDStager("host", max_pending=4) as stager:
        handles = [start(WAYS[n % 2], {"n": n}, None, stager, gate) for n, gate in enumerate(gates)]
        for number in (3, 2, 1):
            gates[number].opened.set()  # the storage of the later ones is ready first
        assert gates[0].reached.wait(60) and not any(gate.reached.is_set() for gate in gates[1:])
        gates[0].opened.set()
        for handle in handles:
            handle.upload_completion.result(60)
        times = [(tmp_path / str(n) / ".metadata").stat().st_mtime_ns for n in range(4)]
    assert times == sorted(times)


@pytest.mark.parametrize("save", ["xc.save", "dcp.save", "another stager", "stock writer"])
@pytest.mark.parametrize("way", WAYS)
def test_saves_to_one_path_run_one_after_the_other(tmp_path, way, save):
    path = tmp_path / "c"
    gate = Gate(path)

    def again():
        state = {"n": 2}
        if save == "xc.save":
            xc.save(state, f"file://{path}/")
        elif save == "dcp.save":
            dcp.save(state, storage_writer=xc.ShardWriter(path), planner=xc.SPMDSavePlanner())
        elif save == "stock writer":
            xc.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=True))
        else:
            with xc.SPMDStager("host") as other:
                xc.async_save(state, path, stager=other).result(60)

    with xc.SPMDStager("host") as stager:
        handle = start(way, {"n": 1}, None, stager, gate)
        assert gate.reached.wait(60)
        thread = threading.Thread(target=again)
        thread.start()
        xc.save({"n": 3}, tmp_path / "elsewhere")  # does not wait
        thread.join(0.3)
        assert thread.is_alive() and not (path / ".metadata").exists()
        gate.opened.set()
        thread.join(60)
        handle.upload_completion.result(60)
    assert values_of(path, "n") == {"n": 2}


def test_sync_and_async_saves_to_the_same_paths_mix_while_training(tmp_path):
    training, chance = Training(), random.Random(3)
    expected = {}
    with xc.SPMDStager("device", part_bytes=4096, max_pending=2) as stager:
        for step in range(40):
            training.step()
            path = tmp_path / str(step % 3)
            if chance.random() < 0.5:
                expected[path] = on_host(training.state())
                xc.save(training.state(), path)
            else:
                expected[path] = on_host(training.state())
                start(WAYS[step % 2], training.state(), path, stager)
    for path, state in expected.items():
        agree(loaded(path), state)


# Errors.


@pytest.mark.parametrize("way", WAYS)
def test_the_next_call_raises_the_error_of_a_save_only_if_nobody_read_it(tmp_path, way):
    xc.save({"n": 0}, tmp_path / "c")
    with xc.SPMDStager("host") as stager:
        for asked in ("result", "exception", None):
            gate = Gate(tmp_path / "c", OSError("no space left on device"))
            gate.opened.set()
            handle = start(way, {"n": 1}, None, stager, gate)
            text = "could not be saved: OSError: no space left on device"
            if asked == "result":
                with pytest.raises(xc.CheckpointError, match=text):
                    handle.upload_completion.result(60)
            elif asked == "exception":
                assert text in str(handle.upload_completion.exception(60))
        with pytest.raises(xc.CheckpointError, match=f"an earlier async save failed: .*{text}"):
            start(way, {"n": 2}, tmp_path / "c", stager)
        assert values_of(tmp_path / "c", "n") == {"n": 0}
        start(way, {"n": 2}, tmp_path / "c", stager).upload_completion.result(60)


@pytest.mark.parametrize("way", WAYS)
def test_close_raises_an_error_that_nobody_read(tmp_path, way, caplog):
    gate = Gate(tmp_path / "c", OSError("disk on fire"))
    gate.opened.set()
    with pytest.raises(xc.CheckpointError, match="disk on fire"), xc.SPMDStager("host") as stager:
        start(way, {"n": 1}, None, stager, gate)
    assert f"the async save to {tmp_path / 'c'} failed" in caplog.text
    stager.close()  # raises the error only once
    with pytest.raises(xc.CheckpointError, match="the stager is closed"):
        start(way, {"n": 1}, tmp_path / "c", stager)


def test_an_error_of_the_block_is_raised_before_an_error_of_a_save(tmp_path, caplog):
    gate = Gate(tmp_path / "c", OSError("disk on fire"))
    gate.opened.set()
    with pytest.raises(ZeroDivisionError), xc.SPMDStager("host") as stager:
        xc.async_save({"n": 1}, storage_writer=gate, stager=stager)
        raise ZeroDivisionError
    assert "disk on fire" in caplog.text


def test_a_wait_that_times_out_does_not_count_as_reading_the_error(tmp_path):
    gate = Gate(tmp_path / "c", OSError("disk on fire"))
    with xc.SPMDStager("host") as stager:
        handle = xc.async_save({"n": 1}, storage_writer=gate, stager=stager)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        assert not handle.done()
        gate.opened.set()
        with pytest.raises(xc.CheckpointError, match="disk on fire"):
            stager.wait()
        stager.wait()


@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_cannot_be_copied_is_an_error_of_the_call(tmp_path, way):
    bad = {
        "lock": (threading.Lock(), "'bad.lock'"),
        "meta": (torch.ones(2, device="meta"), "'bad.meta'.*no data"),
        "sparse": (torch.ones(2, 2).to_sparse(), "'bad.sparse'.*sparse"),
    }
    with xc.SPMDStager("device") as stager:
        for key, (value, text) in bad.items():
            with pytest.raises(xc.CheckpointError, match=text):
                start(
                    way, {"fine": put(torch.ones(8), mesh((8,)), ("a",)), "bad": {key: value}}, tmp_path / "c", stager
                )
        start(way, {"n": 1}, tmp_path / "c", stager).upload_completion.result(60)


class Odd(dict):
    """A mapping that another thread changes while it is listed."""

    def items(self):
        yield "a", 1
        raise RuntimeError("dictionary changed size during iteration")


class Raising:
    """An object whose own methods fail when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Loader:
    def state_dict(self):
        raise OSError("the loader's file is gone")

    def load_state_dict(self, state):
        raise AssertionError


class Unfetched(HostAccess):
    def fetch(self, tensor, layout, part=0):
        raise RuntimeError("async operation is in flight")


class Unknown(HostAccess):
    def layout(self, tensor):
        raise RuntimeError("no sharding")


@pytest.mark.parametrize("way", [*WAYS, "save"])
def test_an_error_while_copying_names_the_key_the_cause_and_the_remedy(tmp_path, way):
    xc.save({"n": 0}, tmp_path / "c")
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    cases = [
        *(
            (Raising(error), type(error), "Put plain data")
            for error in (ValueError("v"), RuntimeError("r"), OSError("o"))
        ),
        (Raising(MemoryError()), MemoryError, "Put plain data"),
        (freed, None, "memory was freed .*400 bytes, and its storage has 0"),
        (torch.ones(1).expand(10**14), (RuntimeError, MemoryError), "400,000,000,000,000|tensor.cpu()"),
        (Odd(a=1), RuntimeError, "pass a copy"),
    ]
    if way != "dcp":  # DCP calls state_dict before the stager
        cases.append((Loader(), OSError, "Nothing was saved"))
    for bad, cause, remedy in cases:
        state = {"fine": torch.ones(2), "bad": bad}
        with (
            pytest.raises(xc.CheckpointError, match=rf"'bad'(.|\n)*({remedy})") as raised,
            xc.SPMDStager("host") as stager,
        ):
            if way == "save":
                xc.save(state, tmp_path / "c")
            else:
                start(way, state, tmp_path / "c", stager).upload_completion.result(60)
        causes = [raised.value]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        assert cause is None or isinstance(causes[-1], cause), (bad, causes)
        assert values_of(tmp_path / "c", "n") == {"n": 0}


@pytest.mark.parametrize("access, text", [(Unfetched, "in flight"), (Unknown, "no sharding")])
def test_a_tensor_that_cannot_be_read_is_named_with_its_key(tmp_path, access, text):
    state = {"layer": {"w": torch.ones(2)}}
    named = rf"'layer\.w': a tensor of torch.float32 and shape \(2,\) on cpu .*RuntimeError: .*{text}.*tensor.cpu\(\)"
    for way in WAYS:
        with xc.SPMDStager("host", access=lambda _: access()) as stager:
            with pytest.raises(xc.CheckpointError, match=named) as raised:
                start(way, state, tmp_path / "c", stager).upload_completion.result(60)
            assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(dcp.api.CheckpointException) as failed:
        dcp.save(state, checkpoint_id=tmp_path / "c", planner=xc.SPMDSavePlanner(access=lambda _: access()))
    assert re.search(named, str(failed.value))


@pytest.mark.parametrize("way", WAYS)
def test_devices_that_cannot_hold_the_copy_are_an_error_with_the_options_to_change(tmp_path, monkeypatch, way):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(xla, "copy_on_devices", full)
    with xc.SPMDStager("device") as stager:
        with pytest.raises(xc.CheckpointError, match=r"on its devices.*'t'.*RESOURCE_EXHAUSTED.*mode='host'") as raised:
            start(way, {"t": put(torch.ones(8), mesh((8,)), ("a",))}, tmp_path / "c", stager)
        assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_save_leaves_the_previous_checkpoint(tmp_path, way):
    xc.save({"t": torch.zeros(4)}, tmp_path / "c")
    before = sorted(file.name for file in (tmp_path / "c").iterdir())
    gate = Gate(tmp_path / "c")
    stager = xc.SPMDStager("host", max_pending=2)
    handles = [start(way, {"t": torch.ones(4)}, None, stager, gate)]
    assert gate.reached.wait(60)
    handles.append(start(way, {"t": torch.ones(4)}, tmp_path / "d", stager))
    closing = threading.Thread(target=lambda: stager.close(cancel=True))
    closing.start()
    while not all(save.is_cancelled for save in stager._saves):
        closing.join(0.01)
    gate.opened.set()
    closing.join(60)
    for handle in handles:
        with pytest.raises(xc.CheckpointError, match="the save was cancelled"):
            handle.upload_completion.result(0)
    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == before
    assert not (tmp_path / "d").exists() or not list((tmp_path / "d").iterdir())


def test_an_interrupt_before_dcp_hands_its_save_over_loses_only_that_save(tmp_path, monkeypatch):
    done = StagedState.done

    def interrupted(self):
        raise KeyboardInterrupt

    with xc.SPMDStager("host") as stager:
        monkeypatch.setattr(StagedState, "done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start("dcp", {"n": 1}, tmp_path / "c", stager)
        monkeypatch.setattr(StagedState, "done", done)
        start("dcp", {"n": 2}, tmp_path / "c", stager).upload_completion.result(60)
    assert values_of(tmp_path / "c", "n") == {"n": 2}


def test_another_planner_is_refused_and_the_error_names_the_right_one(tmp_path):
    with xc.SPMDStager("host") as stager:
        for state in ({"t": torch.ones(3)}, {"n": [1]}):
            handle = dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager)
            with pytest.raises(xc.CheckpointError, match=r"only .*SPMDSavePlanner.* Pass planner=SPMDSavePlanner"):
                handle.upload_completion.result(60)


# Resources.


def test_snapshots_are_released_when_the_save_has_ended(tmp_path):
    state = {"t": put(torch.rand(64, 64), mesh((8,)), ("a", None))}
    with xc.SPMDStager("device") as stager:
        planner = xc.SPMDSavePlanner()  # the caller keeps it
        dcp.async_save(
            state, checkpoint_id=tmp_path / "c", planner=planner, async_stager=stager
        ).upload_completion.result(60)
        stager.wait()
        (held,) = planner._tensors.values()
        assert isinstance(held.tensor, Snapshot)
        with pytest.raises(xc.CheckpointError, match="a snapshot can be saved once"):
            held.tensor.data_or_raise()


def test_threads_end_with_their_stager_and_log_levels_stay(tmp_path):
    levels = {name: logging.getLogger(name).level for name in ("", "torch_xla_ckpt", "torch", "torch_xla")}
    before = set(threading.enumerate())
    with xc.SPMDStager("device") as stager:
        xc.async_save({"t": torch.ones(3)}, tmp_path / "c", stager=stager)
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith(("SPMD", "Shard"))]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)
    assert levels == {name: logging.getLogger(name).level for name in levels}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 3])
def test_dcps_own_writer_saves_the_copy(tmp_path, mode, threads):
    training = Training()
    training.step()
    expected = on_host(training.state())
    with xc.SPMDStager(mode, part_bytes=4096) as stager:
        for way in WAYS:
            writer = dcp.FileSystemWriter(tmp_path / way, thread_count=threads)
            start(way, training.state(), None, stager, writer).upload_completion.result(60)
            agree(loaded(tmp_path / way), expected)


def test_states_of_any_kind_are_saved_without_a_process_group(tmp_path):
    class Late:
        def state_dict(self):
            return {"x": torch.ones(2), "n": 3}

        def load_state_dict(self, state):
            raise AssertionError

    with xc.SPMDStager() as stager:
        for n, state in enumerate(({}, {"a": 1}, {"when": datetime.datetime(2026, 1, 2)}, {"late": Late()})):
            handle = xc.async_save(state, tmp_path / str(n), stager=stager, step=n, user_metadata={"n": n})
            handle.result(60)
            (manifest,) = (tmp_path / str(n)).glob("manifest-*.json")
            assert json.loads(manifest.read_bytes())["step"] == n
        assert flatten_state_dict(loaded(tmp_path / "3"))[0].keys() == {"late.x", "late.n"}


def test_impossible_options_are_refused():
    for options in ({"mode": "gpu"}, {"part_bytes": 0}, {"max_pending": 0}, {"device_memory_limit": -1}):
        with pytest.raises(ValueError):
            xc.SPMDStager(**options)


def test_the_upload_future_can_be_awaited(tmp_path):
    async def run():
        with xc.SPMDStager() as stager:
            handle = xc.async_save({"n": 1}, tmp_path / "c", stager=stager)
            assert isinstance(handle.upload_completion, Upload)
            return await asyncio.wrap_future(handle.upload_completion)

    assert asyncio.run(run()).storage_meta.save_id


def test_the_timeline_has_every_thread_and_its_trace_is_valid(tmp_path):
    state = {str(n): put(torch.rand(512, 1024), mesh((8,)), ("a", None)) for n in range(4)}
    with xc.SPMDStager("device") as stager:
        handle = xc.async_save(state, tmp_path / "c", stager=stager)
        handle.result(60)
    seconds = handle.timeline.seconds()
    assert {"copy on devices", "fetch", "write", "commit"} <= seconds.keys()
    handle.timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    fetched = [event for event in events if event["name"] == "fetch"]
    assert {lanes[event["tid"]] for event in fetched} == {"SPMDStager"}
    assert sum(event["args"]["bytes"] for event in fetched) == 4 * 2 << 20
    assert {name.partition("-")[0] for name in lanes.values()} == {"MainThread", "SPMDStager", "ShardWriter"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    warnings.resetwarnings()
    settle()
