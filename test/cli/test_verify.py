"""xc verify: every damaged key, file and byte range, and files that do not belong to the checkpoint."""

import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import kinds
from support.command_line import call

pytestmark = pytest.mark.filterwarnings("ignore")
with_checksums = pytest.mark.parametrize("kind", ["ours", "stock", "torch_xla", "lightning"])
every_kind = pytest.mark.parametrize("kind", kinds.CHECKPOINTS)


@every_kind
def test_verify_finds_nothing_in_a_whole_checkpoint(made, kind):
    answer = call("verify", made / kind, "--json")
    assert answer.status == 0 and answer.json["ok"] is True
    assert call("verify", made / kind).out.startswith("whole")


@with_checksums
def test_verify_names_key_file_and_bytes(made, tmp_path, kind):
    shutil.copytree(made / kind, tmp_path / "c")
    data = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    at = len(content) // 2
    content[at : at + 600] = bytes(byte ^ 0xFF for byte in content[at : at + 600])
    data.write_bytes(content)
    answer = call("verify", tmp_path / "c", "--json")
    assert answer.status == 1
    (check,) = answer.json["checks"]
    damages = check["report"]["damages"]
    assert any(d["file"] == data.name and d["keys"] and d["start"] <= at + 600 and d["stop"] > at for d in damages)
    assert "DAMAGED" in call("verify", tmp_path / "c").out


def test_verify_of_a_run_checks_all_steps(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    assert call("verify", run).status == 0
    next((run / "10").glob("*.distcp")).unlink()
    (run / "30" / ".metadata").write_bytes(b"torn")
    answer = call("verify", run)
    assert answer.status == 1 and answer.lines[-1] == "3 checkpoints, 2 damaged"
    assert [check["ok"] for check in call("verify", run, "--json").json["checks"]] == [False, True, False]


def test_verify_names_what_is_left_over(made, tmp_path):
    shutil.copytree(made / "ours", tmp_path / "c")
    (tmp_path / "c" / "__0_0-0123456789abcdef.distcp").write_bytes(b"x")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    answer = call("verify", tmp_path / "c", "--json")
    assert answer.status == 0
    (check,) = answer.json["checks"]
    assert check["leftovers"] == ["__0_0-0123456789abcdef.distcp"] and check["strangers"] == ["notes.txt"]


def test_verify_of_several_paths(made):
    assert call("verify", made / "ours", made / "stock").lines[-1] == "2 checkpoints, none damaged"


def test_verify_answers_for_the_other_paths_if_one_holds_nothing(made, tmp_path):
    answer = call("verify", made / "ours", tmp_path / "absent", made / "stock", "--json")
    assert answer.status == 2 and "absent" in answer.err and len(answer.err.splitlines()) == 1
    assert [bool(check["report"]) for check in answer.json["checks"]] == [True, False, True]
    text = call("verify", made / "ours", tmp_path / "absent").out
    assert "NOT CHECKED" in text and text.endswith("2 checkpoints, none damaged, 1 not checked\n")


def test_a_step_that_cannot_be_read_is_not_called_damaged(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    (run / "20" / ".metadata").write_bytes(pickle.dumps(Payload()))
    answer = call("verify", run)
    assert answer.status == 2 and answer.lines[-1] == "3 checkpoints, none damaged, 1 not checked", answer.out


class Payload:
    """Names a function that an unpickler would call."""

    def __reduce__(self):
        return print, ("the code of a file ran",)


def test_verify_names_what_is_missing_and_what_is_doubled(tmp_path):
    dcp.save({"w": torch.ones(8, 4), "v": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks.append(metadata.state_dict_metadata["w"].chunks[0])
    metadata.state_dict_metadata["v"].chunks.clear()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    answer = call("verify", tmp_path / "c", "--json")
    assert answer.status == 1 and set(answer.json["checks"][0]["report"]["incomplete"]) == {"w", "v"}


def test_verify_checks_what_lightning_saves_beside_the_tensors(made, tmp_path):
    shutil.copytree(made / "lightning", tmp_path / "c")
    data = bytearray((tmp_path / "c" / "meta.pt").read_bytes())
    data[data.index(b"epoch")] ^= 1
    (tmp_path / "c" / "meta.pt").write_bytes(data)
    answer = call("verify", tmp_path / "c")
    assert answer.status == 1 and "meta.pt" in answer.out


def test_verify_stops_soon_if_it_is_interrupted(tmp_path, monkeypatch):
    kinds.save_ours(tmp_path / "c", {f"w{n}": torch.full((2000,), n) for n in range(400)})
    monkeypatch.setattr("torch_xla_ckpt.storage.verify_files._READ_BYTES", 1)  # each tensor is a check of its own
    checked = []

    def interrupt(nbytes, total):
        checked.append(nbytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        xc.verify(tmp_path / "c", progress=interrupt)
    assert len(checked) < 100


def test_progress_adds_up_to_the_whole(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.ones(9, 1 << 20), "v": torch.ones(3)})
    calls = []
    xc.verify(tmp_path / "c", progress=lambda nbytes, total: calls.append((nbytes, total)))
    assert {total for _, total in calls} == {sum(nbytes for nbytes, _ in calls)} and len(calls) > 2
