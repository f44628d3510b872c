"""SPMDStrategy and checkpoints: the lines of the list in docs/lightning.md, by number."""

import io
import os
import zipfile

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

import torch_xla_ckpt as xc
from support import interpreters, lightning_modules
from support.lightning_modules import (
    InConfigure,
    Net,
    OnMeta,
    loader,
    losses,
    module,
    on_host,
    same,
    specs,
    trainer,
)
from support.meshes import spec_of
from support.training import assembled
from torch_xla_ckpt import CheckpointError, CorruptCheckpointError, MismatchError, UnsafeObjectError
from torch_xla_ckpt.integrations.lightning import SPMDStrategy, consolidate

pytestmark = pytest.mark.slow
TENSOR = {"first.weight": ("fsdp", "tensor"), "last.weight": ("tensor", None)}


def saved(tmp_path, kind=Net, name="a.ckpt", **options):
    """A trained module, its trainer, and the path of its checkpoint."""
    model, one = module(kind), trainer(tmp_path, **options)
    one.fit(model, loader())
    path = str(tmp_path / name)
    one.save_checkpoint(path)
    return model, one, path


def state_on_host(optimizer):
    return {
        (number, name): assembled(value) if value.device.type == "xla" else value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def test_09_fit_save_and_test_as_in_the_thread(tmp_path):
    model, one, path = saved(tmp_path)
    fresh = module(seed=1)
    found = one.test(fresh, loader(), ckpt_path=path, verbose=False)
    assert same(on_host(fresh), on_host(model))
    assert found[0]["test"] == pytest.approx(one.test(model, loader(), verbose=False)[0]["test"], rel=1e-6)


@pytest.mark.parametrize("kind", [Net, InConfigure, OnMeta])
def test_10_a_sharded_checkpoint_goes_into_another_mesh_with_other_specs(kind, tmp_path):
    model, one, path = saved(tmp_path)
    fresh = module(kind, seed=1)
    strategy = SPMDStrategy(mesh={"fsdp": 4, "tensor": 2}, sharding=TENSOR)
    other = trainer(tmp_path, strategy=strategy, max_epochs=1)
    other.fit(fresh, loader(), ckpt_path=path)
    assert same(on_host(fresh), on_host(model))
    assert "[4,2]" in spec_of(fresh.first.weight)
    expected, found = state_on_host(one.optimizers[0]), state_on_host(other.optimizers[0])
    assert same(found, expected)
    moments = other.optimizers[0].state[fresh.first.weight]
    assert spec_of(moments["exp_avg"]) == spec_of(fresh.first.weight)


# The head of programs that use Lightning's own strategy, without this package.
MODEL_PARALLEL = """
import sys
import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from plain_modules import InConfigure, Net, loader

class Sharded(InConfigure):
    def configure_model(self):
        super().configure_model()
        for layer in (self.first, self.last):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

"""

FSDP2 = f"""{MODEL_PARALLEL}
strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False,
                    max_epochs=1, enable_checkpointing=False)
trainer.fit(Sharded(), loader())
trainer.save_checkpoint(sys.argv[1])
"""


def run_without_this_package(program, tmp_path, *arguments):
    write_plain_modules(tmp_path)
    done = interpreters.run(["-c", program, *arguments], env={"PYTHONPATH": str(tmp_path)}, modules=interpreters.STOCK)
    assert not done.returncode, done.stderr


def test_10_a_checkpoint_of_lightnings_own_sharded_strategy(tmp_path):
    path = tmp_path / "a.ckpt"
    run_without_this_package(FSDP2, tmp_path, path)
    expected = {"state_dict": {}, "optimizer_0": {}}
    xc.load(expected, path)
    fresh, one = module(), trainer(tmp_path)
    one.fit(fresh, loader(), ckpt_path=path)
    assert one.global_step == 8
    assert same(on_host(fresh), expected["state_dict"])
    moments = one.optimizers[0].state[fresh.first.weight]
    assert torch.equal(assembled(moments["exp_avg"]), expected["optimizer_0"]["state"]["first.weight"]["exp_avg"])
    (tmp_path / "disk.ckpt").write_bytes(b"old")
    (tmp_path / "full.ckpt").symlink_to("disk.ckpt")
    consolidate(path, tmp_path / "full.ckpt")
    assert (tmp_path / "full.ckpt").is_symlink() and (tmp_path / "disk.ckpt").stat().st_size > 100
    plain, other = module(seed=1), trainer(tmp_path, cpu=True)
    other.fit(plain, loader(), ckpt_path=tmp_path / "full.ckpt")
    assert same(on_host(plain), expected["state_dict"])
    assert same(state_on_host(other.optimizers[0]), state_on_host(one.optimizers[0]))


@pytest.mark.parametrize("kind", [Net, OnMeta])
@pytest.mark.parametrize("by", ["plain Lightning", "full"])
def test_11_a_full_checkpoint_goes_into_a_sharded_module(by, kind, tmp_path):
    options = {"cpu": True} if by == "plain Lightning" else {"strategy": SPMDStrategy(state_dict_type="full")}
    model, one, path = saved(tmp_path, **options)
    assert os.path.isfile(path)
    expected, state = on_host(model), state_on_host(one.optimizers[0])
    fresh, other = module(kind, seed=1), trainer(tmp_path, mesh={"fsdp": 4, "tensor": 2})
    other.fit(fresh, loader(), ckpt_path=path)
    assert same(on_host(fresh), expected)
    assert same(state_on_host(other.optimizers[0]), state)
    moments = other.optimizers[0].state[fresh.first.weight]
    assert spec_of(moments["exp_avg"]) == spec_of(fresh.first.weight) != ""


def test_11_hooks_may_change_a_full_checkpoint(tmp_path):
    model, _, path = saved(tmp_path, cpu=True)

    class Renamed(Net):
        def on_load_checkpoint(self, checkpoint):
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {key.replace("first", "begin"): value for key, value in state.items()}

        def build(self):
            super().build()
            self.begin = self.first
            del self.first

        def forward(self, x):
            return self.last(torch.relu(self.begin(x)))

    fresh = module(Renamed, seed=1)
    trainer(tmp_path).test(fresh, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(on_host(fresh)["begin.weight"], on_host(model)["first.weight"])


STOCK = f"""{MODEL_PARALLEL}
def fit(model, epochs, **options):
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, max_epochs=epochs,
                        enable_checkpointing=False, **options)
    trainer.fit(model, loader(), ckpt_path=path)
    assert trainer.global_step == 8 * epochs
    return model.state_dict()

path = sys.argv[1]
checkpoint = torch.load(path, weights_only=True)
fit(Net(), 2)
strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
for key, value in fit(Sharded(), 1, strategy=strategy).items():  # nothing is left to train
    assert torch.equal(value.full_tensor(), checkpoint["state_dict"][key])
model = Net.load_from_checkpoint(path)
torch.save(model.state_dict(), sys.argv[2])
assert "torch_xla_ckpt" not in sys.modules
"""


def test_12_stock_lightning_opens_the_consolidated_file_without_this_package(tmp_path):
    model, one, path = saved(tmp_path, callbacks=[Average()])
    file, out = str(tmp_path / "full.ckpt"), str(tmp_path / "out")
    for budget in (1 << 8, 1 << 28):
        consolidate(path, file, memory_budget=budget)
        assert zipfile.ZipFile(file).testzip() is None
        loaded = torch.load(file, weights_only=True, mmap=True)
        assert same(dict(loaded["state_dict"]), on_host(model))
        assert same(loaded["callbacks"]["Average"]["average"], {k: assembled(v) for k, v in average_of(one).items()})
        ours = {(n, k): v for n, s in loaded["optimizer_states"][0]["state"].items() for k, v in s.items()}
        assert same(ours, state_on_host(one.optimizers[0]))
    run_without_this_package(STOCK, tmp_path, file, out)
    assert same(torch.load(out), on_host(model))


def write_plain_modules(folder):
    """The test's modules without the parts that need torch_xla."""
    with open(lightning_modules.__file__) as file:
        text = file.read()
    kept = [line for line in text.splitlines() if not line.startswith(("from support", "from torch_xla_ckpt"))]
    (folder / "plain_modules.py").write_text("\n".join(kept))


def test_13_both_ways_to_save(tmp_path):
    _, _, folder = saved(tmp_path, name="sharded.ckpt")
    _, _, file = saved(tmp_path, name="full.ckpt", strategy=SPMDStrategy(state_dict_type="full"))
    assert os.path.isdir(folder) and ".metadata" in os.listdir(folder)
    assert os.path.isfile(file)
    assert sorted(os.listdir(tmp_path)) == ["full.ckpt", "sharded.ckpt"]  # nothing is left over
    assert same(on_host(Net.load_from_checkpoint(file, map_location="cpu")), on_host(loaded_from(folder, tmp_path)))


def loaded_from(path, tmp_path, kind=Net, **options):
    fresh = module(kind, seed=7)
    trainer(tmp_path, **options).validate(fresh, loader(), ckpt_path=path, verbose=False)
    return fresh


def test_14_a_module_on_the_meta_device_is_initialised_like_one_in_host_memory(tmp_path):
    class Twins(OnMeta):
        def configure_model(self):
            super().configure_model()
            with torch.device("meta"):
                self.twins = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)])

    model = module(Twins)
    trainer(tmp_path).validate(model, loader(), verbose=False)
    found = on_host(model)
    assert not torch.equal(found["twins.0.weight"], found["twins.1.weight"])
    assert all(0 < value.abs().max() < 1 for value in found.values())


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_14_with_a_checkpoint_nothing_is_initialised_first(state_dict_type, tmp_path):
    model, _, path = saved(tmp_path, strategy=SPMDStrategy(state_dict_type=state_dict_type))

    class Counted(OnMeta):
        initialised = 0

        def configure_model(self):
            super().configure_model()
            for layer in (self.first, self.last):
                layer.reset_parameters = self.count

        def count(self):
            Counted.initialised += 1

    fresh = loaded_from(path, tmp_path, Counted)
    assert same(on_host(fresh), on_host(model))
    assert Counted.initialised == 0


def test_20_loading_works_before_any_forward_pass(tmp_path):
    model, _, path = saved(tmp_path)
    for stage in ("validate", "test", "predict", "fit"):
        fresh = module(seed=1)
        getattr(trainer(tmp_path), stage)(fresh, loader(), ckpt_path=path)
        assert same(on_host(fresh), on_host(model))


class Average(Callback):
    """An average of the weights, on the devices."""

    def on_fit_start(self, trainer, model):
        if not hasattr(self, "average"):
            self.average = {name: param.detach().clone() for name, param in model.named_parameters()}

    def on_train_batch_end(self, trainer, model, *_):
        for name, param in model.named_parameters():
            self.average[name] = self.average[name] * 0.5 + param.detach() * 0.5

    def state_dict(self):
        return {"average": self.average, "nested": [(1, None), {}, {3: "three"}]}

    def load_state_dict(self, state):
        self.average = state["average"]
        self.rest = state["nested"]


def average_of(one):
    return one.callbacks[0].average


def test_21_a_callback_with_state_on_the_devices_comes_back_sharded(tmp_path):
    _, one, path = saved(tmp_path, callbacks=[Average()])
    expected = {name: assembled(value) for name, value in average_of(one).items()}
    callback = Average()
    fresh = module(seed=1)
    trainer(tmp_path, callbacks=[callback]).fit(fresh, loader(), ckpt_path=path)
    assert same({name: assembled(value) for name, value in callback.average.items()}, expected)
    assert spec_of(callback.average["first.weight"]) == spec_of(fresh.first.weight)
    assert callback.rest == [(1, None), {}, {3: "three"}]


def test_21_lightnings_own_weight_averaging(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=4, filename="{step}")
    trainer(tmp_path, callbacks=[EMAWeightAveraging(decay=0.5), checkpoints], max_steps=4).fit(module(), loader())
    callback, fresh = EMAWeightAveraging(decay=0.5), module(seed=1)
    again = trainer(tmp_path, callbacks=[callback], max_steps=4)  # nothing is left to train
    again.fit(fresh, loader(), ckpt_path=checkpoints.best_model_path)
    found = {"state_dict": {}, "tensors": {}}
    xc.load(found, checkpoints.best_model_path)
    assert same(on_host(callback._average_model.module), found["state_dict"])
    current = {f"current_model_state.{key}": value for key, value in on_host(fresh).items()}
    assert all(torch.equal(found["tensors"][key], value) for key, value in current.items())
    assert not same(on_host(fresh), found["state_dict"])


class Two(Net):
    """Two optimizers by hand, each with a scheduler."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers()):
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            scheduler.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        one = torch.optim.AdamW(self.first.parameters(), lr=1e-2)
        two = torch.optim.SGD(self.last.parameters(), lr=1e-2, momentum=0.9)
        return [one, two], [torch.optim.lr_scheduler.StepLR(one, 3), torch.optim.lr_scheduler.StepLR(two, 2)]


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"},
        }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Two, {}),
        (Scheduled, {}),
        (Net, {"gradient_clip_val": 0.1}),
        (Net, {"accumulate_grad_batches": 2}),
        (Net, {"precision": "bf16-true"}),
        (Net, {"precision": "bf16-mixed"}),
    ],
)
def test_21_two_epochs_are_the_same_with_a_checkpoint_between_them(kind, options, tmp_path):
    whole = module(kind)
    trainer(tmp_path, max_epochs=2, **options).fit(whole, loader())
    first, one = module(kind), trainer(tmp_path, **options)
    one.fit(first, loader())
    one.save_checkpoint(tmp_path / "a.ckpt")
    second = module(kind, seed=1)
    trainer(tmp_path, max_epochs=2, **options).fit(second, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(torch.cat([losses(first), losses(second)]), losses(whole))
    assert same(on_host(second), on_host(whole))
    if options.get("precision") == "bf16-true":
        assert second.first.weight.dtype == torch.bfloat16


def test_21_mixed_precision_with_a_scaler_is_refused(tmp_path):
    with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException, match="bf16-mixed"):
        trainer(tmp_path, precision="16-mixed")


class Grown(Net):
    def build(self):
        super().build()
        self.extra = torch.nn.Linear(4, 4)


@pytest.mark.parametrize("full", [False, True])
def test_21_strict_loading(full, tmp_path, caplog):
    options = {"strategy": SPMDStrategy(state_dict_type="full")} if full else {}
    model, _, path = saved(tmp_path, **options)
    grown = module(Grown, seed=1)
    before = on_host(grown)
    with pytest.raises(MismatchError, match=r"extra\.weight"):
        trainer(tmp_path).validate(grown, loader(), ckpt_path=path, verbose=False)
    assert same(on_host(grown), before)
    grown.strict_loading = False
    trainer(tmp_path).validate(grown, loader(), ckpt_path=path, verbose=False)
    assert "extra.weight" in caplog.text
    found = on_host(grown)
    assert torch.equal(found["extra.weight"], before["extra.weight"])
    assert torch.equal(found["first.weight"], on_host(model)["first.weight"])


class Opaque:
    pass


class WithOpaque(Callback):
    def state_dict(self):
        return {"opaque": Opaque()}

    def load_state_dict(self, state):
        self.loaded = state["opaque"]


@pytest.mark.parametrize("full", [False, True])
def test_21_nothing_in_a_checkpoint_runs_code_unless_asked(full, tmp_path):
    options = {"strategy": SPMDStrategy(state_dict_type="full")} if full else {}
    _, _, path = saved(tmp_path, callbacks=[WithOpaque()], **options)
    fresh = module(seed=1)
    before = on_host(fresh)
    with pytest.raises(UnsafeObjectError, match="Opaque"):
        trainer(tmp_path).fit(fresh, loader(), ckpt_path=path)
    assert same(on_host(fresh), before)
    callback = WithOpaque()
    trainer(tmp_path, callbacks=[callback]).fit(fresh, loader(), ckpt_path=path, weights_only=False)
    assert isinstance(callback.loaded, Opaque)


def test_21_other_optimizers_are_refused_by_number(tmp_path):
    _, _, path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"1 optimizers.*returned 2"):
        trainer(tmp_path, max_epochs=2).fit(module(Two), loader(), ckpt_path=path)


@pytest.mark.parametrize("full", [False, True])
def test_24_paths_may_be_urls(full, tmp_path):
    options = {"strategy": SPMDStrategy(state_dict_type="full")} if full else {}
    model, one = module(), trainer(tmp_path, **options)
    one.fit(model, loader())
    url = f"memory://lightning/{tmp_path.name}/a.ckpt"
    one.save_checkpoint(url)
    assert same(on_host(loaded_from(url, tmp_path)), on_host(model))
    if not full:
        consolidate(url, f"{url}.full")
        assert same(on_host(loaded_from(f"{url}.full", tmp_path)), on_host(model))


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("start", [Net, OnMeta, "on the devices"])
def test_25_a_damaged_checkpoint_is_named_and_nothing_is_loaded(start, tmp_path):
    _, _, path = saved(tmp_path)
    damage(max((tmp_path / "a.ckpt").glob("*.distcp"), key=lambda file: file.stat().st_size))
    fresh, one = module(Net if isinstance(start, str) else start, seed=1), trainer(tmp_path, max_epochs=3)
    if start == "on the devices":
        one.fit(fresh, loader())
    before = None if start is OnMeta else on_host(fresh)
    with pytest.raises(CorruptCheckpointError, match=r"a\.ckpt"):
        one.fit(fresh, loader(), ckpt_path=path)
    if before is None:
        assert fresh.first.weight.device.type == "meta"
    else:
        assert same(on_host(fresh), before)


def test_25_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path):
    _, _, path = saved(tmp_path, cpu=True)
    damage(tmp_path / "a.ckpt")
    fresh = module(seed=1)
    before = on_host(fresh)
    with pytest.raises(CorruptCheckpointError, match=r"a\.ckpt"):
        trainer(tmp_path).fit(fresh, loader(), ckpt_path=path)
    assert same(on_host(fresh), before)


def archive(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


REST = {"values": {}, "optimizers": None, "places": {}}
ODD = {
    "bytes": b"no archive",
    "no bytes": 3,
    "a list": archive([1]),
    "an optimizer too many": archive({**REST, "optimizers": 10**12}),
    "a place that is not there": archive({**REST, "places": {"x": ("a", "b")}}),
    "a path that is no path": archive({**REST, "places": {"x": 3}}),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_25_an_odd_checkpoint_is_refused_and_nothing_is_loaded(odd, tmp_path):
    path = tmp_path / "a.ckpt"
    xc.save({"state_dict": on_host(module()), "lightning": odd, "tensors": {"x": torch.ones(2)}}, path)
    fresh = module(seed=1)
    before = on_host(fresh)
    with pytest.raises(CorruptCheckpointError):
        trainer(tmp_path).fit(fresh, loader(), ckpt_path=path)
    assert same(on_host(fresh), before)


@pytest.mark.parametrize("case", ["absent", "half-written", "empty", "foreign", "foreign file", "not a pickle"])
def test_25_what_is_no_checkpoint_is_named(case, tmp_path):
    path = tmp_path / "a.ckpt"
    if case == "half-written":
        saved(tmp_path)
        (path / ".metadata").unlink()
    elif case == "empty":
        path.mkdir()
    elif case == "foreign":
        xc.save({"model": torch.ones(3)}, path)
    elif case == "foreign file":
        torch.save({"model": torch.ones(3)}, path)
    elif case == "not a pickle":
        path.write_bytes(b"no checkpoint at all")
    fresh = module(seed=1)
    before = on_host(fresh)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        trainer(tmp_path).fit(fresh, loader(), ckpt_path=path)
    assert same(on_host(fresh), before)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    one = trainer(tmp_path)
    one.validate(module(), loader(), verbose=False)
    with pytest.raises(CheckpointError, match=r"cannot save to .*file/a\.ckpt"):
        one.save_checkpoint(tmp_path / "file" / "a.ckpt")


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    _, _, path = saved(tmp_path, cpu=True)
    sharded = trainer(tmp_path)
    sharded.validate(module(), loader(), verbose=False)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is a file"):
        sharded.save_checkpoint(path)
    assert torch.load(path)["epoch"] == 1


def test_a_save_does_not_write_through_a_link(tmp_path):
    _, one, path = saved(tmp_path)
    os.symlink("a.ckpt", tmp_path / "last.ckpt")
    before = sorted(os.listdir(path))
    one.save_checkpoint(tmp_path / "last.ckpt")
    assert sorted(os.listdir(path)) == before and not os.path.islink(tmp_path / "last.ckpt")


@pytest.mark.parametrize("name", ["a b.ckpt", "a*[1].ckpt", "epoch=1-val=0.5.ckpt", "a::b.ckpt"])
def test_odd_names(name, tmp_path):
    model, one, path = saved(tmp_path, name=name)
    assert specs(loaded_from(path, tmp_path)) == specs(model)
    one.strategy.remove_checkpoint(path)
    assert not os.path.exists(path)
