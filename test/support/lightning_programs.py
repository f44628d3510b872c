"""Programs that train with SPMDStrategy, for tests that kill them or run several of them together."""

import functools
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from support import devices, hosts
from support.lightning_modules import Net, StopAfter, loader, losses, module, on_host, same, trainer
from torch_xla_ckpt import ShardWriter
from torch_xla_ckpt.integrations.lightning import SPMDStrategy, saves
from torch_xla_ckpt.staging import SPMDStager

warnings.filterwarnings("ignore")


class KilledInCommit(Callback):
    """Kills the program in one of its saves, when the data is written and nothing is committed.

    Args:
        number: the number of the save, from 1.
        step: the step that training must have reached; None if the save is not in the background.
        ready: a path that must be there.
    """

    def __init__(self, number, step, ready):
        self.step = step
        self.reached = threading.Event()
        self.saves = 0
        finish = ShardWriter.finish

        def struck(*args, **options):
            self.saves += 1
            if self.saves == number:
                assert step is None or self.reached.wait(60)
                while not ready.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return finish(*args, **options)

        ShardWriter.finish = struck

    def on_train_batch_start(self, one, *_):
        if one.global_step == self.step:
            self.reached.set()


class Requeued(Callback):
    """Saves as SLURM's signal handler does, after each second step."""

    def on_train_batch_end(self, one, *_):
        if one.global_step % 2 == 0:
            one.save_checkpoint(one._checkpoint_connector.hpc_save_path(one.default_root_dir))


def killed(folder, save_last, state_dict_type, number, step, ready):
    """Train eight steps with a save after each second step, and be killed in one of the saves.

    Args:
        save_last: an option of ``ModelCheckpoint``, or "hpc" for SLURM's saves.
        number, step, ready: see ``KilledInCommit``.
    """
    devices.set_up()
    if save_last == "hpc":
        calls = [Requeued()]
    else:
        calls = [
            ModelCheckpoint(
                Path(folder) / "ck", every_n_train_steps=2, save_top_k=1, save_last=save_last, filename="{step}"
            )
        ]
    strategy = SPMDStrategy(state_dict_type=state_dict_type)
    calls.append(KilledInCommit(number, step, Path(folder) / ready))
    trainer(folder, strategy=strategy, callbacks=calls).fit(module(), loader(shuffle=True))


def host(rank, world, rendezvous, folder):
    """Act as one host of several: train, save, and go on from the checkpoint."""
    devices.set_up()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    saves.SPMDStager = functools.partial(SPMDStager, access=hosts.share_access(rank, world))
    whole = module()
    trainer(folder, max_epochs=2).fit(whole, loader(shuffle=True))
    for kind in ("sharded", "full"):
        _resume_together(rank, Path(folder) / kind, kind, whole)
    dist.destroy_process_group()


def _resume_together(rank, folder, kind, whole):
    def run(seed, *callbacks, **options):
        checkpoints = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, save_last="link", filename="{step}")
        model = module(Net, seed)
        strategy = SPMDStrategy(state_dict_type=kind)
        one = trainer(folder.parent, strategy=strategy, callbacks=[checkpoints, *callbacks], max_epochs=2)
        assert one.world_size == 1 and one.is_global_zero == (rank == 0)
        one.fit(model, loader(shuffle=True), **options)
        return model

    begun = run(0, StopAfter(6))
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step=6.ckpt"]
    dist.barrier()
    again = run(5, ckpt_path="last")
    assert losses(begun).tolist() + losses(again).tolist() == losses(whole).tolist()
    assert same(on_host(again), on_host(whole))
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step=16.ckpt"]
    dist.barrier()
