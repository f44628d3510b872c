"""Train a small language model with Lightning, kill the program, and go on with another mesh and the same losses.

    python docs/examples/train_with_lightning.py

Runs on eight virtual CPU devices unless the environment names others.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import signal
import subprocess
import sys
import tempfile
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from torch_xla_ckpt.integrations.lightning import SPMDStrategy

TEXT = "the quick brown fox jumps over the lazy dog while five boxing wizards vex it. " * 40
LETTERS = sorted(set(TEXT))
LENGTH, STEPS, KILLED_AFTER = 32, 18, 13


class LanguageModel(L.LightningModule):
    """One transformer layer that predicts the next letter."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = torch.nn.Embedding(len(LETTERS), width)
        self.place = torch.nn.Embedding(LENGTH, width)
        self.layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)
        self.losses = {}

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch[:, :-1]) + self.place.weight
        logits = self.head(self.layer(hidden, src_mask=self.mask, is_causal=True))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses[self.global_step] = loss.detach()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Kill(Callback):
    """Ends the program as a lost machine would, in the middle of an epoch."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, mesh, seed, callbacks=()):
    """Go on from the last checkpoint in the folder, or begin; return the loss of each step that was trained."""
    L.seed_everything(seed, verbose=False)
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    loader = DataLoader(letters.unfold(0, LENGTH + 1, 8).contiguous(), batch_size=16, shuffle=True)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=0, save_last=True)
    trainer = L.Trainer(
        strategy=SPMDStrategy(
            mesh=mesh, sharding={"layer.linear*.weight": ("fsdp", None), "embed.weight": (None, "fsdp")}
        ),
        max_steps=STEPS,
        callbacks=[checkpoints, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LanguageModel()
    trainer.fit(model, loader, ckpt_path="last")
    return {step: loss.item() for step, loss in model.losses.items()}


def main():
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = train(os.path.join(folder, "uninterrupted"), {"fsdp": 8}, seed=0)
        killed = subprocess.run([sys.executable, __file__, os.path.join(folder, "run")], check=False)
        assert killed.returncode == -signal.SIGKILL
        # Another mesh, and other initial weights: everything that counts comes from the checkpoint.
        resumed = train(os.path.join(folder, "run"), {"fsdp": 4, "tensor": 2}, seed=1)

    assert list(resumed) in (list(range(5, STEPS)), list(range(10, STEPS))), "it goes on after a committed checkpoint"
    for step, loss in resumed.items():
        assert abs(loss - uninterrupted[step]) <= 1e-4 * uninterrupted[step], (step, loss, uninterrupted[step])
    print(
        f"OK: killed after {KILLED_AFTER} steps, resumed at step {min(resumed)} on another mesh; the losses of steps "
        f"{min(resumed)} to {STEPS - 1} are those of an uninterrupted run"
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        train(sys.argv[1], {"fsdp": 8}, seed=0, callbacks=[Kill()])
    else:
        main()
