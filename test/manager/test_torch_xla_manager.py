"""CheckpointManager as a replacement for torch_xla's manager, and for the steps that it wrote."""

import os

import pytest
import torch
import torch.distributed as dist
import torch_xla.experimental.distributed_checkpoint as torch_xla_manager

import torch_xla_ckpt as xc
from support.runs import save_steps, state

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group, which torch_xla's manager needs."""
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def program(manager, path):
    """Use a manager as a program uses torch_xla's; return everything that the program sees."""
    seen = [manager.base_path == os.path.join(path, ""), manager.save_interval, manager.chkpt_on_preemption]
    seen += [manager.should_save(step) for step in (0, 1, 2, 3)]
    seen += [manager.save(0, state(0)), manager.save(1, state(1)), manager.save(1, state(1), True)]
    seen += [
        manager.save_async(2, state(2)),
        manager.save_async(3, state(3)),
        manager.save_async(3, state(3), force=True),
    ]
    seen += [manager.join(), manager.all_steps(), manager._get_path(7).removeprefix(str(path))]
    target = {"t": torch.zeros(20), "n": None}
    seen += [manager.restore(1, target), target["t"].tolist(), target["n"]]
    return seen


def test_manager_behaves_like_torch_xlas_manager(tmp_path, group):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    options = {"save_interval": 2, "max_pending_async": 1, "num_of_threads": 2, "process_group": None}
    expected = program(torch_xla_manager.CheckpointManager(str(theirs), chkpt_on_preemption=False, **options), theirs)
    manager = xc.CheckpointManager(str(ours), chkpt_on_preemption=False, **options)
    assert program(manager, ours) == expected
    assert manager.reached_preemption(5) is False
    positional = xc.CheckpointManager(str(tmp_path / "p"), 3, 2, 1, 4, dist.group.WORLD, True)
    assert (positional.max_to_keep, positional.chkpt_on_preemption) == (2, True)
    positional.close()


def test_steps_of_torch_xlas_manager_are_restored_and_deleted_without_unpickling(tmp_path, group):
    theirs = torch_xla_manager.CheckpointManager(str(tmp_path), 1, chkpt_on_preemption=False)
    for step in range(3):
        theirs.save(step, state(step))
    (tmp_path / "1" / ".manager_metadata").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/run'\ntR."
    )
    manager = xc.CheckpointManager(tmp_path, 1, max_to_keep=2)
    assert manager.all_steps() == [0, 1, 2]
    target = state(-1)
    manager.restore(1, target)
    assert target["n"] == 1 and target["t"].eq(1).all() and not (tmp_path / "run").exists()
    save_steps(manager, 3)
    assert manager.all_steps() == [2, 3] and not (tmp_path / "0").exists()
    manager.close()


@pytest.mark.parametrize("most", [0, None])
def test_max_to_keep_of_zero_or_none_keeps_all_steps(tmp_path, most):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=most) as manager:
        save_steps(manager, *range(6))
        assert manager.all_steps() == list(range(6))


def test_impossible_options_are_refused(tmp_path):
    for options in ({"save_interval": 0}, {"max_to_keep": -1}, {"max_pending_async": 0}, {"initial": "half"}):
        with pytest.raises(ValueError):
            xc.CheckpointManager(tmp_path, **options)
    for options in ({"keep": 3}, {"when": "often"}):
        with pytest.raises(TypeError):
            xc.CheckpointManager(tmp_path, **options)
    with xc.CheckpointManager(tmp_path, 1) as manager, pytest.raises(ValueError, match="must not be negative"):
        manager.save(-1, state(0))
    with pytest.raises(xc.CheckpointError, match="the manager is closed"):
        manager.save(1, state(1))
