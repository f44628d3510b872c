"""A path without a checkpoint: the error names the steps of a run, and the path or call to use instead."""

import fsspec
import pytest
import torch

import torch_xla_ckpt as xc


@pytest.fixture(params=["local", "memory"])
def run(request, tmp_path):
    """The path of a run's folder, which is empty yet."""
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    url = "memory://absent/run"
    yield url
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(url):
        filesystem.rm(url, recursive=True)


def save_steps(run, steps):
    for step in steps:
        xc.save({"t": torch.full((3,), float(step))}, f"{run}/{step}")


READS = {
    "load": lambda path: xc.load({"t": torch.zeros(3)}, path),
    "restore": lambda path: xc.restore(path, model=torch.nn.Linear(2, 2)),
    "verify": xc.verify,
    "ShardReader": lambda path: xc.ShardReader(path).read_metadata().state_dict_metadata,
}


@pytest.mark.parametrize("read", READS)
def test_the_folder_of_a_run_is_refused_with_its_steps_and_the_right_calls(run, read):
    save_steps(run, [2, 10, 9])
    with pytest.raises(xc.CheckpointError) as caught:
        READS[read](run)
    text = str(caught.value)
    for part in ("there is no checkpoint in", "the steps 2, 9, 10.", f"{run}/10.", "restore_latest(...)"):
        assert part in text, text
    assert f"CheckpointManager({run!r})" in text


def test_the_named_path_and_the_named_call_restore_the_newest_step(run):
    save_steps(run, [2, 10])
    target = {"t": torch.zeros(3)}
    xc.load(target, f"{run}/10")
    assert target["t"].tolist() == [10, 10, 10]
    restored = torch.zeros(3)
    with xc.CheckpointManager(run) as manager:
        manager.restore_latest({"t": restored})
    assert restored.tolist() == [10, 10, 10]


def test_a_long_run_is_named_by_its_first_and_last_steps(run):
    save_steps(run, range(7))
    with pytest.raises(xc.CheckpointError, match=r"the steps 0, 1, 2, \.\.\., 4, 5, 6\."):
        xc.verify(run)


def test_the_newest_step_is_found_among_many_folders_without_a_checkpoint(tmp_path):
    save_steps(tmp_path, [1000])
    for step in [*range(50), *range(1001, 1010)]:
        (tmp_path / str(step)).mkdir()
    with pytest.raises(xc.CheckpointError, match=r"the steps 1000\. .*/1000\."):
        xc.verify(tmp_path)


def test_folders_that_are_no_steps_are_not_named(tmp_path):
    for name in ("latest", "007", "-1", "12"):
        (tmp_path / name).mkdir()
    for name in ("latest", "007", "-1"):
        xc.save({"t": torch.zeros(3)}, tmp_path / name)
    for read in READS.values():
        with pytest.raises(xc.CheckpointError, match=r"there is no checkpoint in .*: it has no \.metadata") as caught:
            read(tmp_path)
        assert "the steps" not in str(caught.value)
