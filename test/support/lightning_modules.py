"""Small Lightning modules, loaders and trainers for tests of ``SPMDStrategy``."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from support.meshes import spec_of
from support.training import assembled
from torch_xla_ckpt.integrations.lightning import SPMDStrategy

WIDTH, CLASSES, BATCH = 16, 8, 8


class Rows(Dataset):
    """Rows of random numbers, the same in every process."""

    def __init__(self, count=64):
        self.x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index, :CLASSES]


class Net(L.LightningModule):
    """Two layers that are built in ``__init__``."""

    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.losses = []
        self.build()

    def build(self):
        self.first = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.last = torch.nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class InSetup(Net):
    """The same layers, built in ``setup``."""

    def build(self):
        self.first = None

    def setup(self, stage):
        if self.first is None:
            super().build()


class InConfigure(InSetup):
    """The same layers, built in ``configure_model``."""

    def setup(self, stage):
        pass

    def configure_model(self):
        if self.first is None:
            Net.build(self)


class OnMeta(InSetup):
    """The same layers on the meta device."""

    def setup(self, stage):
        pass

    def configure_model(self):
        if self.first is None:
            with torch.device("meta"):
                Net.build(self)


class Noisy(Net):
    """With dropout, whose random numbers come from the devices."""

    def forward(self, x):
        return self.last(torch.nn.functional.dropout(torch.relu(self.first(x)), 0.2, self.training))


class StopAfter(Callback):
    """Ends training after a number of steps, as a signal would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


def loader(shuffle=False, count=64, **options):
    return DataLoader(Rows(count), BATCH, shuffle=shuffle, **options)


def trainer(tmp_path, mesh=None, callbacks=(), cpu=False, strategy=None, **options):
    """A quiet trainer with ``SPMDStrategy``, or a plain one on the CPU."""
    keep = {"enable_checkpointing": any("Checkpoint" in type(one).__name__ for one in callbacks)}
    keep |= {"accelerator": "cpu", "devices": 1} if cpu else {"strategy": strategy or SPMDStrategy(mesh=mesh)}
    return L.Trainer(
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": list(callbacks),
            **keep,
            **options,
        }
    )


def module(kind=Net, seed=0, **options):
    L.seed_everything(seed, verbose=False)
    return kind(**options)


def on_host(model):
    """The module's state in host memory, read without this package."""
    return {
        key: assembled(value) if value.device.type == "xla" else value.detach().clone()
        for key, value in model.state_dict().items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def specs(model):
    return {name: spec_of(param) for name, param in model.named_parameters()}


def losses(model):
    return torch.tensor([loss.item() for loss in model.losses])
