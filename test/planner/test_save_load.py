"""Saving and loading in one process: every kind of value, other meshes, and every way that DCP offers."""

import dataclasses
import datetime
import enum
import logging
import pathlib
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC

import torch_xla_ckpt as xc
from support import interpreters
from support.meshes import holds, mesh, put, random_bits, same_bits, settle, spec_of


def chunks(folder, key):
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[key]
    return sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks)


WAYS = {
    "xc": (xc.save, xc.load),
    "dcp": (
        lambda state, path: dcp.save(state, checkpoint_id=path, planner=xc.SPMDSavePlanner()),
        lambda state, path: dcp.load(state, checkpoint_id=path, planner=xc.SPMDLoadPlanner()),
    ),
    "no_dist": (
        lambda state, path: dcp.save(state, checkpoint_id=path, planner=xc.SPMDSavePlanner(), no_dist=True),
        lambda state, path: dcp.load(state, checkpoint_id=path, planner=xc.SPMDLoadPlanner(), no_dist=True),
    ),
    "four threads": (
        lambda state, path: xc.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=4)),
        lambda state, path: xc.load(state, storage_reader=dcp.FileSystemReader(path)),
    ),
    "two files, unsynced": (
        lambda state, path: xc.save(
            state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False, sync_files=False)
        ),
        lambda state, path: xc.load(state, storage_reader=dcp.FileSystemReader(path)),
    ),
    "fsspec": (
        lambda state, path: xc.save(state, f"file://{path}"),
        lambda state, path: xc.load(state, f"file://{path}"),
    ),
    "memory": (
        lambda state, path: xc.save(state, f"memory://{path}"),
        lambda state, path: xc.load(state, f"memory://{path}"),
    ),
}

# Shape, spec on a mesh with axes a and b; None is unmarked.
TENSORS = {
    "tiled": ((8, 6), ("a", "b")),
    "tiled_padded": ((7, 5), ("a", "b")),
    "two_axes_on_one": ((17,), (("a", "b"),)),
    "axes_swapped": ((6, 9), ("b", "a")),
    "partly_replicated": ((10, 3), ("a", None)),
    "partly_replicated_other": ((3, 10), (None, "b")),
    "empty_shards": ((3, 4), (("a", "b"), None)),
    "replicated": ((5, 3), (None, None)),
    "unmarked": ((5, 3), None),
    "scalar": ((), None),
    "empty": ((0, 3), None),
    "empty_marked": ((0, 4), ("a", None)),
    "five_dims": ((2, 3, 5, 2, 4), (None, "b", "a", None, None)),
    "one_element": ((1, 1), ("a", "b")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [((4, 2), (2, 4)), ((2, 4), (8, 1)), ((8, 1), (1, 8))], ids=str)
def test_every_layout_survives_every_way_of_saving(way, sizes, tmp_path):
    save, load = WAYS[way]
    before = mesh(sizes[0], order=[3, 1, 4, 0, 5, 2, 6, 7])
    after = mesh(sizes[1])
    hosts = {key: random_bits(shape, torch.float32, n) for n, (key, (shape, _)) in enumerate(TENSORS.items())}
    state = {"model": {key: put(host, before, TENSORS[key][1]) for key, host in hosts.items()}, "step": 7}
    state["host"] = [random_bits((3, 4), torch.bfloat16), random_bits((6, 4), torch.float64)[::2, 1:].t()]
    save(state, str(tmp_path / "ckpt"))
    target = {"model": {key: put(torch.zeros_like(host), after, TENSORS[key][1]) for key, host in hosts.items()}}
    target["step"] = 0
    target["host"] = [torch.zeros((3, 4), dtype=torch.bfloat16), torch.zeros((3, 3), dtype=torch.float64).t()]
    specs = {key: spec_of(tensor) for key, tensor in target["model"].items()}
    load(target, str(tmp_path / "ckpt"))
    for key, host in hosts.items():
        assert holds(target["model"][key], host), key
        # A tensor never marked may be called replicated after its first sync; else the sharding is the target's own.
        assert spec_of(target["model"][key]) in (specs[key], specs[key] or "{replicated}"), key
    assert target["step"] == 7
    for loaded, saved in zip(target["host"], state["host"]):
        assert same_bits(loaded, saved)


def test_replicas_are_written_once_and_loaded_to_every_device(tmp_path):
    host = random_bits((8, 6), torch.float32)
    xc.save({"t": put(host, mesh((4, 2)), ("a", None))}, tmp_path)
    assert chunks(tmp_path, "t") == [((2 * n, 0), (2, 6)) for n in range(4)]
    target = {"t": put(torch.zeros(8, 6), mesh((2, 4)), (None, "a"))}
    xc.load(target, tmp_path)
    assert holds(target["t"], host)


def test_sharding_chosen_by_the_compiler_is_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(torch_xla.device())
    on = mesh((4, 2))
    xs.mark_sharding(model.weight, on, ("a", "b"))
    optim = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(16, 8, device=torch_xla.device())).square().sum().backward()
        optim.step()
        optim.zero_grad()
        torch_xla.sync()
    assert "last_tile_dim_replicate" in spec_of(model.bias), "nobody marked the bias: the compiler did"
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    expected = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    moments = {n: slot["exp_avg"].cpu() for n, slot in optim.state_dict()["state"].items()}
    xc.save(state, tmp_path)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(slot["exp_avg"] for slot in optim.state.values())]:
            tensor.zero_()
    for slot in optim.state.values():
        slot["step"].zero_()
    target = {"model": model.state_dict(), "optim": optim.state_dict()}
    target["optim"]["param_groups"][0]["lr"] = 99
    xc.load(target, tmp_path)
    for key, value in expected.items():
        assert holds(model.state_dict()[key], value), key
    for n, slot in optim.state_dict()["state"].items():
        assert holds(slot["exp_avg"], moments[n]) and slot["step"] == 3
    assert target["optim"]["param_groups"] == optim.state_dict()["param_groups"]


def test_loading_into_a_state_dict_changes_the_parameters_of_the_model(tmp_path):
    """state_dict() returns detached aliases. The model must compute with the data that is loaded into them."""
    model = torch.nn.Linear(6, 5).to(torch_xla.device())
    xs.mark_sharding(model.weight, mesh((4, 2)), ("a", "b"))
    weight, bias = random_bits((5, 6), torch.int8).float(), random_bits((5,), torch.int8).float()
    xc.save({"weight": weight, "bias": bias}, tmp_path)
    xc.load(model.state_dict(), tmp_path)
    out = model(torch.ones(2, 6, device=torch_xla.device()))
    assert torch.equal(out.detach().cpu(), torch.nn.functional.linear(torch.ones(2, 6), weight, bias))
    assert model.weight.requires_grad and holds(model.weight, weight) and holds(model.bias, bias)


def test_saving_and_loading_draw_no_random_numbers(tmp_path):
    """Every sync changes the device's seed. Dropout after a save must be the same as without the save."""

    def draws(checkpoint):
        xm.set_rng_state(7)
        drawn = [torch.rand(8, device=torch_xla.device())]
        if checkpoint:
            state = {"t": put(torch.ones(8, 4), mesh((4, 2)), ("a", "b")), "c": torch.ones(2).to(torch_xla.device())}
            xc.save(state, tmp_path)
            xc.load(state, tmp_path)
        drawn += [torch.rand(8, device=torch_xla.device()) for _ in range(2)]
        return torch.stack([tensor.cpu() for tensor in drawn]), xm.get_rng_state()

    without, with_one = draws(False), draws(True)
    assert torch.equal(without[0], with_one[0])
    assert len(set(with_one[0].flatten().tolist())) == 24


VIEWS = {
    "slice": lambda t: t[2:6],
    "column": lambda t: t[:, 1],
    "transposed": lambda t: t.t(),
    "reshaped": lambda t: t.reshape(6, 8),
    "detached": lambda t: t.detach(),
}


@pytest.mark.parametrize("spec", [("a", "b"), ("a", None), (None, None), None], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_loading_into_a_view_changes_its_base(view, spec, tmp_path):
    host = random_bits((8, 6), torch.float32)
    base = put(host.clone(), mesh((4, 2)), spec)
    settle()
    target = {"view": view(base)}
    new = random_bits(target["view"].shape, torch.float32, seed=1)
    xc.save({"view": new}, tmp_path)
    xc.load(target, tmp_path)
    view(host).copy_(new)
    assert holds(target["view"], new) and holds(base, host)


def test_training_after_a_load_keeps_replicas_equal(tmp_path):
    """Replicas share one host buffer during the load. Updates in place must change neither it nor other replicas."""
    host = random_bits((8, 6), torch.int32)
    xc.save({"t": host}, tmp_path)
    target = {"t": put(torch.zeros(8, 6, dtype=torch.int32), mesh((2, 4)), ("a", None))}
    xc.load(target, tmp_path)
    for n in range(3):
        target["t"].add_(n)
        settle()
    assert holds(target["t"], host + 3)


def test_pending_computation_is_awaited(tmp_path):
    a = put(torch.arange(12.0).reshape(3, 4), mesh((4, 2)), ("a", "b"))
    xc.save({"t": (a + 1) * 2, "view": a[1:, ::2], "transposed": a.t()}, tmp_path)
    expected = torch.arange(12.0).reshape(3, 4)
    target = {"t": torch.zeros(3, 4), "view": torch.zeros(2, 2), "transposed": torch.zeros(4, 3)}
    xc.load(target, tmp_path)
    assert same_bits(target["t"], (expected + 1) * 2)
    assert same_bits(target["view"], expected[1:, ::2].contiguous())
    assert same_bits(target["transposed"], expected.t().contiguous())


def test_pending_targets_are_filled(tmp_path):
    xc.save({"t": torch.arange(12.0).reshape(3, 4)}, tmp_path)
    pending = put(torch.zeros(3, 4), mesh((4, 2)), ("a", "b")) + 1
    xc.load({"t": pending}, tmp_path)
    assert holds(pending, torch.arange(12.0).reshape(3, 4))


def test_wrapped_tensors_and_parameters_are_saved_and_loaded(tmp_path):
    host = random_bits((6, 4), torch.float32)
    wrapped = xs.mark_sharding(host.to(torch_xla.device()), mesh((2, 4)), ("a", "b"))
    assert isinstance(wrapped, xs.XLAShardedTensor)
    parameter = torch.nn.Parameter(put(host, mesh((4, 2)), ("a", None)))
    xc.save({"wrapped": wrapped, "parameter": parameter}, tmp_path)
    target = {
        "wrapped": torch.nn.Parameter(put(torch.zeros(6, 4), mesh((4, 2)), (None, "b"))),
        "parameter": xs.mark_sharding(torch.zeros(6, 4).to(torch_xla.device()), mesh((8,)), ("a", None)),
    }
    xc.load(target, tmp_path)
    assert holds(target["wrapped"], host) and holds(target["parameter"], host)


def test_two_keys_with_one_tensor_are_both_restored(tmp_path):
    tied = put(random_bits((6, 4), torch.float32), mesh((4, 2)), ("a", "b"))
    xc.save({"embed": tied, "head": tied}, tmp_path)
    target = {key: put(torch.zeros(6, 4), mesh((2, 4)), ("a", None)) for key in ("embed", "head")}
    xc.load(target, tmp_path)
    assert holds(target["embed"], tied.cpu()) and holds(target["head"], tied.cpu())
    xc.load({"embed": tied, "head": tied}, tmp_path)
    assert holds(tied, random_bits((6, 4), torch.float32))


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Progress:
    position: int
    seen: tuple


def objects():
    return {
        "numbers": {"int": 5, "float": 0.1, "none": None, "text": "x", "flag": True},
        "list": [1, "two", None],
        "nested": [{"a": 1}, [2, {"b": 3}]],
        "tuple": (1, (2, [3])),
        "numpy": {"scalar": np.float32(1.5), "array": np.arange(6).reshape(2, 3)},
        "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "path": pathlib.PurePosixPath("a/b"),
        "python_rng": random.Random(3).getstate(),
        "torch_rng": torch.Generator().manual_seed(3).get_state(),
        "xla_rng": xm.get_rng_state(),
        "own": {"enum": Colour.RED, "dataclass": Progress(3, (1, 2))},
        "state": {0: {1: {"step": 2}}},
    }


def test_loaded_objects_equal_saved_objects(tmp_path):
    state = objects()
    xc.save(state, tmp_path)
    blank = objects()
    blank["numbers"] = dict.fromkeys(blank["numbers"])
    blank["numpy"] = {"scalar": None, "array": None}
    blank["list"], blank["tuple"], blank["time"], blank["own"] = None, None, None, {"enum": None, "dataclass": None}
    blank["nested"] = [{"a": 0}, [0, {"b": 0}]]
    blank["state"][0][1]["step"] = 0
    blank["torch_rng"] = torch.zeros_like(state["torch_rng"])
    xc.load(blank, tmp_path, allow_types=[Colour, Progress])
    assert (blank["numpy"].pop("array") == state["numpy"].pop("array")).all()
    assert same_bits(blank.pop("torch_rng"), state.pop("torch_rng"))
    assert blank == state


def test_no_object_is_set_if_one_object_is_refused(tmp_path):
    xc.save({"step": 5, "own": Colour.RED, "t": torch.ones(2)}, tmp_path)
    target = {"step": 1, "own": None, "t": torch.zeros(2)}
    with pytest.raises(xc.UnsafeObjectError, match=r"'own'.*test_save_load.Colour"):
        xc.load(target, tmp_path)
    assert target["step"] == 1 and target["own"] is None and target["t"].sum() == 0


def test_tensors_in_a_tuple_are_loaded_in_place_and_keep_their_sharding(tmp_path):
    host = random_bits((7, 4), torch.float32)
    xc.save({"pair": (put(host, mesh((4, 2)), ("a", "b")), put(host, mesh((4, 2)), None), 3)}, tmp_path)
    tiled = put(torch.zeros(7, 4), mesh((2, 4)), ("a", None))
    target = {"pair": (tiled, put(torch.zeros(7, 4), mesh((2, 4)), None), 0)}
    xc.load(target, tmp_path)
    assert target["pair"][0] is tiled and target["pair"][2] == 3
    assert holds(target["pair"][0], host) and holds(target["pair"][1], host)
    stock = {"pair": None}
    dcp.load(stock, checkpoint_id=tmp_path)
    assert same_bits(stock["pair"][0], host) and stock["pair"][0].device.type == "cpu"


def test_a_stateful_is_saved_and_loaded(tmp_path):
    class Loader:
        def __init__(self, position):
            self.position, self.moments = position, put(torch.full((8,), float(position)), mesh((8,)), ("a",))

        def state_dict(self):
            return {"position": self.position, "moments": self.moments}

        def load_state_dict(self, state):
            self.position = state["position"]

    xc.save({"loader": Loader(41)}, tmp_path)
    loader = Loader(0)
    xc.load({"loader": loader}, tmp_path)
    assert loader.position == 41 and holds(loader.moments, torch.full((8,), 41.0))


# Loading: all checks come before the first read, and every tensor is moved once.


def test_all_mismatches_are_listed_at_once_and_nothing_is_loaded(tmp_path):
    xc.save({"m": {"a": torch.ones(4), "b": torch.ones(2, 3), "c": torch.ones(2), "d": 5}}, tmp_path)
    on = mesh((4, 2))
    target = {
        "m": {
            "a": put(torch.zeros(4), on, ("a",)),
            "b": put(torch.zeros(3, 3), on, ("a", "b")),
            "c": 1,
            "d": torch.zeros(2),
            "e": put(torch.zeros(2), on, None),
        }
    }
    with pytest.raises(xc.MismatchError) as caught:
        xc.load(target, tmp_path)
    found = {mismatch.key: mismatch.kind for mismatch in caught.value.mismatches}
    assert found == {"m.b": "shape", "m.c": "type", "m.d": "type", "m.e": "missing"}
    assert "(3, 3)" in str(caught.value) and "(2, 3)" in str(caught.value) and "m.e" in str(caught.value)
    assert holds(target["m"]["a"], torch.zeros(4))


@pytest.mark.parametrize("saved, target", [((4, 4), (2, 4)), ((4, 4), (8, 4)), ((4, 4), (16,)), ((), (1,))])
def test_tensor_of_another_shape_is_refused(saved, target, tmp_path):
    xc.save({"t": torch.ones(saved)}, tmp_path)
    with pytest.raises(xc.MismatchError, match="t: target has a tensor of shape"):
        xc.load({"t": put(torch.zeros(target), mesh((8,)), None)}, tmp_path)


def test_shape_keep_keeps_sharded_tensors_and_loads_the_others(tmp_path):
    xc.save(
        {"m": {"body": torch.ones(8, 4), "head": torch.ones(8, 4)}, "o": {"state": {0: torch.ones(8, 4)}}}, tmp_path
    )
    on = mesh((4, 2))
    target = {
        "m": {name: put(torch.zeros(shape), on, ("a", "b")) for name, shape in (("body", (8, 4)), ("head", (3, 4)))},
        "o": {"state": {0: put(torch.full((3, 4), 2.0), on, ("b", None))}},
    }
    report = xc.load(target, tmp_path, shape="keep")
    assert report.kept == ("m.head", "o.state.0") and report.loaded == ("m.body",)
    assert holds(target["m"]["body"], torch.ones(8, 4)) and holds(target["m"]["head"], torch.zeros(3, 4))
    assert holds(target["o"]["state"][0], torch.full((3, 4), 2.0))


def test_warnings_name_casts_and_keys_that_were_left_out(tmp_path, caplog):
    xc.save({"m": {"a": torch.ones(4), "b": torch.ones(2)}, "other": 3}, tmp_path)
    target = {"m": {"a": put(torch.zeros(4, dtype=torch.bfloat16), mesh((8,)), ("a",))}}
    with caplog.at_level(logging.WARNING, logger="torch_xla_ckpt"):
        xc.load(target, tmp_path, unexpected="warn")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("torch_xla_ckpt")]
    assert len(said) == 2
    assert "m.a (torch.float32 -> torch.bfloat16)" in said[0] and "m.b" in said[1] and "other" not in said[1]
    assert holds(target["m"]["a"], torch.ones(4, dtype=torch.bfloat16))


class Broken(dcp.FileSystemReader):
    """A storage reader that fails after some items."""

    def __init__(self, path, items):
        super().__init__(path)
        self.items = items

    def read_data(self, plan, planner):
        plan.items = plan.items[: self.items]
        super().read_data(plan, planner)
        raise OSError("the cable was pulled")


def test_failed_load_does_not_change_incomplete_tensors(tmp_path):
    hosts = {key: random_bits((8, 6), torch.float32, n) for n, key in enumerate("pq")}
    xc.save(hosts, tmp_path)
    on = mesh((4, 2))
    target = {key: put(torch.full((8, 6), 7.0), on, ("a", "b")) for key in hosts}
    with pytest.raises(xc.CheckpointError, match="OSError: the cable was pulled"):
        xc.load(target, storage_reader=Broken(tmp_path, items=11))  # eight boxes of p, three of q
    assert holds(target["p"], hosts["p"])
    assert holds(target["q"], torch.full((8, 6), 7.0))


def test_region_missing_from_the_checkpoint_is_found_before_reading(tmp_path):
    xc.save({"t": put(torch.ones(8, 6), mesh((4, 2)), ("a", "b")), "u": torch.ones(2)}, tmp_path)

    class Holed(dcp.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            metadata = super().read_metadata(*args, **kwargs)
            del metadata.state_dict_metadata["t"].chunks[3]
            return metadata

        def read_data(self, plan, planner):
            raise AssertionError("nothing may be read")

    target = {"t": put(torch.zeros(8, 6), mesh((2, 4)), ("a", None)), "u": torch.zeros(2)}
    with pytest.raises(xc.IncompleteCheckpointError, match=r"'t': \[2:4, 3:6\] is missing") as caught:
        xc.load(target, storage_reader=Holed(tmp_path))
    assert caught.value.keys == ("t",)


def test_overlapping_chunks_are_refused(tmp_path):
    xc.save({"t": put(torch.ones(8, 6), mesh((4, 2)), ("a", "b"))}, tmp_path)

    class Doubled(dcp.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            metadata = super().read_metadata(*args, **kwargs)
            saved = metadata.state_dict_metadata["t"]
            saved.chunks[0] = dataclasses.replace(saved.chunks[0], sizes=torch.Size((3, 3)))
            return metadata

    with pytest.raises(xc.IncompleteCheckpointError, match=r"\[2:3, 0:3\] is doubled"):
        xc.load({"t": torch.zeros(8, 6)}, storage_reader=Doubled(tmp_path))


def test_loading_fetches_nothing_and_reads_each_box_once(tmp_path, monkeypatch):
    hosts = {"tiled": random_bits((8, 6), torch.float32), "replicas": random_bits((8, 6), torch.float32, 1)}
    hosts["whole"] = random_bits((8, 6), torch.float32, 2)
    xc.save(hosts, tmp_path)
    on = mesh((4, 2))
    specs = {"tiled": ("a", "b"), "replicas": ("b", None), "whole": None}
    target = {key: put(torch.zeros(8, 6), on, specs[key]) for key in hosts}
    settle()

    def refuse(*args):
        raise AssertionError("a load moved data from the devices to the host")

    read = []

    class Counting(dcp.FileSystemReader):
        def read_data(self, plan, planner):
            read.extend((item.dest_index.fqn, item.lengths.numel()) for item in plan.items)
            return super().read_data(plan, planner)

    with monkeypatch.context() as patched:
        for name in ("_get_local_shards", "_xla_get_cpu_tensors"):
            patched.setattr(_XLAC, name, refuse)
        xc.load(target, storage_reader=Counting(tmp_path))
    for key, host in hosts.items():
        assert holds(target[key], host)
        assert sum(elements for name, elements in read if name == key) == 48, "each element once, for any replicas"
    assert [name for name, _ in read].count("replicas") == 2


def test_replicas_share_one_host_buffer(tmp_path, monkeypatch):
    xc.save({"t": random_bits((8, 6), torch.float32)}, tmp_path)
    target = {"t": put(torch.zeros(8, 6), mesh((2, 4)), ("a", None))}
    settle()
    given = []
    real = _XLAC._load_local_shards
    monkeypatch.setattr(
        _XLAC, "_load_local_shards", lambda t, data, devices: (given.extend(data), real(t, data, devices))
    )
    xc.load(target, tmp_path)
    assert len(given) == 8 and len({id(part) for part in given}) == 2


# Saving.


def test_nothing_is_written_if_a_shard_is_missing_from_the_save(tmp_path):
    """One host of several that saves alone holds only some shards."""
    from torch_xla_ckpt.device.xla import XlaAccess

    class HalfTheDevices(XlaAccess):
        def layout(self, tensor):
            whole = super().layout(tensor)
            return dataclasses.replace(whole, shards=whole.shards[:4])

    state = {"ok": put(torch.ones(4), mesh((8,)), None), "t": put(torch.ones(8, 6), mesh((8,)), ("a", None))}
    planner = xc.SPMDSavePlanner(access=lambda tensor: HalfTheDevices())
    with pytest.raises(BaseException) as caught:
        dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner)
    (error,) = (cause for cause, _ in caught.value.failures.values())
    assert isinstance(error, xc.IncompleteCheckpointError) and error.keys == ("t",)
    assert "[4:8, 0:6] is missing" in str(error) and "every host must take part" in str(error)
    assert not (tmp_path / "c" / ".metadata").exists()


@pytest.mark.parametrize("threads", [1, 4])
def test_complex128_keeps_its_imaginary_part(threads, tmp_path):
    """torch_xla drops the imaginary part on the way to the host."""
    host = random_bits((9, 4), torch.complex128)
    on = mesh((4, 2))
    state = {f"t{n}": put(host, on, spec) for n, spec in enumerate([("a", "b"), ("b", None), (None, None), None])}
    state["scalar"] = put(host[0, 0], on, None)
    for tensor in state.values():
        tensor.mul_(1)  # so that the data comes from the device, not from torch_xla's copy of what was put there
    settle()
    xc.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads))
    target = {key: torch.zeros(tensor.shape, dtype=host.dtype) for key, tensor in state.items()}
    xc.load(target, tmp_path)
    assert all(torch.equal(target[f"t{n}"].nan_to_num(), host.nan_to_num()) for n in range(4))
    assert torch.equal(target["scalar"], host[0, 0])


def test_save_replaces_an_older_checkpoint(tmp_path):
    for value in (1.0, 2.0):
        xc.save({"t": put(torch.full((8,), value), mesh((8,)), ("a",))}, tmp_path)
    target = {"t": torch.zeros(8)}
    xc.load(target, tmp_path)
    assert torch.equal(target["t"], torch.full((8,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu], ids=str)
def test_float8_dtypes_unknown_to_torch_xla_are_saved_as_host_tensors(dtype, tmp_path):
    """test_property covers every dtype that torch_xla can put on a device."""
    host = random_bits((5, 3), dtype)
    xc.save({"t": host}, tmp_path)
    target = {"t": torch.zeros(5, 3, dtype=torch.uint8).view(dtype)}
    xc.load(target, tmp_path)
    assert same_bits(target["t"], host)


class LosesItems(dcp.FileSystemWriter):
    """A writer that leaves items out and reports success, as DCP's writer does when a worker thread fails."""

    def finish(self, metadata, results):
        super().finish(metadata, [[result for result in part if result.index.fqn != "lost"] for part in results])


def test_items_that_the_writer_lost_are_named_before_anything_is_loaded(tmp_path):
    state = {"kept": torch.ones(2), "lost": put(torch.ones(8, 2), mesh((8,)), ("a", None))}
    xc.save(state, storage_writer=LosesItems(tmp_path))
    with pytest.raises(xc.IncompleteCheckpointError, match=r"'lost': \[0:1, 0:2\] is listed, but stored in no file"):
        xc.load({"kept": torch.zeros(2), "lost": torch.zeros(8, 2)}, tmp_path)
    target = {"kept": torch.zeros(2)}
    xc.load(target, tmp_path)
    assert target["kept"].sum() == 2


def test_planners_can_be_used_again(tmp_path):
    save, load = xc.SPMDSavePlanner(), xc.SPMDLoadPlanner()
    for n in range(2):
        host = random_bits((4 + n, 3), torch.float32 if n else torch.bfloat16)
        dcp.save({"t": put(host, mesh((4, 2)), ("a", None))}, checkpoint_id=tmp_path / str(n), planner=save)
        target = {"t": put(torch.zeros_like(host), mesh((2, 4)), ("b", "a"))}
        dcp.load(target, checkpoint_id=tmp_path / str(n), planner=load)
        assert holds(target["t"], host)


def test_folder_without_a_checkpoint_is_a_checkpoint_error(tmp_path):
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        xc.load({"t": torch.zeros(2)}, tmp_path / "nothing")


def test_sharding_without_boxes_is_refused_with_the_key(tmp_path):
    tensor = torch.ones(8).to(torch_xla.device())
    xs.mark_sharding(tensor, mesh((8,)), ("a",))
    settle()
    manual = xs.enable_manual_sharding(tensor, ("a",), mesh=mesh((8,))).global_tensor
    with pytest.raises(xc.CheckpointError, match=r"'t': .*manual"):
        xc.save({"t": manual}, tmp_path)


def test_meta_tensors_are_refused_with_the_key_by_save_and_load(tmp_path):
    with pytest.raises(xc.CheckpointError, match=r"'m\.t': .*meta device has no data"):
        xc.save({"m": {"t": torch.empty(2, device="meta")}}, tmp_path)
    xc.save({"m": {"t": torch.ones(2)}}, tmp_path)
    with pytest.raises(xc.CheckpointError, match=r"'m\.t': .*meta device has no data"):
        xc.load({"m": {"t": torch.empty(2, device="meta")}}, tmp_path)


def test_lazy_conjugates_are_saved_with_their_values(tmp_path):
    host = random_bits((4, 3), torch.int8).to(torch.complex64) * (1 + 2j)
    xc.save({"conj": host.conj(), "imag": host.conj().imag}, tmp_path)
    target = {"conj": torch.zeros_like(host), "imag": torch.zeros(4, 3)}
    xc.load(target, tmp_path)
    assert torch.equal(target["conj"], host.conj()) and torch.equal(target["imag"], -host.imag)


def test_empty_state_dict_is_saved_and_loaded(tmp_path):
    xc.save({}, tmp_path)
    xc.load({}, tmp_path)
    with pytest.raises(xc.MismatchError):
        xc.load({"t": torch.ones(1)}, tmp_path)


def test_path_that_cannot_be_a_folder_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(xc.CheckpointError, match=r"could not be saved: (File|NotADir)"):
        xc.save({"t": torch.ones(2)}, tmp_path / "file")


def test_truncated_file_is_a_checkpoint_error(tmp_path):
    xc.save({"t": put(torch.ones(64, 64), mesh((8,)), ("a", None))}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-5000])
    target = {"t": put(torch.zeros(64, 64), mesh((4, 2)), ("a", "b"))}
    with pytest.raises(xc.CorruptCheckpointError, match=r"'t'.*the file ends before"):
        xc.load(target, tmp_path)
    assert holds(target["t"], torch.zeros(64, 64))


@pytest.mark.slow
def test_tensors_are_saved_and_loaded_without_spmd(tmp_path):
    """In a program that never calls use_spmd."""
    program = f"""if True:
        import torch, torch_xla, torch_xla_ckpt as xc
        tensor = torch.arange(6.0, device=torch_xla.device()).reshape(2, 3) * 2
        xc.save({{"t": tensor, "s": tensor[0, 1]}}, {str(tmp_path)!r})
        target = {{"t": torch.zeros(2, 3, device=torch_xla.device()), "s": torch.zeros((), device=torch_xla.device())}}
        xc.load(target, {str(tmp_path)!r})
        assert torch.equal(target["t"].cpu(), tensor.cpu()) and target["s"].item() == 2.0
    """
    interpreters.run(["-c", program], modules=interpreters.XLA).check_returncode()
