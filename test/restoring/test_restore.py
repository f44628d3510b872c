"""Models without data and optimizers that never took a step come back as if they had never been away."""

import json
import logging
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

import torch_xla_ckpt as xc
from support import interpreters
from support.meshes import holds, mesh, settle, spec_of
from support.paths import environment

pytestmark = pytest.mark.slow

ON = mesh((4, 2))
SPECS = {"*.weight": ("a", "b"), "*.bias": ("a",)}


class Block(torch.nn.Module):
    """Tied weights, a persistent buffer, and one that is computed."""

    def __init__(self, table=True):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 16)
        self.third = torch.nn.Linear(16, 32)
        self.third.weight = self.first.weight
        self.register_buffer("count", torch.zeros(8))
        if table:
            self.register_buffer("table", torch.empty(16), persistent=False)
            self.reset_buffers()

    def reset_buffers(self):
        with torch.no_grad():
            self.table.copy_(torch.arange(16.0, device=self.table.device) / 16)

    def forward(self, x):
        return self.third(self.second(self.first(x).tanh()) + self.table).tanh()


def shard(module):
    for param in module.parameters():
        xs.mark_sharding(param, ON, ("a", "b") if param.ndim == 2 else ("a",))


def built(seed=0):
    torch.manual_seed(seed)
    model = Block().to("xla")
    model.third.weight = model.first.weight
    shard(model)
    return model


def on_meta():
    with torch.device("meta"):
        return Block()


def batches(n):
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(8, 16, generator=generator) for _ in range(n)]


def train(model, optimizer, data):
    losses = []
    for x in data:
        loss = model(x.to(next(model.parameters()).device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def groups(model, lr=0.01):
    """Two groups, of different learning rates, and one parameter that is frozen."""
    model.second.bias.requires_grad_(False)
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": weights}, {"params": biases, "lr": lr / 10}]


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.01),
    "amsgrad": lambda model: torch.optim.AdamW(groups(model), lr=0.01, amsgrad=True),
    "foreach": lambda model: torch.optim.AdamW(groups(model), lr=0.01, foreach=True),
    "capturable": lambda model: torch.optim.AdamW(groups(model), lr=0.01, capturable=True),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.01),
    "radam": lambda model: torch.optim.RAdam(groups(model), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_uninterrupted(tmp_path, name):
    goes_on(tmp_path, name, on_meta)


@pytest.mark.parametrize("build", [Block, lambda: built(seed=1)], ids=["host", "sharded"])
def test_training_goes_on_with_a_model_that_has_data(tmp_path, build):
    goes_on(tmp_path, "adamw", build)


def goes_on(tmp_path, name, build):
    model = built()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, batches(6)[:3])
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path)
    expected = train(model, optimizer, batches(6)[3:])

    fresh = build()
    restored = OPTIMIZERS[name](fresh)
    report = xc.restore(tmp_path, model=fresh, optimizer=restored, sharding=shard)
    assert not report.missing and not report.unexpected
    assert restored.param_groups[1]["lr"] == 0.001
    assert all(p.grad is None for p in fresh.parameters())
    for param, state in restored.state.items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == param.shape:
                assert spec_of(value) == spec_of(param) != "", key
    assert fresh.third.weight is fresh.first.weight
    assert torch.equal(fresh.table.cpu(), torch.arange(16.0) / 16)
    assert train(fresh, restored, batches(6)[3:]) == pytest.approx(expected, rel=1e-5)


def test_fused_optimizers_of_host_models(tmp_path):
    torch.manual_seed(0)
    model, fresh = Block(), Block()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for x in batches(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    xc.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    restored = torch.optim.AdamW(fresh.parameters(), fused=True)
    xc.restore(tmp_path, model=fresh, optimizer=restored)
    for (_, a), (_, b) in zip(optimizer.state.items(), restored.state.items()):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))
    assert next(fresh.parameters()).device.type == "cpu"


def test_host_memory_holds_one_tensor_and_the_budget_beside_the_shards(tmp_path):
    """Virtual devices keep their shards in host memory: the state itself is there once, and little more."""
    saved = interpreters.run(["-m", "support.restore_memory", "save", tmp_path], modules=interpreters.XLA)
    assert saved.returncode == 0, saved.stderr
    # glibc keeps what was freed for later; what is in use is what counts here.
    env = environment(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    program = [sys.executable, "-m", "support.restore_memory", "restore", str(tmp_path)]
    done = subprocess.run(program, env=env, check=True, timeout=100, capture_output=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    one_tensor, budget, program_itself = 16, 16, 32
    assert measured["state"] == 288 <= measured["remains"] + 1
    assert measured["peak"] <= measured["state"] + one_tensor + budget + program_itself, measured


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, batches(2))
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 2}, path)
    return path, {key: value.detach().cpu() for key, value in model.state_dict().items()}


def test_specs_by_pattern_shard_what_they_fit_and_the_rest_is_whole(trained):
    path, expected = trained
    model = on_meta()
    state = {"step": 0}
    rules = {"first.bias": ("a",), "*.weight": ("a", "b"), "first.*": ("b",)}
    xc.restore(path, model=model, sharding=rules, mesh=ON, state=state)
    for key, value in model.state_dict().items():
        assert holds(value, expected[key]), key
    assert state == {"step": 2}
    assert "devices=[4,2]" in spec_of(model.second.weight) and "[" not in spec_of(model.second.bias)
    assert "devices=[4,2]" in spec_of(model.first.bias)  # over "a", the first rule that fits


@pytest.mark.parametrize(
    ("rules", "devices"),
    [
        ({"second.weight": (None, "b"), "*.weight": ("a", "b")}, "devices=[1,2,4]"),
        ({"*.weight": ("a", "b"), "second.weight": (None, "b")}, "devices=[4,2]"),
        ({"secon[d].weight": (None, "b"), "second.weight": ("a", "b")}, "devices=[1,2,4]"),
    ],
)
def test_of_a_name_and_a_pattern_the_first_one_counts(trained, rules, devices):
    path, _ = trained
    model = on_meta()
    xc.restore(path, model=model, sharding=rules, mesh=ON)
    assert devices in spec_of(model.second.weight)


def test_restoring_twice_or_onto_what_is_sharded_changes_no_sharding(trained):
    path, expected = trained
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    for rule in (shard, shard, SPECS, None):
        xc.restore(path, model=model, optimizer=optimizer, sharding=rule, mesh=ON)
        for key, value in model.state_dict().items():
            assert holds(value, expected[key]), key
        assert "devices=[4,2]" in spec_of(model.second.weight)
        assert all(spec_of(s["exp_avg"]) == spec_of(p) for p, s in optimizer.state.items())


@pytest.mark.parametrize("rule", [shard, SPECS])
def test_a_model_that_is_whole_on_every_device_is_sharded(trained, rule):
    path, expected = trained
    model = Block().to("xla")
    model.third.weight = model.first.weight
    model(batches(1)[0].to("xla")).sum().item()
    settle()
    xc.restore(path, model=model, sharding=rule, mesh=ON)
    for key, value in model.state_dict().items():
        assert holds(value, expected[key]), key
    assert "devices=[4,2]" in spec_of(model.second.weight)


def test_state_goes_where_placement_says(trained):
    path, _ = trained
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    asked = []

    def placement(key, shape, dtype):
        asked.append(key)
        return (ON, (("a", "b"), None)) if key.endswith("exp_avg") and len(shape) == 2 else None

    xc.restore(path, model=model, optimizer=optimizer, placement=placement)
    state = optimizer.state[model.second.weight]
    assert "devices=[8,1]" in spec_of(state["exp_avg"]) and "devices=[4,2]" in spec_of(state["exp_avg_sq"])
    assert "optim.state.0.exp_avg" in asked


def test_an_axis_that_the_mesh_lacks_is_refused_before_anything_is_changed(trained):
    path, _ = trained
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(xc.CheckpointError, match=r"'optim.state.0.exp_avg'.*no axis 'z'"):
        xc.restore(
            path,
            model=model,
            optimizer=optimizer,
            sharding=shard,
            placement=lambda key, shape, dtype: (ON, ("z", None)) if len(shape) == 2 else None,
        )
    assert unchanged(model) and not optimizer.state


def test_tensors_that_cannot_be_exchanged_are_named_before_anything_is_changed(trained):
    path, _ = trained
    model = on_meta()
    watched = weakref.ref(model.second.weight)
    with pytest.raises(xc.CheckpointError, match=r"weak references to second\.weight"):
        xc.restore(path, model=model, sharding=shard)
    assert unchanged(model) and watched() is model.second.weight


def unchanged(model):
    return all(p.device.type == "meta" for p in model.parameters())


def test_groups_that_do_not_fit_are_refused_before_anything_is_changed(trained):
    path, _ = trained
    model = on_meta()
    optimizer = torch.optim.AdamW([{"params": [model.first.weight]}, {"params": [model.second.weight]}])
    with pytest.raises(xc.CheckpointError, match=r"groups of \[5\] parameters, the optimizer of \[1, 1\]"):
        xc.restore(path, model=model, optimizer=optimizer, sharding=shard)
    assert unchanged(model) and not optimizer.state


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ({"*.weight": ("a", "z")}, "no axis 'z'"),
        ({"*.weight": ("a",)}, "1 entries for 2 dimensions"),
        ({"*.weight": ("a", "a")}, "twice"),
        ({"*.wieght": ("a", "b")}, "fit no parameter"),
    ],
)
def test_specs_that_do_not_fit_are_refused_before_anything_is_changed(trained, sharding, message):
    path, _ = trained
    model = on_meta()
    with pytest.raises(xc.CheckpointError, match=message):
        xc.restore(path, model=model, sharding=sharding, mesh=ON)
    assert unchanged(model)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_changed(trained):
    path, _ = trained
    model = on_meta()
    with torch.device("meta"):
        model.second = torch.nn.Linear(32, 17)
    with pytest.raises(xc.MismatchError, match=r"model\.second\.weight"):
        xc.restore(path, model=model, sharding=shard)
    assert unchanged(model)


def test_what_the_model_has_no_place_for_is_named(tmp_path, caplog):
    class Larger(Block):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

    xc.save({"model": Larger().state_dict()}, tmp_path)
    model = on_meta()
    with pytest.raises(xc.MismatchError, match=r"model\.head\.weight"):
        xc.restore(tmp_path, model=model, sharding=shard, unexpected="error")
    assert unchanged(model)
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt"):
        report = xc.restore(tmp_path, model=model, sharding=shard)
    assert set(report.unexpected) == {"model.head.weight", "model.head.bias"} and report.created == ()
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("torch_xla_ckpt")]
    assert "model.head.weight" in said


def test_extra_state_reaches_the_module(tmp_path):
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting(2, 2)
    model.seen = 7
    xc.save({"model": model.state_dict()}, tmp_path)
    with torch.device("meta"):
        fresh = Counting(2, 2)
    xc.restore(tmp_path, model=fresh)
    assert fresh.seen == 7 and holds(fresh.weight, model.weight.detach())


def test_nothing_is_kept_where_there_is_nothing(trained):
    path, _ = trained
    model = on_meta()
    model.fourth = torch.nn.Module()
    model.fourth.weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    with pytest.raises(xc.CheckpointError, match=r"model.fourth.weight.*no values to keep"):
        xc.restore(path, model=model, sharding=shard, missing="keep")
    assert unchanged(model)


def test_buffers_that_nobody_computes_are_named(trained):
    path, _ = trained
    with torch.device("meta"):
        model = Block(table=False)
        model.second.register_buffer("odd", torch.empty(3), persistent=False)
    model.second.reset_parameters = None
    with pytest.raises(xc.CheckpointError, match=r"second.odd"):
        xc.restore(path, model=model, sharding=shard)
    assert unchanged(model)


def test_values_in_host_memory_are_kept_where_the_checkpoint_lacks_them(trained):
    path, expected = trained
    model = Block()
    model.fourth = torch.nn.Linear(8, 8)
    head = model.fourth.weight.detach().clone()
    report = xc.restore(path, model=model, sharding=shard, missing="keep")
    assert set(report.missing) == {"model.fourth.weight", "model.fourth.bias"}
    assert holds(model.fourth.weight, head) and holds(model.first.weight, expected["first.weight"])
    assert "devices=[4,2]" in spec_of(model.fourth.weight)


def test_created_tensors_are_sharded_as_placement_says(trained):
    path, expected = trained
    target = {"model": {}}
    xc.load(target, path, placement=lambda key, shape, dtype: (ON, ("a", "b")) if len(shape) == 2 else "xla")
    for key, host in expected.items():
        assert holds(target["model"][key], host), key
    assert "devices=[4,2]" in spec_of(target["model"]["first.weight"])
    target = {"model": {}}
    with pytest.raises(xc.CheckpointError, match=r"'model.count'.*no axis 'z'"):
        xc.load(target, path, placement=lambda key, shape, dtype: (ON, ("z",) * len(shape)))
    assert target == {"model": {}}


def test_random_numbers_are_left_alone(trained):
    path, _ = trained
    torch.manual_seed(3)
    xm.set_rng_state(11)
    expected = torch.rand(3)
    torch.manual_seed(3)
    model = on_meta()

    def reset_buffers():  # one that draws, on the host and on the devices
        model.table.copy_(torch.rand(16))
        model.table.normal_()

    model.reset_buffers = reset_buffers
    xc.restore(path, model=model, sharding=shard)
    assert torch.equal(torch.rand(3), expected) and xm.get_rng_state() == 11


def test_no_step_runs_and_nothing_of_one_is_computed(trained):
    path, _ = trained
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = []
    optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    met.clear_all()
    xc.restore(path, model=model, optimizer=optimizer, sharding=shard)
    assert not steps and all(p.grad is None for p in model.parameters())
    computed = {name for name in met.counter_names() if name.startswith("xla::")}
    assert not {name for name in computed if any(op in name for op in ("mul", "sqrt", "addc", "lerp"))}, computed


def test_prime_optimizer_returns_its_argument_and_state_comes_back_sharded(trained):
    path, _ = trained
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    assert xc.prime_optimizer(optimizer) is optimizer and not optimizer.state
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    xc.load(state, path)
    optimizer.load_state_dict(state["optim"])
    for param, own in optimizer.state.items():
        assert own["step"].item() == 2
        assert spec_of(own["exp_avg"]) == spec_of(param)
        number = next(n for n, p in enumerate(model.parameters()) if p is param)
        assert holds(own["exp_avg"], state["optim"]["state"][number]["exp_avg"])


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, xc.SPMDSavePlanner, SPMDSavePlanner], ids=str)
@pytest.mark.filterwarnings("ignore:The function definition for SavePlanner")
def test_checkpoints_of_others(tmp_path, planner):
    """Written by DCP's storage, with any planner: torch_xla's keeps a dict without tensors in one piece."""
    model, fresh = Block(), on_meta()
    optimizer, restored = (torch.optim.AdamW(groups(m)) for m in (model, fresh))
    for x in batches(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), planner=planner())
    xc.restore(tmp_path, model=fresh, optimizer=restored, sharding=shard)
    for old, new in zip(model.parameters(), fresh.parameters()):
        assert holds(new, old.detach())
        for key, value in optimizer.state[old].items():
            assert holds(restored.state[new][key], value) if value.ndim else restored.state[new][key] == value


def test_a_checkpoint_that_is_nothing_but_a_model(tmp_path):
    model = built()
    xc.save(model.state_dict(), tmp_path)
    fresh = on_meta()
    xc.restore(tmp_path, model=fresh, sharding=shard)
    settle()
    for key, value in fresh.state_dict().items():
        assert holds(value, model.state_dict()[key].cpu())


def test_keys_that_cannot_be_told_are_asked_for(tmp_path):
    model = built()
    state = {"net": model.state_dict(), "ema": model.state_dict(), "a": {"param_groups": [{"params": []}]}}
    xc.save(state, tmp_path)
    with pytest.raises(xc.CheckpointError, match="Pass model_key="):
        xc.restore(tmp_path, model=on_meta())
    with pytest.raises(xc.CheckpointError, match=r"model_key='nett'"):
        xc.restore(tmp_path, model=on_meta(), model_key="nett")
    fresh = on_meta()
    xc.restore(tmp_path, model=fresh, model_key="net", sharding=shard)
    assert not unchanged(fresh)
