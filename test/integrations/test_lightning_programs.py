"""SPMDStrategy in programs as users write them: their meshes, modules, loaders, callbacks and paths."""

import os

import lightning as L
import numpy as np
import pytest
import torch
import torch_xla.distributed.spmd as xs
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from support.lightning_modules import (
    CLASSES,
    WIDTH,
    InConfigure,
    Net,
    Noisy,
    Rows,
    StopAfter,
    loader,
    losses,
    module,
    on_host,
    same,
    specs,
    trainer,
)
from torch_xla_ckpt.integrations.lightning import SPMDStrategy, consolidate

pytestmark = pytest.mark.slow


def resumed(tmp_path, kind=Net, make=loader, at=5, epochs=2, **options):
    """A module that is trained to a step, another one that goes on in a new Trainer, and one that is never stopped."""
    options = {"max_epochs": epochs, **options}
    whole = module(kind)
    trainer(tmp_path / "whole", **options).fit(whole, make())
    begun = module(kind)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=at, filename="a")
    trainer(tmp_path, callbacks=[saves, StopAfter(at)], **options).fit(begun, make())
    again = module(kind, seed=1)
    trainer(tmp_path, **options).fit(again, make(), ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(torch.cat([losses(begun)[:at], losses(again)]), losses(whole))
    assert same(on_host(again), on_host(whole))
    return begun, again


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"rows": 8},
        xs.Mesh(np.arange(8), (4, 2)),
        xs.Mesh(np.arange(8)[::-1], (4, 2), ("fsdp", "tensor")),
    ],
    ids=["three axes", "no axis fsdp", "a mesh without names", "a mesh in another order"],
)
def test_meshes(mesh, tmp_path):
    resumed(tmp_path, mesh=mesh)


class Odd(Net):
    """Shapes that divide nowhere, buffers of all kinds, and a parameter without dimensions."""

    def build(self):
        self.first = torch.nn.Linear(WIDTH, 13)
        self.norm = torch.nn.BatchNorm1d(13)
        self.last = torch.nn.Linear(13, CLASSES)
        self.last.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.register_parameter("absent", None)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)


def test_odd_shapes_and_batches_of_odd_sizes(tmp_path):
    _, again = resumed(tmp_path, Odd, lambda: DataLoader(Rows(61), 9))
    assert again.count.item() == 14 and not again.last.bias.requires_grad


class Tied(Net):
    def build(self):
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def loss(self, batch):
        return self(batch[0]).square().mean()


def test_tied_weights_stay_tied(tmp_path):
    _, again = resumed(tmp_path, Tied)
    assert again.last.weight is again.first.weight
    consolidate(tmp_path / "a.ckpt", tmp_path / "full.ckpt")
    plain = module(Tied, seed=2)
    trainer(tmp_path, max_epochs=2, cpu=True).fit(plain, loader(), ckpt_path=tmp_path / "full.ckpt")
    assert plain.last.weight is plain.first.weight


class Compiled(Net):
    def build(self):
        super().build()
        self.first = torch.compile(self.first, backend="eager")


def test_15_a_compiled_layer_leaves_no_prefix_in_keys(tmp_path):
    compiled, _ = resumed(tmp_path, Compiled)
    plain = module(seed=1)
    one = trainer(tmp_path)
    one.validate(plain, loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert torch.equal(on_host(plain)["first.weight"], on_host(compiled)["first._orig_mod.weight"])


def test_layers_may_be_initialised_after_they_were_sharded(tmp_path):
    class Initialised(InConfigure):
        def configure_model(self):
            super().configure_model()
            torch.nn.init.constant_(self.first.weight, 0.25)

    plain, model = module(InConfigure), module(Initialised)
    for one in (plain, model):
        trainer(tmp_path).validate(one, loader(), verbose=False)
    assert specs(model) == specs(plain)
    assert (on_host(model)["first.weight"] == 0.25).all()


class Data(L.LightningDataModule):
    """A data module with a state, and several loaders for validation."""

    position = 0

    def train_dataloader(self):
        return loader(shuffle=True)

    def val_dataloader(self):
        return [loader(), loader(count=32)]

    test_dataloader = train_dataloader

    def state_dict(self):
        return {"position": 5, "weights": torch.ones(2)}

    def load_state_dict(self, state):
        self.position = state["position"]


class SeveralLoaders(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch))


def test_a_data_module_with_a_state(tmp_path):
    one, data = trainer(tmp_path), Data()
    one.fit(module(SeveralLoaders), datamodule=Data())
    one.save_checkpoint(tmp_path / "a.ckpt")
    again = trainer(tmp_path, max_epochs=2)
    again.fit(module(SeveralLoaders, seed=1), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert data.position == 5 and {"val/dataloader_idx_0", "val/dataloader_idx_1"} <= set(again.callback_metrics)
    again.test(module(SeveralLoaders), datamodule=data, verbose=False)


class Summed(Net):
    def training_step(self, batch, batch_idx):
        loss = sum(self.loss(one) for one in batch.values())
        self.losses.append(loss.detach())
        return loss


@pytest.mark.parametrize(("mode", "at"), [("max_size_cycle", 5), ("max_size_cycle", 8), ("min_size", 2)])
def test_22_several_training_loaders(mode, at, tmp_path):
    def several():
        return CombinedLoader({"a": loader(shuffle=True), "b": loader(shuffle=True, count=24)}, mode)

    resumed(tmp_path, Summed, several, at, epochs=3)


@pytest.mark.parametrize("interval", [0.5, 3])
def test_22_checkpoints_of_validation_within_an_epoch(interval, tmp_path):
    options = {"max_epochs": 2, "val_check_interval": interval}
    checkpoints = ModelCheckpoint(tmp_path / "ck", monitor="val", save_top_k=-1, filename="{step}")
    whole = module(Noisy)
    trainer(tmp_path, callbacks=[checkpoints], **options).fit(whole, loader(shuffle=True), loader())
    for name in os.listdir(tmp_path / "ck"):
        again = module(Noisy, seed=9)
        one = trainer(tmp_path, **options)
        one.fit(again, loader(shuffle=True), loader(), ckpt_path=tmp_path / "ck" / name)
        step = int(name.removeprefix("step=").removesuffix(".ckpt"))
        assert torch.equal(losses(again), losses(whole)[step:]), name


def test_22_after_an_exception_in_the_middle_of_a_step(tmp_path):
    class Broken(Noisy):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise RuntimeError("the user's error")
            return super().training_step(batch, batch_idx)

    whole = module(Noisy)
    trainer(tmp_path / "whole").fit(whole, loader(shuffle=True))
    begun = module(Broken)
    with pytest.raises(RuntimeError, match="the user's error"):
        trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)]).fit(begun, loader(shuffle=True))
    again = module(Noisy, seed=1)
    trainer(tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)]).fit(again, loader(shuffle=True), ckpt_path="last")
    assert torch.equal(torch.cat([losses(begun), losses(again)]), losses(whole))


class Measured(Net):
    """With a metric over the whole epoch, whose state is a part of the module's."""

    def build(self):
        super().build()
        self.error = torchmetrics.MeanSquaredError()
        self.error.persistent(True)

    def training_step(self, batch, batch_idx):
        self.error.update(self(batch[0]), batch[1])
        self.log("error", self.error, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


def test_16_the_state_of_a_metric_comes_back_in_the_middle_of_an_epoch(tmp_path):
    whole, one = module(Measured), trainer(tmp_path / "whole")
    one.fit(whole, loader())
    begun = module(Measured)
    saves = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=5, filename="{step}")
    trainer(tmp_path, callbacks=[saves, StopAfter(5)]).fit(begun, loader())
    again, other = module(Measured, seed=9), trainer(tmp_path)
    other.fit(again, loader(), ckpt_path=tmp_path / "ck" / "step=5.ckpt")
    assert other.callback_metrics["error"] == one.callback_metrics["error"]


def test_a_trainer_with_all_that_is_on_by_default(tmp_path):
    calls = [LearningRateMonitor(), EarlyStopping("val", patience=3)]
    one = L.Trainer(
        strategy=SPMDStrategy(), max_epochs=2, default_root_dir=tmp_path, log_every_n_steps=4, callbacks=calls
    )
    one.fit(module(), loader(), loader())
    one.test(module(seed=1), loader(), ckpt_path="best", verbose=False)
    assert os.listdir(one.checkpoint_callback.dirpath) == ["epoch=1-step=16.ckpt"]


def test_fast_dev_run(tmp_path):
    model, one = module(), L.Trainer(strategy=SPMDStrategy(), fast_dev_run=True, default_root_dir=tmp_path)
    one.fit(model, loader(), loader())
    one.test(model, loader(), verbose=False)
    assert len(model.losses) == 1 and not os.listdir(tmp_path)


def test_23_last_and_best_where_there_is_none(tmp_path):
    one, model = trainer(tmp_path, callbacks=[ModelCheckpoint(tmp_path / "ck", save_last=True)]), module()
    with pytest.raises(ValueError, match="best"):
        one.validate(model, loader(), ckpt_path="best")
    one.fit(model, loader(), ckpt_path="last")
    assert len(model.losses) == 8


def test_a_checkpoint_of_weights_alone(tmp_path):
    saves = ModelCheckpoint(tmp_path / "ck", save_weights_only=True, filename="weights")
    model = module()
    trainer(tmp_path, callbacks=[saves]).fit(model, loader())
    path = tmp_path / "ck" / "weights.ckpt"
    fresh = module(seed=1)
    trainer(tmp_path).test(fresh, loader(), ckpt_path=path, verbose=False)
    assert same(on_host(fresh), on_host(model))
    with pytest.raises(KeyError, match="contains only the model"):  # as stock Lightning
        trainer(tmp_path, max_epochs=2).fit(fresh, loader(), ckpt_path=path)
    consolidate(path, tmp_path / "plain.ckpt")
    assert same(on_host(Net.load_from_checkpoint(tmp_path / "plain.ckpt", map_location="cpu")), on_host(model))


def test_the_learning_rate_finder_leaves_the_module_as_it_was(tmp_path):
    model = module()
    model.lr = 1e-3
    before = on_host(model)
    found = Tuner(trainer(tmp_path)).lr_find(model, loader(), num_training=8)
    assert len(found.results["loss"]) == 8
    assert same(on_host(model), before) and not os.listdir(tmp_path)


def test_24_paths_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model, one = module(), trainer(tmp_path)
    one.validate(model, loader(), verbose=False)
    for path in ("~/home.ckpt", "here.ckpt", "a/../b c/ü.ckpt", f"file://{tmp_path}/url.ckpt", "new\nline.ckpt"):
        one.save_checkpoint(path, weights_only=True)
        fresh = module(seed=1)
        trainer(tmp_path).validate(fresh, loader(), ckpt_path=path, verbose=False)
        assert same(on_host(fresh), on_host(model)), path
    assert sorted(os.listdir(tmp_path)) == ["b c", "here.ckpt", "home.ckpt", "new\nline.ckpt", "url.ckpt"]
