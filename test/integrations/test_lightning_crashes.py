"""SPMDStrategy in programs that are killed, and in several programs that train together."""

import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from support import lightning_programs
from support.lightning_modules import loader, losses, module, trainer
from support.programs import Program, wait_for_all
from torch_xla_ckpt import CheckpointError

pytestmark = pytest.mark.slow


def killed(tmp_path, save_last, state_dict_type, number, step, ready="."):
    """Run a program that is killed in the save with a number; see ``lightning_programs.KilledInCommit``."""
    arguments = (str(tmp_path), save_last, state_dict_type, number, step, ready)
    program = Program(lightning_programs.killed, arguments, tmp_path / "output.txt")
    assert program.wait(120) == -signal.SIGKILL, (tmp_path / "output.txt").read_text()


def resumed(tmp_path, save_last):
    """Losses of a program that goes on from the last checkpoint, if there is one."""
    model = module()
    checkpoints = ModelCheckpoint(tmp_path / "ck", every_n_train_steps=2, save_last=save_last, filename="{step}")
    trainer(tmp_path, callbacks=[checkpoints]).fit(model, loader(shuffle=True), ckpt_path="last")
    return losses(model)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of a run that is not killed."""
    model = module()
    trainer(tmp_path_factory.mktemp("whole")).fit(model, loader(shuffle=True))
    return losses(model)


def test_a_program_that_is_killed_in_its_first_save_begins_again(expected, tmp_path):
    killed(tmp_path, True, "sharded", 2, 3)  # the first save has another name
    assert torch.equal(resumed(tmp_path, True), expected)


def test_25_a_half_written_checkpoint_is_named_with_whole_ones_beside_it_and_the_link_leads_to_one(expected, tmp_path):
    killed(tmp_path, "link", "sharded", 2, 5, "ck/last.ckpt")
    with pytest.raises(CheckpointError, match=r"never committed.*beside it: (last|step=2)\.ckpt"):
        trainer(tmp_path).fit(module(), loader(), ckpt_path=tmp_path / "ck" / "step=4.ckpt")
    assert os.readlink(tmp_path / "ck" / "last.ckpt") == "step=2.ckpt"
    assert torch.equal(resumed(tmp_path, "link"), expected[-6:])


def test_23_slurms_restart_finds_the_last_whole_checkpoint(expected, tmp_path):
    killed(tmp_path, "hpc", "full", 2, None)
    model = module(seed=1)
    trainer(tmp_path).fit(model, loader(shuffle=True), ckpt_path="hpc")
    assert torch.equal(losses(model), expected[-6:])


def test_13_several_hosts_save_and_go_on_together(tmp_path):
    outputs = [tmp_path / f"output-{rank}.txt" for rank in range(2)]
    programs = [
        Program(lightning_programs.host, (rank, 2, str(tmp_path / "rendezvous"), str(tmp_path)), output)
        for rank, output in enumerate(outputs)
    ]
    assert wait_for_all(programs, 200) == [0, 0], "\n".join(output.read_text() for output in outputs)
    names = os.listdir(tmp_path / "sharded" / "step=16.ckpt")
    assert {name[:4] for name in names if name.endswith(".distcp")} == {"__0_", "__1_"}
    assert (tmp_path / "full" / "step=16.ckpt").is_file()
