"""What the hosts of end_to_end/test_several_processes.py do. Each function runs in every process of a group."""

import logging
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_xla.distributed.spmd as xs
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import torch_xla_ckpt as xc
from support import hosts
from support.meshes import holds, mesh, put, random_bits, same_bits, settle

warnings.filterwarnings("ignore")

# Shape and spec on a mesh of axes a and b. The large replicated ones have awkward leading dimensions.
TENSORS = {
    "tiled": ((9, 7), ("a", "b")),
    "rows": ((16, 3), (("a", "b"), None)),
    "partly": ((8, 5), ("a", None)),
    "partly_other": ((8, 5), (None, "b")),
    "replicated": ((5, 300, 40), (None, None, None)),
    "unmarked": ((1, 100_003), None),
    "small": ((3,), None),
    "scalar": ((), None),
    "empty": ((0, 2), None),
}
MESHES = {1: (4, 2), 2: (2, 4), 4: (4, 2)}


def host_tensors():
    return {key: random_bits(shape, torch.float32, n) for n, (key, (shape, _)) in enumerate(TENSORS.items())}


def state(on, fill=None):
    tensors = {
        key: put(host if fill is None else torch.full_like(host, fill), on, TENSORS[key][1])
        for key, host in host_tensors().items()
    }
    cpu = random_bits((1000, 70), torch.float64) if fill is None else torch.zeros((1000, 70), dtype=torch.float64)
    return {"model": tensors, "cpu": cpu, "step": 5 if fill is None else 0}


def save(rank, world, folder):
    """Two hosts write through fsspec, four with four threads each."""
    path = f"{folder}/by{world}"
    storage = FsspecWriter(f"file://{path}") if world == 2 else dcp.FileSystemWriter(path, thread_count=4)
    planner = xc.SPMDSavePlanner(access=hosts.share_access(rank, world))
    dcp.save(state(mesh(MESHES[world])), storage_writer=storage, planner=planner)


def load(rank, world, folder):
    """Load what other numbers of processes saved, onto several meshes; check this host's devices."""
    for saved in sorted(Path(folder).glob("by?")):
        for shape in ((4, 2), (1, 8)):
            target = state(mesh(shape, order=[7, 2, 5, 0, 3, 6, 1, 4]), fill=1.5)
            planner = xc.SPMDLoadPlanner(access=hosts.share_access(rank, world))
            dcp.load(target, checkpoint_id=saved, planner=planner)
            settle()
            for key, host in host_tensors().items():
                assert share_holds(target["model"][key], host, rank, world), (saved.name, shape, key)
            assert same_bits(target["cpu"], random_bits((1000, 70), torch.float64)) and target["step"] == 5


def share_holds(tensor, expected, rank, world):
    sharded = xs.wrap_if_sharded(tensor)
    if not isinstance(sharded, xs.XLAShardedTensor) or sharded.sharding_type == xs.ShardingType.REPLICATED:
        return same_bits(tensor.cpu(), expected)
    shards = sharded.local_shards
    own = hosts.share([shard.shard_device for shard in shards], rank, world)
    return all(
        same_bits(shard.unpadded_data.contiguous(), expected[tuple(shard.indices)])
        for shard in shards
        if shard.shard_device in own
    )


def everyone_holds_everything(rank, world, folder):
    """No access of our own: every process holds all shards, as if all tensors were replicated over hosts."""
    metadata = xc.save(state(mesh((4, 2))), Path(folder) / "shared")
    assert repr(metadata).startswith("<Metadata of "), "every rank prints one line"
    target = state(mesh((2, 4)), fill=2.0)
    xc.load(target, Path(folder) / "shared")
    for key, host in host_tensors().items():
        assert share_holds(target["model"][key], host, 0, 1), key


class Failing(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError("no space left on device")


def one_fails_to_write(rank, world, folder):
    path = Path(folder) / "failing"
    writer = Failing(path) if rank == 1 else dcp.FileSystemWriter(path)
    with pytest.raises(xc.CheckpointError, match="could not be saved: rank 1: OSError: no space left on device"):
        xc.save({"t": put(torch.ones(8), mesh((8,)), ("a",))}, storage_writer=writer)
    if rank == 0:
        assert not (path / ".metadata").exists()
    dist.barrier()  # the group still works


def one_asks_for_what_is_not_there(rank, world, folder):
    path = Path(folder) / "small"
    xc.save({"t": torch.ones(4)}, path)
    target = {"t": torch.zeros(4 + (rank == 1))}
    with pytest.raises(xc.MismatchError, match=r"^1 keys of target.*\n  t: .*\(5,\).*\(4,\).* \(rank 1\)"):
        xc.load(target, path)
    assert target["t"].sum() == 0


class LateState:
    """Has a state on the ranks that have begun."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return dict(self.state or {})

    def load_state_dict(self, state):
        self.state = state


def what_is_created(rank, world, folder):
    """What one process lacks is created there, reports agree, and a failure elsewhere takes it out again."""
    path = Path(folder) / "late"
    state = {"position": 5, "seen": {0: torch.arange(4), 1: {}}}
    xc.save({"model": {"a": torch.ones(4), "b": torch.zeros(2)}, "loader": LateState(state)}, path)
    model = {"a": torch.zeros(4)} if rank else {"a": torch.zeros(4), "b": torch.ones(2)}
    loader = LateState(None if rank == 0 else {"position": 0})
    report = xc.load({"model": model, "loader": loader}, path)
    reports = [None] * world
    dist.all_gather_object(reports, dict(report.outcomes))
    assert all(other == reports[0] for other in reports)
    assert report.outcomes["model.b"].status == "loaded" and model["b"].eq(0).all()
    assert str(loader.state) == str(state)

    target = {"model": {}, "loader": {}}
    reader = xc.ShardReader(path)
    if rank == world - 1:
        reader.read_data = failing
    with pytest.raises(xc.CheckpointError, match=rf"rank {world - 1}: .*cable"):
        xc.load(target, storage_reader=reader)
    assert target == {"model": {}, "loader": {}}


def one_has_no_state(rank, world, folder):
    """What a ``Stateful`` raises on one rank is raised on all, before the others wait for that rank."""

    class Broken(LateState):
        def state_dict(self):
            if rank == 1:
                raise OSError("the file of the last position is gone")
            return super().state_dict()

    named = "" if rank == 1 else "rank 1: "
    match = rf"^{named}'loader': state_dict\(\) of a Broken failed \(OSError: the file of"
    path = Path(folder) / "broken"
    with pytest.raises(xc.CheckpointError, match=match):
        xc.save({"loader": Broken({"n": 1})}, path)
    assert not path.exists()
    with pytest.raises(xc.CheckpointError, match=match):
        xc.load({"loader": Broken({"n": 1})}, path)


def restored_from_nothing(rank, world, folder):
    """A meta-device model and an optimizer that never took a step, in every process; the report is the same on all."""
    path = Path(folder) / "trained"
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}, path)
    with torch.device("meta"):
        empty = torch.nn.Linear(8, 16)
    unstepped = torch.optim.SGD(empty.parameters(), lr=0.1, momentum=0.9)
    state = {"step": None}
    rules = {"weight": ("a", "b"), "bias": ("a",)}
    report = xc.restore(path, model=empty, optimizer=unstepped, state=state, sharding=rules, mesh=mesh((4, 2)))
    reports = [None] * world
    dist.all_gather_object(reports, dict(report.outcomes))
    assert all(other == reports[0] for other in reports) and report.created and state == {"step": 1}
    for old, new in zip(model.parameters(), empty.parameters()):
        assert holds(new, old.detach())
        assert holds(unstepped.state[new]["momentum_buffer"], optimizer.state[old]["momentum_buffer"])

    other = torch.optim.SGD([empty.weight] if rank == 1 else empty.parameters(), lr=0.1)
    with pytest.raises(xc.CheckpointError, match="" if rank == 1 else "^rank 1: the optimizer's parameter groups"):
        xc.restore(path, optimizer=other)
    assert not other.state


def failing(plan, planner):
    raise OSError("the cable was pulled")


def processes_differ(rank, world, folder):
    """Host tensors under one key: equal ones may be written in parts, different ones must stay whole."""
    path = Path(folder) / "differ"
    generator = torch.Generator().manual_seed(rank)
    mine = {
        "same": random_bits((1000, 100), torch.float32),
        "rng": generator.get_state(),
        f"only{rank}": torch.full((3,), float(rank)),
        "step": rank,
    }
    with record_warnings() as said:
        xc.save(mine, path)
    if rank == 0:
        (text,) = said
        assert "differ between ranks" in text and "rng" in text and "same" not in text
    everything = {
        "same": torch.zeros(1000, 100),
        "rng": torch.zeros_like(mine["rng"]),
        **{f"only{n}": torch.zeros(3) for n in range(world)},
        "step": -1,
    }
    xc.load(everything, path)
    assert same_bits(everything["same"], mine["same"])
    assert same_bits(everything["rng"], torch.Generator().manual_seed(0).get_state()) and everything["step"] == 0
    assert all((everything[f"only{n}"] == n).all() for n in range(world))


def shapes_differ(rank, world, folder):
    with pytest.raises(xc.CheckpointError, match=r"(?s)disagree about 't': rank 0 .*\(3,\).* rank 1 has .*\(4,\)"):
        xc.save({"t": torch.ones(3 + rank)}, Path(folder) / "shapes")


def one_saves_alone(rank, world, folder):
    """A host of a larger program that saves without the others has not got everything."""
    tensor = put(torch.ones(8, 2), mesh((8,)), ("a", None))
    if rank == 1:
        planner = xc.SPMDSavePlanner(access=hosts.share_access(rank, world))
        with pytest.raises(BaseException, match=r"IncompleteCheckpointError[\s\S]*'t'[\s\S]*is missing"):
            dcp.save({"t": tensor}, checkpoint_id=Path(folder) / "alone", planner=planner, no_dist=True)


def folders_differ(rank, world, folder):
    """Hosts that write to local disks of their own have no checkpoint, and must hear of it when they save."""
    path = Path(folder) / f"disk{rank}"
    with pytest.raises(xc.CheckpointError, match=r"rank 0: .*__1_0-.* cannot be seen .* one shared folder"):
        xc.save({"t": torch.ones(8), f"only{rank}": torch.ones(3)}, path)
    assert not (path / ".metadata").exists()


class record_warnings(logging.Handler):
    def __enter__(self):
        self.said = []
        logging.getLogger("torch_xla_ckpt").addHandler(self)
        return self.said

    def emit(self, record):
        self.said.append(record.getMessage())

    def __exit__(self, *exc):
        logging.getLogger("torch_xla_ckpt").removeHandler(self)
