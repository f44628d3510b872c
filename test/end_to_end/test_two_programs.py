"""Two programs at one path: whichever commits first wins, the other is told, and no checkpoint is lost."""

import os
import sys
import threading
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support import interpreters
from support.s3 import Server, asks, broken_after
from support.stepwise_saves import files_at, steps_of, value_at
from torch_xla_ckpt.manager.deletion import StepDeletion
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.storage import checkpoint_index, file_names, files, lease, leftover_files, verify_files
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location

pytestmark = pytest.mark.slow

verify_module = sys.modules["torch_xla_ckpt.storage.verify"]


@pytest.fixture(scope="module")
def s3():
    with Server() as server, server.bucket("two-programs") as bucket:
        yield bucket


@pytest.fixture(params=["local", "memory", "s3"])
def place(request, tmp_path):
    """A new path, and what fsspec needs for it."""
    if request.param == "local":
        return str(tmp_path / "checkpoint"), None
    if request.param == "memory":
        return f"memory://two-programs/{uuid.uuid4().hex}", None
    bucket = request.getfixturevalue("s3")
    return f"s3://{bucket.name}/{uuid.uuid4().hex}", bucket.server.options


def interleave(path, options, order, dies):
    """Run saves step by step in an order; after each step, what was committed last must be there, whole.

    Args:
        order: numbers of saves, one for each step.
        dies: saves whose process ends after so many steps.
    """
    saves = {number: steps_of(path, options, float(number)) for number in set(order)}
    writers, taken, ended = {}, dict.fromkeys(saves, 0), set()
    current = value_at(path, options)
    for number in order:
        if number in ended:
            continue
        if dies.get(number) == taken[number]:
            if number in writers and writers[number]._beginning is not None:
                writers[number]._beginning.wait().lease.end()  # as if its process were gone
            ended.add(number)
            continue
        taken[number] += 1
        try:
            writers[number] = next(saves[number])
        except StopIteration:
            current = float(number)
            ended.add(number)
        except xc.ConcurrentSaveError as error:
            assert "another" in str(error) or "save " in str(error)
            ended.add(number)
        assert value_at(path, options) == current
    return current


orders = st.lists(st.integers(1, 3), min_size=4, max_size=16)
deaths = st.dictionaries(st.integers(1, 3), st.integers(0, 3), max_size=2)


@settings(max_examples=60)
@given(order=orders, dies=deaths, old=st.booleans())
def test_whatever_the_order_the_last_commit_is_there_whole(tmp_path_factory, order, dies, old):
    for path in (str(tmp_path_factory.mktemp("run") / "c"), f"memory://two-programs/{uuid.uuid4().hex}"):
        if old:
            xc.save({"t": torch.zeros(100)}, path, sync=False)
        interleave(path, None, order, dies)
        xc.save({"t": torch.full((100,), 9.0)}, path, sync=False)
        assert value_at(path, None) == 9.0


@settings(max_examples=10)
@given(order=orders, dies=deaths)
def test_whatever_the_order_the_last_commit_is_there_whole_in_s3(s3, order, dies):
    path, options = f"s3://{s3.name}/{uuid.uuid4().hex}", s3.server.options
    interleave(path, options, order, dies)


@pytest.mark.parametrize("old", [False, True])
def test_the_loser_is_told_who_won_and_leaves_nothing(place, old):
    path, options = place
    if old:
        xc.save({"t": torch.zeros(100)}, storage_writer=xc.ShardWriter(path, storage_options=options))
    slow = steps_of(path, options, 1.0)
    for _ in range(3):
        next(slow)
    xc.save({"t": torch.full((100,), 2.0)}, storage_writer=xc.ShardWriter(path, step=42, storage_options=options))
    with pytest.raises(xc.ConcurrentSaveError, match=rf"of step 42 by process {os.getpid()} on .*, committed at"):
        next(slow)
    assert value_at(path, options) == 2.0
    assert len(files_at(path, options)) == 3, files_at(path, options)


def test_a_save_that_may_be_alive_keeps_its_files(place):
    """It cannot commit any more, and finds that out by itself."""
    path, options = place
    slow = steps_of(path, options, 1.0)
    for _ in range(3):
        next(slow)
    own = files_at(path, options)
    xc.save({"t": torch.full((100,), 2.0)}, storage_writer=xc.ShardWriter(path, storage_options=options))
    assert own <= files_at(path, options)


def test_a_save_after_another_replaces_it(place):
    path, options = place
    for value in (1.0, 2.0, 3.0):
        for _ in steps_of(path, options, value):
            pass
        assert value_at(path, options) == value
        assert len(files_at(path, options)) == 3


def prepared(path, options, value, rank=None):
    """A save that has all but committed."""
    save = steps_of(path, options, value, rank)
    for _ in range(3):
        next(save)
    return save


def test_a_save_whose_files_are_removed_while_it_runs_is_not_committed(place):
    """Otherwise it reports success, and nothing can be loaded."""
    path, options = place
    save = prepared(path, options, 1.0)
    open_folder(Location.of(path, options)).remove([*files_at(path, options)])
    with pytest.raises(xc.CheckpointError, match=r"was not committed: __0_0-.* cannot be seen"):
        next(save)
    assert value_at(path, options) is None


def test_a_store_that_lists_late_is_asked_for_the_files_of_a_save_by_name(place, monkeypatch):
    path, options = place
    save = prepared(path, options, 1.0)
    monkeypatch.setattr(type(open_folder(Location.of(path, options))), "listing", lambda self: {})
    list(save)
    monkeypatch.undo()
    assert value_at(path, options) == 1.0


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("loser, winner", [(None, 0), (0, None), (None, 1)])
def test_of_a_save_of_all_ranks_and_one_of_a_single_rank_the_first_to_commit_wins(place, loser, winner, old):
    path, options = place
    if old:
        list(steps_of(path, options, 0.0, rank=0))
    slow = prepared(path, options, 1.0, loser)
    list(steps_of(path, options, 2.0, winner))
    with pytest.raises(xc.ConcurrentSaveError):
        next(slow)
    metadata = file_names.metadata_name(winner)
    assert {name for name in files_at(path, options) if name.endswith(".metadata")} - {"__0.metadata"} <= {metadata}
    found = checkpoint_index.read_index(open_folder(Location.of(path, options)), winner)
    assert set(found.manifest.files) <= files_at(path, options)


@pytest.mark.parametrize("loser, winner", [(None, 0), (0, None)])
def test_a_commit_between_the_last_look_and_the_lock_is_seen(tmp_path, monkeypatch, loser, winner):
    path, locked = str(tmp_path), files.locked
    slow, others = prepared(path, None, 1.0, loser), [steps_of(path, None, 2.0, winner)]

    def late(folder):
        if others:
            list(others.pop())
        return locked(folder)

    monkeypatch.setattr(files, "locked", late)
    with pytest.raises(xc.ConcurrentSaveError):
        next(slow)


def test_a_commit_whose_answer_was_lost_is_not_taken_for_another_programs(s3):
    """s3fs repeats the request, and its condition does not hold any more: for what it has written itself."""
    path, options = f"s3://{s3.name}/lost-answer", s3.server.options
    for value in (1.0, 2.0):
        with s3.server.failing(broken_after, asks("PutObject", ".metadata"), times=1) as met:
            for _ in steps_of(path, options, value):
                pass
        assert met
        assert value_at(path, options) == value


def test_a_checkpoint_that_lists_late_is_not_replaced_unseen(place, monkeypatch):
    """Some stores show what was put only later. The old checkpoint is read, not looked for in a listing."""
    path, options = place
    xc.save({"t": torch.zeros(100)}, storage_writer=xc.ShardWriter(path, storage_options=options))
    before = files_at(path, options)
    folder = type(open_folder(Location.of(path, options)))
    listing = folder.listing
    hidden = lambda self: {n: e for n, e in listing(self).items() if n != ".metadata"}  # noqa: E731
    monkeypatch.setattr(folder, "listing", hidden)
    slow = steps_of(path, options, 1.0)
    for _ in range(3):
        next(slow)
    slow.close()
    assert before <= files_at(path, options) | {".metadata"}
    assert value_at(path, options) == 0.0


# A program that deletes a step beside one that saves there.


def step_of(path, options):
    """A run's step 1, and the steps of a save to it that has all but committed."""
    return Steps(Location.of(path, options)), prepared(f"{path}/1", options, 1.0)


def test_deleting_a_step_spares_a_save_that_commits_while_leases_are_read(place, monkeypatch):
    """Its lease has ended by then, and its files were listed before."""
    path, options = place
    steps, save = step_of(path, options)
    live_saves = leftover_files.live_saves

    def late(*args):
        list(save)
        return live_saves(*args)

    monkeypatch.setattr(leftover_files, "live_saves", late)
    with pytest.raises(OSError, match="is committed again, so its files stay"):
        StepDeletion(steps).clear(1)
    assert value_at(f"{path}/1", options) == 1.0


def test_deleting_a_step_of_torch_xlas_manager_spares_a_save_that_is_alive(place):
    path, options = place
    steps, save = step_of(path, options)
    for name in ("__0_0.distcp", ".manager_metadata"):
        steps.folder(1).put(name, b"torch_xla's")
    assert StepDeletion(steps).clear(1, stock=True) is False, "the folder of a save that is alive must stay"
    list(save)
    assert value_at(f"{path}/1", options) == 1.0
    assert len(files_at(f"{path}/1", options)) == 3


OTHER = """
import sys, torch, torch_xla_ckpt as xc
for line in sys.stdin:
    value = float(line)
    try:
        xc.save({"t": torch.full((100,), value)}, sys.argv[1], sync=False)
        print("saved", flush=True)
    except xc.ConcurrentSaveError as error:
        print("lost", flush=True)
"""


def test_two_programs_that_save_all_the_time_leave_a_whole_checkpoint(tmp_path):
    """Real processes, at full speed; every save is made or told to have lost, and the last one made is there."""
    programs = [interpreters.Program(["-c", OTHER, tmp_path / "c"]) for _ in range(2)]
    numbers = range(1, 41)
    said = [None, None]

    def talk(n):
        text = "".join(f"{n * 100 + i}\n" for i in numbers)
        said[n] = programs[n].communicate(text, timeout=120)[0].split()

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(words) == len(numbers) and set(words) <= {"saved", "lost"} for words in said), said
    assert "saved" in said[0] + said[1]
    made = {n * 100 + i for n in range(2) for i, word in zip(numbers, said[n]) if word == "saved"}
    assert value_at(str(tmp_path / "c"), None) in made
    assert xc.verify(tmp_path / "c").ok


def test_a_reader_gets_one_whole_checkpoint_while_it_is_replaced(tmp_path):
    """The files it has begun with go away: it begins again, and says so."""
    path = tmp_path / "c"
    xc.save({"t": torch.full((100,), 1.0)}, path)

    class Late(xc.ShardReader):
        replaced = 0

        def read_data(self, plan, planner):
            if self.replaced < 2:
                self.replaced += 1
                xc.save({"t": torch.full((100,), 1.0 + self.replaced)}, path)
            return super().read_data(plan, planner)

    state = {"t": torch.zeros(100)}
    report = xc.load(state, storage_reader=Late(path))
    assert report.restarts == 2 and "restarted 2 times" in str(report)
    assert state["t"].eq(3).all()


def test_a_reader_of_what_is_removed_is_not_told_of_damage(tmp_path):
    path = tmp_path / "c"
    xc.save({"t": torch.full((100,), 1.0)}, path)

    class Late(xc.ShardReader):
        def read_data(self, plan, planner):
            for file in sorted(path.iterdir()):
                file.unlink()
            return super().read_data(plan, planner)

    with pytest.raises(xc.CheckpointError, match="there is no checkpoint"):
        xc.load({"t": torch.zeros(100)}, storage_reader=Late(path))


def test_a_reader_that_never_catches_up_gives_up_without_calling_it_damage(tmp_path):
    path = tmp_path / "c"
    xc.save({"t": torch.zeros(100)}, path)

    class Late(xc.ShardReader):
        def read_data(self, plan, planner):
            xc.save({"t": torch.ones(100)}, path, sync=False)
            return super().read_data(plan, planner)

    with pytest.raises(xc.ReplacedCheckpointError, match="was replaced"):
        xc.load({"t": torch.zeros(100)}, storage_reader=Late(path))


def test_damage_of_the_current_checkpoint_is_told_as_before(tmp_path):
    xc.save({"t": torch.ones(100)}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.unlink()
    with pytest.raises(xc.CorruptCheckpointError):
        xc.load({"t": torch.zeros(100)}, tmp_path)


def test_restore_begins_again_with_one_checkpoint_for_all_its_steps(tmp_path):
    """It reads the optimizer's groups, then everything: not of two checkpoints."""

    def training(lr):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        return model, optimizer

    def save(lr):
        model, optimizer = training(lr)
        xc.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "lr": lr}, tmp_path, sync=False)
        return model

    save(0.1)

    class Late(xc.ShardReader):
        loads = 0

        def read_data(self, plan, planner):
            self.loads += 1
            result = super().read_data(plan, planner)
            if self.loads in (1, 4):  # between the groups and the rest, twice
                self.last = save(0.1 + self.loads)
            return result

    model, optimizer = training(0.0)
    reader, state = Late(tmp_path), {"lr": None}
    report = xc.restore(model=model, optimizer=optimizer, state=state, storage_reader=reader)
    assert report.restarts >= 1
    assert state["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(model.weight, reader.last.weight)


def test_verify_tells_of_damage_of_the_current_checkpoint_only(tmp_path, monkeypatch):
    path = tmp_path / "c"
    xc.save({"t": torch.full((100,), 1.0)}, path)
    check = verify_files._check_group
    replaced = iter([True])

    def late(*args):
        if next(replaced, False):
            xc.save({"t": torch.full((100,), 2.0)}, path)
        return check(*args)

    monkeypatch.setattr(verify_files, "_check_group", late)
    assert xc.verify(path).ok


@pytest.mark.parametrize("when", ["before .metadata is read", "before the manifest is read"])
def test_verify_says_that_a_step_is_gone_that_is_deleted_meanwhile(place, monkeypatch, when):
    path, options = place
    list(steps_of(path, options, 1.0))
    folder, verified = open_folder(Location.of(path, options)), verify_module._verify
    read = type(folder).read

    def removed(*args):
        if when == "before .metadata is read":
            folder.remove([".metadata"])
        return verified(*args)

    def gone(self, name):
        if name.startswith("manifest-") and when == "before the manifest is read":
            folder.remove([".metadata", name])
        return read(self, name)

    monkeypatch.setattr(verify_module, "_verify", removed)
    monkeypatch.setattr(type(folder), "read", gone)
    with pytest.raises(xc.CheckpointError, match="there is no checkpoint"):
        xc.verify(path, storage_options=options)


def test_nothing_of_a_lease_is_left_after_a_save(place):
    path, options = place
    before = set(lease._held)
    xc.save({"t": torch.ones(3)}, storage_writer=xc.ShardWriter(path, storage_options=options))
    assert not [name for name in files_at(path, options) if "lease" in name]
    assert lease._held <= before
