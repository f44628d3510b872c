"""Commands that plan or change something: explain, convert, export, prune."""

import json
import shutil

import pytest
import torch

import torch_xla_ckpt as xc
from support import kinds
from support.command_line import call
from torch_xla_ckpt.inspecting import Pruning, require_deleted
from torch_xla_ckpt.testing import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore")

SPECS = ("--spec", "*.weight=fsdp,tensor", "--spec", "*.bias=fsdp")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    for name, save in kinds.CHECKPOINTS.items():
        save(folder / name)
    kinds.save_run(folder / "run")
    return folder


def loaded(path):
    state = {}
    for key in ("model", "steps", "epoch", "config"):
        state[key] = {} if key in ("model", "config") else None
    xc.load(state, path)
    return state


# explain


def test_explain_adds_up_to_the_checkpoint(made):
    found = call("explain", made / "ours", "--mesh", "fsdp=2,tensor=4", *SPECS, "--processes", "4", "--json").json
    assert [one["devices"] for one in found["processes"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    sharded = 3 * 512 / 4  # two devices of eight
    for one in found["processes"]:
        objects = one["bytes_needed"] - (sharded + 3 * 16 + 4 + 80)
        assert 0 < objects < 20_000
        assert one["bytes_put"] == 3 * 2 * 64 + 3 * 2 * 16 + 2 * (4 + 80)
        assert one["bytes_read"] >= one["bytes_needed"] - objects
    tensors = {one["key"]: one for one in found["tensors"]}
    assert tensors["model.layers.0.weight"]["needed"][1] == {"offsets": [0, 2], "sizes": [8, 2]}


def test_explain_is_what_a_load_reads(made):
    """The plan for one process on one device names the bytes that a load of everything into host memory reads."""
    found = call("explain", made / "ours", "--mesh", "d=1", "--json").json["processes"][0]
    report = xc.load({"model": {}, "steps": None, "epoch": None, "config": {}}, made / "ours")
    assert found["bytes_needed"] == report.bytes_needed
    assert found["bytes_read"] == report.bytes_read


@pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
def test_explain_every_kind(made, kind):
    answer = call("explain", made / kind, "--mesh", "fsdp=8", "--spec", "*.weight=fsdp", "--processes", "8")
    assert answer.status == 0 and "reads/needs" in answer.out


def test_explain_against_another_model_names_every_difference(made, tmp_path):
    other = kinds.host_state()
    other["model"]["layers"]["0"]["weight"] = torch.zeros(16, 9)
    other["model"]["layers"]["1"]["weight"] = torch.zeros(16, 8, dtype=torch.bfloat16)
    other["model"]["head"] = torch.zeros(2)
    del other["epoch"]
    kinds.save_ours(tmp_path / "target", other)
    found = call("explain", made / "ours", "--mesh", "d=1", "--against", tmp_path / "target", "--json").json
    changes = {one["key"]: one["change"] for one in found["changes"]}
    assert changes == {
        "model.layers.0.weight": "other shape",
        "model.layers.1.weight": "cast",
        "model.head": "missing",
        "epoch": "unexpected",
    }
    assert any("would fail" in warning for warning in found["warnings"])


def test_explain_draws_a_plan(made, tmp_path):
    call("explain", made / "ours", "--mesh", "a=2,b=2", "--spec", "*.weight=a,b", "-o", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "fsdp"),
        ("--mesh", "fsdp=0"),
        ("--mesh", "a=2,a=2"),
        ("--mesh", "a=9999999999"),
        ("--mesh", "a=2", "--spec", "*.weight"),
        ("--mesh", "a=2", "--spec", "*.weight=b"),
        ("--mesh", "a=2", "--spec", "*.weight=a,a"),
        ("--mesh", "a=2", "--spec", "*.bias=-,a"),
        ("--mesh", "a=2", "--spec", "nothing.*=a"),
        ("--mesh", "a=2", "--processes", "3"),
        ("--mesh", "a=2", "--processes", "0"),
    ],
)
def test_explain_refuses_what_does_not_fit(made, options):
    answer = call("explain", made / "ours", *options)
    assert answer.status == 2 and len(answer.err.splitlines()) == 1, answer.err


def test_uneven_cuts_are_those_of_the_devices(tmp_path):
    """The boxes of a plan are the boxes that torch_xla's devices hold."""
    from support.meshes import mesh, put, settle
    from torch_xla_ckpt.device import access_of
    from torch_xla_ckpt.inspecting.meshes import MeshPlan

    for shape, text, spec in [
        ((10, 7), "a,b", ("a", "b")),
        ((10, 7), "-,a+b", (None, ("a", "b"))),
        ((3,), "a", ("a",)),
        ((5, 4), "b+a,-", (("b", "a"), None)),
    ]:
        tensor = put(torch.zeros(shape), mesh((4, 2)), spec)
        settle()
        live = [shard.box for shard in access_of(tensor).layout(tensor).shards]
        assert MeshPlan.parse("a=4,b=2", [f"w={text}"]).boxes("w", shape) == live


# convert


@pytest.mark.parametrize("kind", ["ours", "stock", "torch_xla"])
def test_convert_keeps_every_value(made, tmp_path, kind):
    answer = call("convert", made / kind, tmp_path / "c", "--mesh", "fsdp=4,tensor=2", *SPECS, "--json")
    assert answer.status == 0, answer.err
    assert call("diff", made / kind, tmp_path / "c").status == 0
    assert call("verify", tmp_path / "c").status == 0
    listed = {one["key"]: one for one in call("ls", tmp_path / "c", "--json").json["keys"]}
    assert listed["model.layers.0.weight"]["chunks"] == 8 and listed["model.layers.0.bias"]["chunks"] == 4
    assert_same_state(loaded(tmp_path / "c"), loaded(made / kind))


def test_convert_keeps_step_metadata_and_paths(tmp_path):
    state = {"model": [{"w": torch.ones(4, requires_grad=True)}, {7: torch.ones(2)}], "odd.key": 5, "empty": {}}
    kinds.save_ours(tmp_path / "a", state, step=9, user_metadata={"note": [1]})
    assert call("convert", tmp_path / "a", tmp_path / "b").status == 0
    found = call("ls", tmp_path / "b", "--json").json
    assert (found["step"], found["user_metadata"]) == (9, {"note": [1]})
    one, other = (xc.ShardReader(tmp_path / name).read_metadata() for name in "ab")
    assert one.planner_data == other.planner_data
    assert one.state_dict_metadata == other.state_dict_metadata


def test_convert_in_place_and_over_another(made, tmp_path):
    shutil.copytree(made / "ours", tmp_path / "c")
    refused = call("convert", tmp_path / "c", tmp_path / "c")
    assert refused.status == 2 and "--overwrite" in refused.err
    assert call("convert", tmp_path / "c", tmp_path / "c", "--overwrite").status == 0
    assert call("diff", made / "ours", tmp_path / "c").status == 0
    listed = call("ls", tmp_path / "c", "--json").json["keys"]
    assert all(one["chunks"] == 1 for one in listed)


def test_convert_dry_run_writes_nothing(made, tmp_path):
    answer = call("convert", made / "ours", tmp_path / "c", "--dry-run")
    assert answer.status == 0 and "would rewrite" in answer.out and not (tmp_path / "c").exists()


def test_convert_of_a_damaged_checkpoint_leaves_nothing_and_the_old_one(made, tmp_path):
    shutil.copytree(made / "ours", tmp_path / "bad")
    data = max((tmp_path / "bad").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    kinds.save_ours(tmp_path / "old", kinds.host_state(), step=1)
    answer = call("convert", tmp_path / "bad", tmp_path / "old", "--overwrite")
    assert answer.status == 2 and data.name in answer.err
    assert call("verify", tmp_path / "old").status == 0
    assert call("ls", tmp_path / "old", "--json").json["step"] == 1


def test_convert_into_a_run_is_refused(made):
    assert call("convert", made / "ours", made / "run").status == 2


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_export_writes_what_others_read(made, tmp_path, form):
    target = tmp_path / ("model.pt" if form == "torch" else "model")
    answer = call("export", made / "run" / "latest", target, "--to", form, "--key", "model", "--dtype", "bfloat16")
    assert answer.status == 0, answer.err
    shown = call("show", target, "layers.1.bias", "--json").json
    assert (shown["dtype"], shown["values"]) == ("bfloat16", [30.0] * 8)
    assert call("convert", made / "run" / "latest", tmp_path / "again", "--to", form).status in (0, 2)
    refused = call("export", made / "ours", tmp_path / "x", "--dtype", "float31")
    assert refused.status == 2


# prune


def steps_of(run):
    return sorted(int(path.name) for path in run.iterdir() if path.name.isdigit())


def test_prune_shows_and_deletes_only_with_yes(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    policies = ("--keep", "latest:1", "--keep", "best:1:accuracy:max")
    shown = call("prune", run, *policies)
    assert shown.status == 0 and "would be deleted" in shown.out and steps_of(run) == [10, 20, 30]
    done = call("prune", run, *policies, "--yes", "--json")
    assert done.status == 0 and done.json["deleted"] == [10] and steps_of(run) == [20, 30]
    assert call("verify", run).status == 0
    last = json.loads((run / "journal.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("deleted", 10)
    assert call("prune", run, *policies, "--yes", "--json").json["deleted"] == []


def test_prune_decides_as_the_manager_would(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    found = call("prune", run, "--keep", "latest:2", "--json").json["verdicts"]
    with xc.CheckpointManager(run, 1, keep=xc.keep.Latest(2)) as manager:
        assert [(one.step, one.kept, one.reason) for one in manager.plan_retention()] == [
            (one["step"], one["kept"], one["reason"]) for one in found
        ]


def test_prune_never_deletes_what_no_manager_wrote_nor_the_last_whole_step(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    shutil.copytree(made / "stock", run / "5")
    for step in ("20", "30"):
        next((run / step).glob("*.distcp")).unlink()
    call("prune", run, "--keep", "latest:1", "--yes")
    assert steps_of(run) == [5, 10, 20, 30]


def test_prune_needs_a_policy_and_a_run(made):
    assert call("prune", made / "run").status == 2
    assert call("prune", made / "ours", "--keep", "latest:1").status == 2


def test_prune_names_steps_that_could_not_be_deleted():
    verdicts = (xc.Verdict(1, False, "no policy wants it"), xc.Verdict(2, True, "one of the latest 1"))
    require_deleted(Pruning("run", verdicts, {}, (1,), is_dry=False))
    require_deleted(Pruning("run", verdicts, {}))
    with pytest.raises(xc.CheckpointError, match="the steps 1 of run could not be deleted"):
        require_deleted(Pruning("run", verdicts, {}, (), is_dry=False))
