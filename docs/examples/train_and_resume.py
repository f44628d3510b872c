"""Train with a CheckpointManager, then resume in a new model and optimizer, and check that the losses are the same.

    python docs/examples/train_and_resume.py

Runs on eight virtual CPU devices unless the environment names others.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import tempfile

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import torch_xla_ckpt as xc

STEPS, STOP_AFTER = 8, 4


class Training:
    """A model, an optimizer, a learning rate scheduler, and the data's random generator."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.mesh = xs.Mesh(np.arange(8), (4, 2), ("fsdp", "tensor"))
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to("xla")
        xs.mark_sharding(self.model[0].weight, self.mesh, ("fsdp", "tensor"))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, STEPS)

    def train_step(self):
        inputs = torch.rand(32, 64)
        labels = inputs.sum(dim=1, keepdim=True).to("xla")
        inputs = inputs.to("xla")
        xs.mark_sharding(inputs, self.mesh, ("fsdp", None))
        loss = (self.model(inputs) - labels).square().mean()
        loss.backward()
        self.optim.step()
        self.scheduler.step()
        self.optim.zero_grad()
        torch_xla.sync()
        return loss.item()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optim": self.optim.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }


def train(folder, seed, last_step):
    """Go on from the newest step in the folder, or begin; return the loss of each step that was trained."""
    training = Training(seed)
    losses = {}
    # rng=True also saves the random generators, which decide about the next batch.
    with xc.CheckpointManager(folder, save_interval=2, max_to_keep=2, rng=True) as manager:
        last = manager.restore_latest(model=training.model, optimizer=training.optim, scheduler=training.scheduler)
        for step in range(0 if last is None else last + 1, last_step + 1):
            losses[step] = training.train_step()
            # Saves every second step, and the last step of the program in any case.
            manager.save_async(step, training.state(), force=step == last_step, metrics={"loss": losses[step]})
        manager.wait()
        print(manager.history())
    return losses


def main():
    xr.use_spmd()
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = train(os.path.join(folder, "uninterrupted"), seed=0, last_step=STEPS - 1)
        before = train(os.path.join(folder, "run"), seed=0, last_step=STOP_AFTER - 1)
        # The second program has other initial weights; everything that counts comes from the checkpoint.
        after = train(os.path.join(folder, "run"), seed=1, last_step=STEPS - 1)

    assert sorted(after) == list(range(STOP_AFTER, STEPS)), "the second program trains only the remaining steps"
    assert {**before, **after} == uninterrupted, "the losses are those of the uninterrupted run, bit by bit"
    print(f"OK: stopped after {STOP_AFTER} steps and resumed; all {STEPS} losses equal those of an uninterrupted run")


if __name__ == "__main__":
    main()
