"""SPMDStrategy and training loops: the lines of the list in docs/lightning.md, by number."""

import os
import threading

import fsspec
import pytest
import torch
import torch_xla.debug.metrics as met
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from support.lightning_modules import BATCH, Net, Noisy, Rows, StopAfter, loader, losses, module, on_host, same, trainer
from torch_xla_ckpt import CheckpointError
from torch_xla_ckpt.integrations.lightning import SPMDStrategy, consolidate
from torch_xla_ckpt.staging import AsyncSave
from torch_xla_ckpt.storage import ShardWriter

pytestmark = pytest.mark.slow


class Endless(IterableDataset):
    """Rows without a length, of which Lightning reads one ahead."""

    def __iter__(self):
        return iter(Rows())


class Shuffled(IterableDataset):
    """The same in another order in each epoch."""

    def __iter__(self):
        rows = Rows()
        return (rows[int(row)] for row in torch.randperm(len(rows)))


class Augmented(Rows):
    """Rows with noise from the program's own generator."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(x.shape), y


class Batches:
    """An iterable that is no DataLoader."""

    def __iter__(self):
        return iter(list(loader()))


def own_generator():
    return loader(shuffle=True, generator=torch.Generator().manual_seed(5))


LOADERS = {
    "sequential": loader,
    "shuffled": lambda: loader(shuffle=True),
    "shuffled by its own generator": own_generator,
    "shuffled, augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "with workers": lambda: loader(shuffle=True, num_workers=2),
    "with workers that persist": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "without a length": lambda: DataLoader(Endless(), BATCH),
    "without a length, shuffled": lambda: DataLoader(Shuffled(), BATCH),
    "any iterable": Batches,
    "stateful": lambda: StatefulDataLoader(Rows(), BATCH, shuffle=True),
    "stateful with workers": lambda: StatefulDataLoader(Rows(), BATCH, shuffle=True, num_workers=2),
    "stateful without a length": lambda: StatefulDataLoader(Endless(), BATCH),
}


def every(n, tmp_path, **options):
    return ModelCheckpoint(tmp_path / "ck", every_n_train_steps=n, save_top_k=-1, filename="{step}", **options)


def resumed(tmp_path, make, kind=Noisy, first=None, second=None, at=5, epochs=2, path=None):
    """Losses of a run, and of one that stops in the middle of an epoch and goes on in another Trainer."""
    whole = module(kind)
    trainer(tmp_path / "whole", max_epochs=epochs, **(first or {})).fit(whole, make())
    begun = module(kind)
    stopped = trainer(tmp_path, callbacks=[every(at, tmp_path), StopAfter(at)], max_epochs=epochs, **(first or {}))
    stopped.fit(begun, make())
    again = module(kind, seed=9)
    path = path or tmp_path / "ck" / f"step={at}.ckpt"
    trainer(tmp_path, max_epochs=epochs, **(second or first or {})).fit(again, make(), ckpt_path=path)
    return losses(whole), torch.cat([losses(begun)[:at], losses(again)]), whole, again


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_22_resuming_in_an_epoch_goes_on_bit_for_bit(make, tmp_path):
    expected, found, whole, again = resumed(tmp_path, make)
    assert torch.equal(found, expected)
    assert same(on_host(again), on_host(whole))


@pytest.mark.parametrize("at", [1, 7, 8, 9, 15, 16])
def test_22_wherever_it_stops(at, tmp_path):
    expected, found, *_ = resumed(tmp_path, LOADERS["shuffled"], at=at)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("make", "at"), [("without a length, shuffled", 8), ("with workers that persist", 11)])
def test_22_orders_of_the_second_epoch(make, at, tmp_path):
    expected, found, *_ = resumed(tmp_path, LOADERS[make], at=at)
    assert torch.equal(found, expected)


class OwnSampler(torch.utils.data.Sampler):
    """A sampler whose order depends on the epoch, as those of distributed training do."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 64

    def __iter__(self):
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_22_a_sampler_that_knows_the_epoch(tmp_path):
    expected, found, *_ = resumed(tmp_path, lambda: DataLoader(Rows(), BATCH, sampler=OwnSampler()), at=11)
    assert torch.equal(found, expected)


def test_22_with_max_steps(tmp_path):
    expected, found, *_ = resumed(tmp_path, LOADERS["shuffled"], first={"max_steps": 14}, at=8)
    assert torch.equal(found, expected)


def test_22_with_gradient_accumulation_and_a_batch_limit(tmp_path):
    options = {"limit_train_batches": 6, "accumulate_grad_batches": 2}
    whole = module()
    trainer(tmp_path / "whole", max_epochs=2, **options).fit(whole, own_generator())
    begun = module()
    calls = [every(2, tmp_path), StopAfter(2)]
    trainer(tmp_path, callbacks=calls, max_epochs=2, **options).fit(begun, own_generator())
    again = module(seed=9)
    path = tmp_path / "ck" / "step=2.ckpt"
    trainer(tmp_path, max_epochs=2, **options).fit(again, own_generator(), ckpt_path=path)
    assert torch.equal(torch.cat([losses(begun)[:4], losses(again)]), losses(whole))


def test_22_on_another_mesh_losses_agree(tmp_path):
    expected, found, *_ = resumed(
        tmp_path, LOADERS["shuffled"], Noisy, {"mesh": {"fsdp": 8}}, {"mesh": {"fsdp": 4, "tensor": 2}}
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_22_a_consolidated_file_goes_on_too_and_stock_lightning_takes_it(tmp_path):
    file = tmp_path / "full.ckpt"

    class Consolidate(Callback):
        def on_fit_end(self, trainer, model):
            consolidate(tmp_path / "ck" / "step=5.ckpt", file)

    begun = module()
    calls = [every(5, tmp_path), StopAfter(5), Consolidate()]
    trainer(tmp_path, callbacks=calls, max_epochs=2).fit(begun, loader())
    again, plain = module(seed=9), module(seed=9)
    trainer(tmp_path, max_epochs=2).fit(again, loader(), ckpt_path=file)
    assert len(again.losses) == 11
    trainer(tmp_path, cpu=True, max_epochs=2).fit(plain, loader(), ckpt_path=file)  # which repeats the first batches
    assert len(plain.losses) == 11


# 23


class Slow:
    """Lets no async save commit until it is told to."""

    def __init__(self, monkeypatch):
        self.may_commit = threading.Event()
        self.results = 0
        result = AsyncSave.result

        def late(handle, timeout=None):
            assert self.may_commit.wait(60)
            self.results += 1
            return result(handle, timeout)

        monkeypatch.setattr(AsyncSave, "result", late)


class Watch(Callback):
    """Notes the checkpoints that are there at each step, and does something at one of them."""

    def __init__(self, folder, at=None, action=None):
        self.folder, self.at, self.action, self.seen = folder, at, action, {}

    def on_train_batch_start(self, trainer, *_):
        self.seen[trainer.global_step] = sorted(os.listdir(self.folder)) if self.folder.exists() else []
        if trainer.global_step == self.at:
            self.action()


def test_23_a_replaced_checkpoint_is_removed_only_after_its_successor_is_committed(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    one = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=2, save_top_k=1, filename="{step}")
    watch = Watch(tmp_path / "ck", at=5, action=slow.may_commit.set)
    trainer(tmp_path, callbacks=[one, watch]).fit(module(), loader())
    assert "step=2.ckpt" in watch.seen[5]  # the save of step 4 was not done, although Lightning asked for the removal
    assert os.listdir(tmp_path / "ck") == ["step=8.ckpt"]
    assert slow.results == 4


def test_23_fit_returns_when_all_is_committed(tmp_path):
    one = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=3, save_top_k=-1, save_last=True, filename="{step}")
    model = module()
    trainer(tmp_path, callbacks=[one]).fit(model, loader())
    assert sorted(os.listdir(tmp_path / "ck")) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    assert all(".metadata" in os.listdir(tmp_path / "ck" / name) for name in os.listdir(tmp_path / "ck"))


def test_23_the_loop_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    watch = Watch(tmp_path / "ck", at=7, action=slow.may_commit.set)
    trainer(tmp_path, callbacks=[every(2, tmp_path), watch], max_steps=8).fit(module(), loader())
    assert slow.results == 4  # nothing was waited for until step 7


def test_23_the_error_of_a_save_surfaces_at_the_next_step(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(ShardWriter, "write_data", fails)
    model = module()
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer(tmp_path, callbacks=[every(2, tmp_path)], max_epochs=50).fit(model, loader())
    assert len(model.losses) < 100


def test_23_a_failed_save_keeps_what_it_was_to_replace(tmp_path, monkeypatch):
    write, calls = ShardWriter.write_data, []

    def fails(*args, **options):
        calls.append(1)
        if len(calls) > 1:
            raise OSError("the disk is full")
        return write(*args, **options)

    monkeypatch.setattr(ShardWriter, "write_data", fails)
    one = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=2, save_top_k=1, filename="{step}")
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer(tmp_path, callbacks=[one], max_epochs=50).fit(module(), loader())
    fresh = module(seed=1)
    trainer(tmp_path).validate(fresh, loader(), ckpt_path=tmp_path / "ck" / "step=2.ckpt", verbose=False)


def test_23_an_error_of_training_is_not_hidden(tmp_path):
    def fail():
        raise ZeroDivisionError("the user's error")

    calls = [every(2, tmp_path), Watch(tmp_path / "ck", at=3, action=fail)]
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, callbacks=calls).fit(module(), loader())
    assert ".metadata" in os.listdir(tmp_path / "ck" / "step=2.ckpt")  # what had begun is committed


@pytest.mark.parametrize("full", [False, True])
def test_23_top_k_last_and_best(full, tmp_path):
    one = ModelCheckpoint(tmp_path / "ck", monitor="val", save_top_k=2, save_last=True, filename="{epoch}")
    model = module()
    strategy = SPMDStrategy(state_dict_type="full" if full else "sharded")
    first = trainer(tmp_path, callbacks=[one], max_epochs=4, strategy=strategy)
    first.fit(model, loader(), loader())
    assert sorted(os.listdir(tmp_path / "ck")) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    for name in ("best", "last"):
        fresh = module(seed=1)
        first.validate(fresh, loader(), ckpt_path=name, verbose=False)
        assert same(on_host(fresh), on_host(model))
    fresh = module(seed=1)
    again = ModelCheckpoint(tmp_path / "ck", monitor="val", save_top_k=2, save_last=True, filename="{epoch}")
    second = trainer(tmp_path, callbacks=[again], max_epochs=5)
    if not full:
        second.fit(fresh, loader(), loader(), ckpt_path="last")
        assert len(fresh.losses) == 8
        assert "epoch=4.ckpt" in os.listdir(tmp_path / "ck")


def test_23_links(tmp_path):
    one = every(3, tmp_path, save_last="link")
    model = module()
    trainer(tmp_path, callbacks=[one]).fit(model, loader())
    assert os.readlink(tmp_path / "ck" / "last.ckpt") == "step=6.ckpt"
    again = module(seed=1)
    trainer(tmp_path, max_epochs=2).fit(again, loader(), ckpt_path=tmp_path / "ck" / "last.ckpt")
    assert len(again.losses) == 10


def test_23_slurms_checkpoint_is_committed_on_return(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    found = []

    def save():
        path = one._checkpoint_connector.hpc_save_path(str(tmp_path))
        one.save_checkpoint(path)
        found.append((path, ".metadata" in os.listdir(path)))
        slow.may_commit.set()

    one = trainer(tmp_path, callbacks=[Watch(tmp_path, at=3, action=save)])
    one.fit(module(), loader())
    assert found == [(str(tmp_path / "hpc_ckpt_1.ckpt"), True)]
    again = module(seed=1)
    trainer(tmp_path, max_epochs=1).fit(again, loader(), ckpt_path="hpc")
    assert len(again.losses) == 5


def test_24_model_checkpoint_writes_to_urls(tmp_path):
    folder = f"memory://lightning/{tmp_path.name}"
    one = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=1, filename="{step}")
    trainer(tmp_path, callbacks=[one]).fit(module(), loader())
    names = {path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls(folder, detail=False)}
    assert names == {"step=6.ckpt"}
    again = module(seed=1)
    trainer(tmp_path).fit(again, loader(), ckpt_path=one.best_model_path)
    assert len(again.losses) == 2


# 26


def counters():
    compiled = met.metric_data("CompileTime")
    return {
        "graphs": compiled[0] if compiled else 0,
        "syncs": met.counter_value("MarkStep") or 0,
        "fetches": (met.metric_data("TransferFromDeviceTime") or [0])[0],
    }


class Count(Callback):
    """The counters at the beginning of each step."""

    def __init__(self):
        self.at = []

    def on_train_batch_start(self, *_):
        self.at.append(counters())


class Logging(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class LoggingEpochs(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss


class Warming(Logging):
    """With a learning rate that changes at each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Net, {}),
        (Logging, {}),
        (LoggingEpochs, {}),
        (LoggingEpochs, {"val_check_interval": 4}),
        (Warming, {"gradient_clip_val": 0.5}),
        (Net, {"accumulate_grad_batches": 2}),
        (Net, {"precision": "bf16-mixed"}),
    ],
)
def test_26_one_sync_a_step_no_graph_after_the_second_step_and_no_fetch(kind, options, tmp_path):
    count, validates = Count(), "val_check_interval" in options
    one = trainer(tmp_path, callbacks=[count], max_epochs=3, num_sanity_val_steps=0, **options)
    one.fit(module(kind), loader(), loader() if validates else None)
    steps = [tuple(b[key] - a[key] for key in a) for a, b in zip(count.at, count.at[1:])]
    between = {7, 15, *([3, 11, 19] if validates else [])}  # after these, an epoch ends, or an evaluation runs
    for number, (graphs, syncs, fetches) in enumerate(steps):
        if number not in between:
            assert syncs == 1 and fetches == 0, (number, steps)
            assert not graphs or number < (4 if "accumulate_grad_batches" in options else 2), (number, steps)
    later = [graphs for number, (graphs, *_) in enumerate(steps) if number > 8]
    assert not any(later), steps  # what ends an epoch and what evaluates is compiled once, too


def test_26_a_logger_fetches_at_its_own_steps_only(tmp_path):
    count = Count()
    options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 4}
    trainer(tmp_path, callbacks=[count, LearningRateMonitor()], **options).fit(module(Logging), loader())
    fetches = [b["fetches"] - a["fetches"] for a, b in zip(count.at, count.at[1:])]
    assert [number for number, fetched in enumerate(fetches) if fetched] == [3]


def test_26_saves_compile_one_graph_in_all(tmp_path):
    count = Count()
    trainer(tmp_path, callbacks=[count, every(2, tmp_path)], max_epochs=2).fit(module(), loader())
    graphs = [b["graphs"] - a["graphs"] for a, b in zip(count.at, count.at[1:])]
    assert not any(graphs[3:7]) and not any(graphs[9:]), graphs


def test_26_a_step_in_which_the_optimizer_does_not_run_is_one_sync(tmp_path):
    class Skips(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            closure() if batch_idx % 2 else super().optimizer_step(epoch, batch_idx, optimizer, closure)

    class ReturnsNone(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    for kind in (Skips, ReturnsNone):
        count = Count()
        trainer(tmp_path, callbacks=[count]).fit(module(kind), loader())
        assert all(b["syncs"] - a["syncs"] == 1 for a, b in zip(count.at, count.at[1:]))


def test_26_a_step_of_two_optimizers_is_one_sync(tmp_path):
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]

    count = Count()
    trainer(tmp_path, callbacks=[count]).fit(module(Two), loader())
    assert all(b["syncs"] - a["syncs"] == 1 for a, b in zip(count.at, count.at[1:]))
