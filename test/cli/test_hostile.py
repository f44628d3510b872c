"""Checkpoints that somebody made to deceive: nothing of them is obeyed, and nothing of them runs."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support import kinds
from support.command_line import call

pytestmark = pytest.mark.filterwarnings("ignore")


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


@pytest.mark.slow
def test_markup_and_options_in_keys_are_text(tmp_path):
    keys = [
        "[red]x[/red]",
        "[bold]",
        "--json",
        "-o",
        "{0..3}.w",
        "*",
        "[0]",
        "a[b]",
        "w[0:1]",
        "\u202eabc",
        "e\u0301",
        "",
    ]
    state = {key: torch.tensor([float(n)]) for n, key in enumerate(keys)}
    kinds.save_ours(tmp_path / "c", state)
    assert [one["key"] for one in call("ls", tmp_path / "c", "--json").json["keys"]] == keys
    listed = call("ls", tmp_path / "c", "--all")
    assert len(listed.lines) == 4 + len(keys) and "[red]x[/red]" in listed.out and "\u202e" not in listed.out
    for n, key in enumerate(keys):
        assert call("show", "--json", "--", tmp_path / "c", key).json["values"] == [float(n)], key
        assert call("show", "-o", tmp_path / "p.png", "--", tmp_path / "c", key).status == 0, key
    assert call("explain", tmp_path / "c", "--mesh", "a=1", "-o", tmp_path / "p.png").status == 0


@pytest.mark.slow
def test_long_keys_and_many_parts_are_no_problem(tmp_path):
    keys = ["x" * 5000, ".".join(["a"] * 300), "1." * 40 + "w", "9" * 5000]
    kinds.save_ours(tmp_path / "c", {key: torch.ones(2) for key in keys})
    for options in ((), ("--tree",), ("--all",), ("--json",)):
        assert call("ls", tmp_path / "c", *options).status == 0
    assert call("show", tmp_path / "c", keys[0], "-o", tmp_path / "p.png").status == 0
    assert call("report", tmp_path / "c", "-o", tmp_path / "r.html").status == 0
