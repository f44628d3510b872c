"""Each command on every kind of path: what it prints, as text and as JSON, and its exit status."""

import json
import math
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import kinds
from support.command_line import call, start
from support.paths import ROOT, TEST
from support.s3 import Server, count

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of every kind, by name, and a run; nobody changes them."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, save in kinds.CHECKPOINTS.items():
        save(folder / name)
    kinds.save_run(folder / "run")
    return folder


every_kind = pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
with_checksums = pytest.mark.parametrize("kind", ["ours", "stock", "torch_xla", "lightning"])


def copied(source, path):
    """Copy a checkpoint, which is a folder or a file."""
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    return path


def keys_of(kind):
    return [key.replace("model.", "state_dict.") for key in kinds.KEYS] if kind == "lightning" else kinds.KEYS


# ls


@every_kind
def test_ls_lists_every_key_with_shape_and_dtype(made, kind):
    found = call("ls", made / kind, "--json").json
    listed = {one["key"]: one for one in found["keys"]}
    assert set(keys_of(kind)) <= set(listed)
    weight = listed[keys_of(kind)[0]]
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [16, 8], 512)
    assert found["command"] == "ls" and found["version"] == 1


@every_kind
def test_ls_folds_layers_and_all_unfolds_them(made, kind):
    prefix = "state_dict" if kind == "lightning" else "model"
    assert f"{prefix}.layers.{{0..2}}.weight" in call("ls", made / kind).out
    unfolded = call("ls", made / kind, "--all").out
    assert all(key in unfolded for key in keys_of(kind))


@every_kind
def test_ls_tree_adds_up(made, kind):
    lines = call("ls", made / kind, "--tree").lines
    (line,) = [line for line in lines if "layers.{0..2}" in line]
    assert line.split("  ")[-1] == "6 keys, 1.59 KiB"


def test_ls_tells_who_saved_what_and_when(made):
    path = made / "with-facts"
    kinds.save_ours(path, kinds.host_state(), step=7, user_metadata={"note": "x"})
    found = call("ls", path, "--json").json
    assert (found["step"], found["user_metadata"], found["writer"]) == (7, {"note": "x"}, "torch_xla_ckpt")
    assert found["software"]["torch"] == torch.__version__
    assert "step 7" in call("ls", path).lines[1]


def test_ls_shows_the_saved_sharding(made):
    (line,) = [line for line in call("ls", made / "ours").lines if line.endswith("{0..2}.weight")]
    assert "4x2" in line


def test_ls_filters_by_globs_and_sorts(made):
    found = call("ls", made / "ours", "model.layers.*.bias", "steps", "--all", "--sort", "bytes").lines
    assert [line.split()[-1] for line in found[3:]] == ["steps", *(f"model.layers.{n}.bias" for n in range(3))]
    refused = call("ls", made / "ours", "modle.*")
    assert refused.status == 2 and "'modle.*'" in refused.err


def test_ls_of_a_run_shows_steps_metrics_and_sizes(made):
    found = call("ls", made / "run", "--json").json
    assert [one["step"] for one in found["steps"]] == [10, 20, 30]
    assert found["steps"][1]["saved"]["metrics"] == {"loss": 0.5, "accuracy": 1.0}
    assert all(one["nbytes"] > 0 and one["kind"] == "committed" and one["record"] for one in found["steps"])
    assert "loss 0.5" in call("ls", made / "run").out


def test_ls_of_a_run_shows_what_a_policy_keeps(made):
    found = call("ls", made / "run", "--keep", "best:1:loss").out
    assert "one of the best 1 by loss" in found and "would be deleted" in found


def test_ls_of_a_run_names_damaged_and_unfinished_steps(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    data = next((run / "20").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-64])
    (run / "30" / ".metadata").unlink()
    steps = {one["step"]: one for one in call("ls", run, "--json").json["steps"]}
    assert steps[20]["kind"] == "damaged" and data.name in steps[20]["flaw"]
    assert steps[30]["kind"] == "unfinished" and steps[10]["kind"] == "committed"


# Paths


@pytest.mark.parametrize(
    ("name", "step"),
    [("latest", 30), ("best:loss", 20), ("best:accuracy:max", 20), ("best:accuracy", 30), ("10", 10), ("latest/", 30)],
)
def test_a_run_s_steps_have_names(made, name, step):
    shown = call("ls", f"{made}/run/{name}", "--json").json
    assert shown["step"] == step and shown["path"].endswith(f"/{step}")


def test_best_asks_which_metric(made):
    refused = call("ls", made / "run" / "best")
    assert refused.status == 2 and "accuracy, loss" in refused.err and "best:" in refused.err
    assert call("ls", made / "run" / "best:perplexity").status == 2


def test_latest_skips_a_damaged_step(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    next((run / "30").glob("*.distcp")).unlink()
    assert call("ls", run / "latest", "--json").json["step"] == 20


def test_a_folder_named_latest_is_itself(tmp_path):
    kinds.save_ours(tmp_path / "latest", kinds.host_state(), step=5)
    assert call("ls", tmp_path / "latest", "--json").json["step"] == 5


@pytest.mark.parametrize("command", [("ls",), ("show", "KEY"), ("verify",), ("diff", "B")])
def test_nothing_at_the_path_is_one_line_and_status_2(tmp_path, command):
    verb, *rest = command
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other" / "things").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("x")
    for name in ("absent", "empty", "file", "other", "absent/latest", "file/latest"):
        answer = call(verb, tmp_path / name, *(tmp_path / "b" if one == "B" else one for one in rest))
        if (verb, name) == ("verify", "file"):
            assert answer.status == 1  # a file that begins like no other format is a damaged safetensors file
            continue
        assert answer.status == 2 and answer.out == "", name
        assert len(answer.err.splitlines()) == 1 and answer.err.startswith("xc: "), answer.err


def test_a_run_where_a_checkpoint_is_needed_names_its_steps(made):
    answer = call("show", made / "run", "steps")
    assert answer.status == 2 and "10, 20, 30" in answer.err and "latest" in answer.err


@pytest.mark.parametrize("name", ["a b", "a*[b]?", "ü::x", "x#y%20", "~tilde", "a\nb"])
def test_odd_paths(tmp_path, name):
    kinds.save_ours(tmp_path / name, {"w": torch.ones(2)})
    answer = call("ls", tmp_path / name)
    assert answer.status == 0 and len(answer.lines) == 4
    assert call("verify", tmp_path / name).status == 0


GOLDEN = sorted(path for path in (TEST / "golden").iterdir() if path.is_dir())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_golden_files_answer_every_question(golden, tmp_path):
    path = golden / "latest" if golden.name == "torch_xla-manager" else golden
    found = call("ls", path, "--json")
    assert found.status == 0, found.err
    for one in found.json["keys"]:
        assert call("show", path, one["key"]).status == 0
    assert call("verify", golden).status == 0
    assert call("explain", path, "--mesh", "a=2").status == 0
    assert call("convert", path, tmp_path / "c").status == 0
    assert call("diff", path, tmp_path / "c").status == 0
    assert call("report", golden, "-o", tmp_path / "r.html").status == 0


def test_links_and_read_only_folders(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "link").symlink_to(tmp_path / "c")
    before = sorted(os.listdir(tmp_path / "c"))
    (tmp_path / "c").chmod(0o555)
    assert call("ls", tmp_path / "link").status == 0
    assert call("verify", tmp_path / "link").status == 0
    (tmp_path / "c").chmod(0o755)
    assert sorted(os.listdir(tmp_path / "c")) == before


# show


@every_kind
def test_show_gives_values_and_statistics(made, kind):
    found = call("show", made / kind, keys_of(kind)[0], "--json").json
    expected = kinds.host_state()["model"]["layers"]["0"]["weight"]
    assert found["values"] == expected.tolist()
    statistics = found["statistics"]
    assert (statistics["min"], statistics["max"], statistics["zeros"]) == (0, 127, 1)
    assert math.isclose(statistics["mean"], expected.mean()) and math.isclose(
        statistics["std"], expected.std(correction=0), rel_tol=1e-6
    )


@every_kind
def test_show_gives_a_slice(made, kind):
    found = call("show", made / kind, f"{keys_of(kind)[2]}[3:5, -1]", "--json").json
    assert found["values"] == kinds.host_state()["model"]["layers"]["1"]["weight"][3:5, -1].tolist()
    assert found["statistics"]["count"] == 2


def test_show_gives_scalars_and_objects(made):
    assert call("show", made / "ours", "model.scale", "--json").json["values"] == 1.0
    assert call("show", made / "ours", "epoch").lines[1].strip() == "3"
    assert call("show", made / "ours", "config.name").lines[1].strip() == "'small'"


def test_show_draws_the_layout(made, tmp_path):
    found = call("show", made / "ours", "model.layers.0.weight", "--layout").out
    assert "0:4" in found and "4:8" in found and "8 chunks" in found
    devices = call("show", made / "ours", "model.layers.0.weight", "--json").json["layout"]["devices"]
    assert devices["3"] == {"offsets": [4, 4], "sizes": [4, 4]}
    picture = tmp_path / "layout.png"
    call("show", made / "ours", "model.layers.0.weight", "--layout", "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000
    assert call("show", made / "ours", "model.layers.0.weight", "--layout", "-o", tmp_path / "x.nothing").status == 2
    assert "rank 0" in call("show", made / "stock", "steps", "--layout").out


def test_show_refuses_a_key_that_is_not_there(made):
    answer = call("show", made / "ours", "model.layers.9.weight")
    assert answer.status == 2 and "xc ls" in answer.err


ODD = {
    "nan": torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0]),
    "allnan": torch.full((3,), math.nan),
    "empty": torch.empty(0, 4),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**62), 2**62]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([3 + 4j, 0j]),
    "float64": torch.tensor([1e308, -1e308], dtype=torch.float64),
}


@pytest.mark.parametrize("name", ODD)
def test_show_every_dtype(tmp_path, name):
    kinds.save_ours(tmp_path / "c", ODD)
    answer = call("show", tmp_path / "c", name)
    assert answer.status == 0, answer.err
    found = call("show", tmp_path / "c", name, "--json").json["statistics"]
    finite = ODD[name].to(torch.complex128).abs() if ODD[name].is_complex() else ODD[name].double()
    finite = finite[finite.isfinite()]
    assert found["count"] == ODD[name].numel()
    assert found["max"] == (finite.max().item() if finite.numel() else None)
    if name == "nan":
        assert (found["nans"], found["infs"], found["zeros"]) == (1, 2, 2)


def test_show_reads_only_the_blocks_of_a_slice(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.randn(32, MIB)})  # 128 MiB, 4 MiB a row
    found = call("show", tmp_path / "c", "w[7, :5]", "--json").json
    assert 0 < found["bytes_read"] <= 8 * MIB


def test_statistics_of_pieces_are_those_of_the_whole(tmp_path):
    whole = torch.randn(40, 300_000) * 3 + 100  # 48 MiB, which is read in two pieces
    kinds.save_ours(tmp_path / "c", {"w": whole})
    found = call("show", tmp_path / "c", "w", "--json").json["statistics"]
    assert math.isclose(found["mean"], whole.double().mean(), rel_tol=1e-9)
    assert math.isclose(found["std"], whole.double().std(correction=0), rel_tol=1e-9)
    assert (found["min"], found["max"]) == (whole.min().item(), whole.max().item())


# verify


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


# diff


@every_kind
def test_a_checkpoint_equals_itself_and_its_copy(made, tmp_path, kind):
    answer = call("diff", made / kind, copied(made / kind, tmp_path / "c"), "--json")
    assert answer.status == 0 and answer.json["same"] is True
    if kind == "ours":
        assert answer.json["bytes_read"] == 0


@pytest.mark.parametrize("kind", ["stock", "torch_xla"])
def test_other_layouts_of_the_same_values_are_equal(made, kind):
    answer = call("diff", made / "ours", made / kind, "model.*", "steps", "epoch", "--json")
    assert answer.status == 0 and len(answer.json["keys"]) == 9, answer.out


def test_diff_says_by_how_much_values_differ(tmp_path):
    state = kinds.sharded_state()
    kinds.save_ours(tmp_path / "a", state)
    other = kinds.host_state()
    other["model"]["layers"]["1"]["weight"][3, 4] += 5
    other["config"]["name"] = "large"
    del other["epoch"]
    other["steps"] = other["steps"].int()
    other["model"]["scale"] = torch.ones(2)
    other["extra"] = torch.zeros(1)
    kinds.save_ours(tmp_path / "b", other)
    answer = call("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert answer.status == 1 and answer.json["same"] is False
    found = {one["key"]: one for one in answer.json["keys"]}
    changed = found["model.layers.1.weight"]
    assert (changed["status"], changed["share"], changed["max_abs"]) == ("differs", 1 / 128, 5.0)
    assert found["model.layers.0.weight"]["status"] == "equal"
    assert found["config.name"]["status"] == "differs"
    assert found["epoch"]["status"] == "only in a" and found["extra"]["status"] == "only in b"
    assert found["steps"]["status"] == "other dtype" and found["model.scale"]["status"] == "other shape"
    text = call("diff", tmp_path / "a", tmp_path / "b").out
    assert "0.78%" in text and "'small' -> 'large'" in text


def test_diff_reads_only_the_chunks_that_differ(tmp_path):
    state = {"w": torch.zeros(64, 1024), "v": torch.zeros(64, 1024)}
    kinds.save_ours(tmp_path / "a", state)
    state["v"][0, 0] = math.nan
    kinds.save_ours(tmp_path / "b", state)
    found = call("diff", tmp_path / "a", tmp_path / "b", "--json").json
    assert found["bytes_compared"] == 64 * 1024 * 4
    assert [one["max_abs"] for one in found["keys"]] == [None, "NaN"]


def test_diff_of_globs(made):
    assert call("diff", made / "run/10", made / "run/20", "steps").status == 0
    assert call("diff", made / "run/10", made / "run/20").status == 1


# Hostile folders


def test_keys_and_objects_are_shown_and_not_obeyed(tmp_path):
    key = "evil\x1b[2Jkey\nsecond line"
    kinds.save_ours(tmp_path / "c", {key: torch.ones(2), "text": "a\x1b]0;title\x07b\n"})
    kinds.save_ours(tmp_path / "d", {key: torch.zeros(2), "text": "other"})
    for answer in (
        call("ls", tmp_path / "c"),
        call("ls", tmp_path / "c", "--tree"),
        call("show", tmp_path / "c", key),
        call("show", tmp_path / "c", key, "--layout"),
        call("show", tmp_path / "c", "text"),
        call("diff", tmp_path / "c", tmp_path / "d"),
        call("show", tmp_path / "c", "no\x1bkey"),
    ):
        assert "\x1b" not in answer.out + answer.err and "\x07" not in answer.out
        assert not any(line.startswith("second line") for line in answer.lines)
    assert call("ls", tmp_path / "c", "--json").json["keys"][0]["key"] == key


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/the-code-of-a-file-ran",)


def test_no_code_of_a_file_runs(tmp_path):
    dcp.save({"payload": Payload(), "w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    for answer in (call("ls", tmp_path / "c"), call("verify", tmp_path / "c"), call("show", tmp_path / "c", "payload")):
        assert answer.status == 0, answer.err
    assert "mkdir" in call("show", tmp_path / "c", "payload").out
    assert call("diff", tmp_path / "c", tmp_path / "d").status == 0
    assert not os.path.exists("/tmp/the-code-of-a-file-ran")


@pytest.mark.parametrize("command", [("ls",), ("show", "w"), ("diff", "other")])
@pytest.mark.parametrize("size", [0, 1, 40, -1, -70])
def test_a_truncated_checkpoint_gives_one_line(tmp_path, command, size):
    verb, *rest = command
    kinds.save_ours(tmp_path / "c", {"w": torch.ones(100)})
    kinds.save_ours(tmp_path / "other", {"w": torch.ones(100)})
    for name in (".metadata", next((tmp_path / "c").glob("manifest*")).name):
        whole = (tmp_path / "c" / name).read_bytes()
        (tmp_path / "c" / name).write_bytes(whole[:size])
        answer = call(verb, tmp_path / "c", *(tmp_path / one if one == "other" else one for one in rest))
        assert answer.status == 2 and len(answer.err.splitlines()) == 1, answer.err
        (tmp_path / "c" / name).write_bytes(whole)


def test_damaged_values_are_not_shown(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.ones(100)})
    data = next((tmp_path / "c").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100] + bytes(100))
    answer = call("show", tmp_path / "c", "w")
    assert answer.status == 2 and answer.out == "" and data.name in answer.err


# Stores


@pytest.fixture(scope="module")
def s3():
    with Server() as server:
        yield server


def options_of(server):
    pairs = []
    for name, value in server.options.items():
        pairs += ["--storage-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return pairs


def test_every_command_over_s3(s3):
    with s3.bucket("commands") as bucket:
        url = f"s3://{bucket.name}/run"
        for step in (1, 2):
            xc.save(kinds.host_state(float(step)), f"{url}/{step}", storage_options=s3.options)
        options = options_of(s3)
        assert [one["step"] for one in call("ls", url, "--json", *options).json["steps"]] == [1, 2]
        assert "layers.{0..2}" in call("ls", f"{url}/latest", *options).out
        assert call("show", f"{url}/2", "model.layers.1.bias", "--json", *options).json["values"] == [2.0] * 8
        assert call("verify", url, *options).status == 0
        assert call("diff", f"{url}/1", f"{url}/2", *options).status == 1
        assert call("diff", f"{url}/1", f"{url}/1", *options).status == 0
        refused = call("ls", f"s3://{bucket.name}/nothing", *options)
        assert refused.status == 2 and len(refused.err.splitlines()) == 1


def test_a_slice_in_a_store_is_read_by_ranges(s3):
    with s3.bucket("slices") as bucket:
        url = f"s3://{bucket.name}/c"
        xc.save({"w": torch.randn(8, MIB)}, url, storage_options=s3.options)  # 32 MiB
        with s3.recorded() as log:
            assert call("show", url, "w[3, :4]", *options_of(s3)).status == 0
        assert sum(one.sent for one in log if one.name.endswith(".distcp")) <= 8 * MIB
        assert count(log)["PutObject"] == 0


# The program


@pytest.mark.slow
def test_the_program_exits_with_the_documented_status(made, tmp_path):
    assert start("ls", made / "ours").status == 0
    assert start("diff", made / "run/10", made / "run/20").status == 1
    failed = start("ls", tmp_path / "absent")
    assert failed.status == 2 and len(failed.err.splitlines()) == 1 and "Traceback" not in failed.err
    assert "Traceback" in start("ls", tmp_path / "absent", "--debug").err
    assert start("unknown").status == 2


@pytest.mark.slow
def test_output_has_no_escapes_in_pipes_and_survives_any_locale(tmp_path):
    kinds.save_ours(tmp_path / "c", {"größe": torch.ones(2)})
    for variables in ({"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}):
        answer = start("ls", tmp_path / "c", **variables)
        assert answer.status == 0 and "\x1b" not in answer.out


def test_every_command_has_help_with_an_example():
    names = [line.split()[0] for line in call("--help").out.partition("Commands:")[2].splitlines() if line.strip()]
    assert {"ls", "show", "verify", "diff"} <= set(names)
    for name in names:
        answer = call(name, "--help")
        assert "Example:" in answer.out and f"xc {name}" in answer.out
        assert all(len(line) <= 80 for line in answer.lines)


def test_storage_options_are_parsed(made):
    bad = call("ls", made / "ours", "--storage-option", "endpoint")
    assert bad.status == 2 and "key=value" in bad.err
    assert call("ls", made / "ours", "--storage-option", "anon=true", "--storage-option", 'n={"a": 1}').status == 0
    assert call("ls", made / "ours", "--storage-option", "n={oops").status == 2


@pytest.mark.parametrize("policy", ["latest", "latest:0", "best:1", "best:1:loss:most", "every:x", "newer:3", "bogus"])
def test_a_policy_that_is_none_is_refused(made, policy):
    answer = call("ls", made / "run", "--keep", policy)
    assert answer.status == 2 and "--keep" in answer.err


def test_completion_scripts():
    for shell in ("bash", "zsh", "fish"):
        assert "_XC_COMPLETE" in call("completion", shell).out


def test_the_extra_is_declared():
    assert "xc = torch_xla_ckpt.cli:main" in (ROOT / "setup.py").read_text()
