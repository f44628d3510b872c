"""SPMDStrategy and modules: the lines of the list in docs/lightning.md, by number."""

import json
import os
import subprocess
import sys

import lightning as L
import pytest
import torch
import torch_xla.distributed.spmd as xs
import torchmetrics

from support import lightning_memory
from support.lightning_modules import (
    BATCH,
    CLASSES,
    WIDTH,
    InConfigure,
    InSetup,
    Net,
    OnMeta,
    Rows,
    loader,
    losses,
    module,
    on_host,
    same,
    specs,
    trainer,
)
from support.meshes import mesh, spec_of
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.integrations.lightning import SPMDStrategy

pytestmark = pytest.mark.slow


def cut(tensor):
    return spec_of(tensor).startswith("{devices=")


@pytest.mark.parametrize("kind", [Net, InSetup, InConfigure, OnMeta])
def test_01_no_flag_and_no_hook_is_needed_wherever_layers_are_built(kind, tmp_path):
    model = module(kind)
    trainer(tmp_path, max_epochs=4).fit(model, loader())
    assert "{devices=[8,1]" in spec_of(model.first.weight)
    assert "{devices=[1,8]" in spec_of(model.last.weight)
    assert losses(model)[-8:].mean() < losses(model)[:8].mean()


def test_01_training_computes_what_a_plain_trainer_computes(tmp_path):
    plain, sharded = module(), module()
    trainer(tmp_path, cpu=True).fit(plain, loader())
    trainer(tmp_path, mesh={"fsdp": 4, "tensor": 2}).fit(sharded, loader())
    torch.testing.assert_close(losses(sharded), losses(plain), rtol=1e-4, atol=1e-5)


def test_02_layers_built_in_init_are_sharded_where_they_are(tmp_path):
    model = module()
    before, values = model.first.weight, on_host(model)
    trainer(tmp_path).validate(model, loader(), verbose=False)
    assert model.first.weight is before and cut(before)
    assert same(on_host(model), values)


def test_03_layers_built_in_setup_are_sharded(tmp_path):
    model = module(InSetup)
    trainer(tmp_path).validate(model, loader(), verbose=False)
    assert all(cut(param) for param in model.parameters() if param.ndim == 2)


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """How far memory rises in MiB, by what is done with a large module. The devices' own memory is a part of it."""
    program = [sys.executable, "-m", "support.lightning_memory", str(tmp_path_factory.mktemp("memory"))]
    # With a fixed threshold, the allocator returns large pieces of memory as soon as they are free.
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, **allocator, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SLACK = 6 * 16  # MiB: six layers. A copy of the module in host memory would take 16


def test_04_layers_of_configure_model_leave_host_memory_one_by_one(memory):
    assert memory["layer by layer"] < lightning_memory.STATE + SLACK


@pytest.mark.parametrize("what", ["initialised", "sharded", "full"])
def test_14_a_module_on_the_meta_device_never_lies_in_host_memory_as_a_whole(what, memory):
    assert memory[what] < lightning_memory.STATE + SLACK


def test_12_consolidating_stays_within_the_budget(memory):
    assert memory["consolidated"] < lightning_memory.BUDGET / 2**20 + SLACK


def test_05_configuring_twice_shards_nothing_again(tmp_path):
    model = module(InConfigure)
    one = trainer(tmp_path)
    one.fit(model, loader())
    params, before = list(model.parameters()), specs(model)
    one.test(model, loader(), verbose=False)
    one.fit(model, loader())
    assert all(a is b for a, b in zip(model.parameters(), params))
    assert specs(model) == before
    assert list(model.state_dict()) == list(module().state_dict())


def test_06_all_stages_use_the_same_module_and_shardings(tmp_path):
    model = module()
    one = trainer(tmp_path)
    seen = []
    for run in (one.fit, one.validate, one.test, one.predict):
        run(model, loader())
        seen.append((id(one.strategy.model), [id(param) for param in model.parameters()], specs(model)))
    assert all(entry == seen[0] for entry in seen)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_07_evaluation_works_without_a_fit_before(stage, tmp_path):
    plain, sharded = module(), module()
    expected = getattr(trainer(tmp_path, cpu=True), stage)(plain, loader())
    found = getattr(trainer(tmp_path), stage)(sharded, loader())
    if stage == "predict":
        assert all(torch.allclose(a.cpu(), b, atol=1e-5) for a, b in zip(found, expected))
    else:
        assert found[0] == pytest.approx(expected[0], rel=1e-4)


def test_08_the_order_of_hooks_is_the_same_in_all_stages(tmp_path):
    calls = []

    class Watched(InConfigure):
        def setup(self, stage):
            calls.append("setup")

        def configure_model(self):
            calls.append("configure_model")
            super().configure_model()

        def on_load_checkpoint(self, checkpoint):
            calls.append("on_load_checkpoint")

        def teardown(self, stage):
            calls.append("teardown")

    path = str(tmp_path / "a.ckpt")
    one = trainer(tmp_path)
    one.fit(module(Watched), loader())
    one.save_checkpoint(path)
    for stage in ("fit", "validate", "test", "predict"):
        calls.clear()
        fresh = trainer(tmp_path, max_epochs=2)
        getattr(fresh, stage)(module(Watched), loader(), ckpt_path=path)
        assert calls == ["setup", "configure_model", "on_load_checkpoint", "teardown"], stage


def test_15_keys_have_no_prefix_of_a_wrapper(tmp_path):
    model = module()
    trainer(tmp_path).fit(model, loader())
    assert list(model.state_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]


class WithMetric(Net):
    def build(self):
        super().build()
        self.error = torchmetrics.MeanSquaredError()
        self.error.persistent(True)
        self.weighted = torch.nn.CrossEntropyLoss(weight=torch.ones(CLASSES))
        self.register_buffer("scale", torch.ones(WIDTH))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error.update(self(x * self.scale), y)
        self.log("error", self.error)


def test_16_metrics_losses_and_buffers_stay_whole_and_their_state_is_right(tmp_path):
    plain, model = module(WithMetric), module(WithMetric)
    expected = trainer(tmp_path, cpu=True).validate(plain, loader(), verbose=False)
    one = trainer(tmp_path)
    found = one.validate(model, loader(), verbose=False)
    assert found[0]["error"] == pytest.approx(expected[0]["error"], rel=1e-4)
    assert not cut(model.weighted.weight) and not cut(model.scale) and cut(model.first.weight)


def test_16_a_buffer_is_sharded_if_a_pattern_says_so(tmp_path):
    model = module(WithMetric)
    strategy = SPMDStrategy(sharding={"scale": ("fsdp",), "*weight": ("fsdp", None), "*.bias": (None,)})
    with pytest.raises(CheckpointError, match=r"weighted\.weight"):  # one dimension
        trainer(tmp_path, strategy=strategy).validate(model, loader(), verbose=False)
    strategy = SPMDStrategy(sharding={"scale": ("fsdp",), "*t.weight": ("fsdp", None)})
    trainer(tmp_path, strategy=strategy).validate(model, loader(), verbose=False)
    assert cut(model.scale) and cut(model.first.weight)


def test_17_optimizers_see_sharded_parameters_that_stay_the_same_objects(tmp_path):
    seen = []

    class Watched(OnMeta):
        def configure_optimizers(self):
            seen.extend(self.parameters())
            assert all(cut(param) for param in seen if param.ndim == 2)
            return super().configure_optimizers()

    model = module(Watched)
    trainer(tmp_path).fit(model, loader())
    assert all(a is b for a, b in zip(model.parameters(), seen))


def test_18_the_module_works_without_a_trainer(tmp_path):
    model = module()
    with torch.no_grad():
        expected = model(Rows().x[:BATCH])
    trainer(tmp_path).validate(model, loader(), verbose=False)
    torch.testing.assert_close(model(Rows().x[:BATCH].to("xla")).cpu(), expected, rtol=1e-4, atol=1e-5)
    trainer(tmp_path, cpu=True).validate(model, loader(), verbose=False)  # and with another one
    torch.testing.assert_close(model(Rows().x[:BATCH]), expected, rtol=1e-4, atol=1e-5)


def test_18_a_module_whose_tensors_are_held_is_refused_by_name(tmp_path):
    model = module()
    held = model(Rows().x[:BATCH])
    with pytest.raises(CheckpointError, match=r"last\.(weight|bias)|first\.(weight|bias)"):
        trainer(tmp_path).validate(model, loader(), verbose=False)
    assert held.requires_grad and all(param.device.type == "cpu" for param in model.parameters())


def test_19_what_the_user_has_sharded_stays_as_it_is(tmp_path):
    model = module()
    model.first.to("xla")
    xs.mark_sharding(model.first.weight, mesh((2, 4)), (None, "a"))
    before = spec_of(model.first.weight)
    trainer(tmp_path).fit(model, loader())
    assert spec_of(model.first.weight) == before and "[1,2,4]" in before
    assert cut(model.last.weight)


def test_patterns_that_fit_nothing_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no_such"):
        trainer(tmp_path, strategy=SPMDStrategy(sharding={"no_such*": (None,)})).validate(module(), loader())


def test_a_function_shards_too(tmp_path):
    def shard(model):
        xs.mark_sharding(model.first.weight, on, ("a", None))

    on = mesh((8,))
    model = module()
    trainer(tmp_path, strategy=SPMDStrategy(sharding=shard)).fit(model, loader())
    assert "[8,1]" in spec_of(model.first.weight)


def test_a_checkpoint_io_is_refused(tmp_path):
    plugin = L.pytorch.plugins.io.TorchCheckpointIO()
    with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException, match="CheckpointIO"):
        trainer(tmp_path, plugins=[plugin])


@pytest.mark.parametrize("sizes", [{"fsdp": 3}, {"fsdp": 16}, {}, {"fsdp": 0}])
def test_meshes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException, match="8 devices"):
        SPMDStrategy(mesh=sizes)


def test_batches_are_cut_over_the_first_axis_or_as_told(tmp_path):
    seen = {}

    class Watched(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            seen.update(x=spec_of(batch["x"]), n=batch["n"])
            return batch["x"], batch["y"]

    def rows(items):
        x, y = torch.utils.data.default_collate(items)
        return {"x": x, "y": y, "n": len(items)}

    trainer(tmp_path, mesh={"data": 4, "fsdp": 2}).validate(module(Watched), loader(collate_fn=rows), verbose=False)
    assert "[4,1,2]" in seen["x"] and seen["n"] == BATCH
    strategy = SPMDStrategy(mesh={"data": 4, "fsdp": 2}, input_sharding={"x": (("data", "fsdp"), None)})
    trainer(tmp_path, strategy=strategy).validate(module(Watched), loader(collate_fn=rows), verbose=False)
    assert "[8,1]" in seen["x"]
