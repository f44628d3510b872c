"""The program xc: exit status, output in pipes, help, options, and the schema of its JSON."""

import gc
import os
import pty
import re
import runpy
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from support import interpreters, kinds
from support.command_line import call, start
from support.paths import ROOT, environment
from torch_xla_ckpt.cli import main
from torch_xla_ckpt.cli.program import xc

pytestmark = pytest.mark.filterwarnings("ignore")


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
    for variables in ({"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}):
        answer = start("ls", tmp_path / "c", **variables)
        assert answer.status == 0 and "\x1b" not in answer.out
    command = [sys.executable, "-m", "torch_xla_ckpt", "ls", str(tmp_path / "c")]
    ascii_only = environment(PYTHONIOENCODING="ascii")  # Python reads it when it starts
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only, timeout=120)
    assert done.returncode == 0 and "\x1b" not in done.stdout


@pytest.mark.parametrize("was_on", [True, False])
def test_main_leaves_the_garbage_collector_as_it_was(monkeypatch, capsys, was_on):
    monkeypatch.setattr("sys.argv", ["xc", "--help"])
    gc.enable() if was_on else gc.disable()
    try:
        with pytest.raises(SystemExit):
            main()
        assert gc.isenabled() == was_on and capsys.readouterr().out
    finally:
        gc.enable()


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


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(tmp_path):
    kinds.save_ours(tmp_path / "c", {f"k{n}.w{n}": torch.ones(2) for n in range(5_000)})
    shell = f"{sys.executable} -m torch_xla_ckpt ls --all {tmp_path}/c | head -1; echo ${{PIPESTATUS[0]}}"
    variables = environment(PYTHONUNBUFFERED="")  # without a buffer, Python does not notice
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=variables, timeout=120)
    assert done.stderr == "" and done.stdout.splitlines()[0] == str(tmp_path / "c")
    assert done.stdout.splitlines()[1] == "141"  # as for every program that a closed pipe ends


@pytest.mark.slow
def test_a_terminal_gets_colours_and_no_escapes_of_keys(tmp_path):
    key = "[red]x\x1b[31m"
    kinds.save_ours(tmp_path / "a", {key: torch.ones(2)})
    kinds.save_ours(tmp_path / "b", {key: torch.zeros(2)})
    for variables, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        printed = on_terminal("diff", tmp_path / "a", tmp_path / "b", COLUMNS="40", TERM="xterm", **variables)
        assert "[red]x\\x1b[31m" in printed.replace("\x1b[0m", "")
        assert ("\x1b[31m" in printed) == is_coloured


def on_terminal(*arguments, **variables):
    """Run a command with a terminal as its standard output, and return what it wrote there."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "torch_xla_ckpt", *map(str, arguments)]
    with subprocess.Popen(command, stdout=there, env=environment(**variables)) as child:
        os.close(there)
        printed = b""
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while part := os.read(here, 1 << 16):
                printed += part
        child.wait()
    os.close(here)
    return printed.decode()


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_output_in_a_pipe_does_not_depend_on_the_width(made, columns):
    assert call("ls", made / "ours", COLUMNS=columns).out == call("ls", made / "ours").out


def test_tables_of_usual_keys_fit_into_80_columns(made):
    for command in (("ls", "run"), ("ls", "ours"), ("ls", "ours", "--tree"), ("diff", "run/10", "run/20")):
        verb, *paths = command
        answer = call(verb, *(made / path if "-" not in path else path for path in paths))
        assert all(len(line.replace(str(made), "")) <= 80 for line in answer.lines)


def test_the_schema_is_up_to_date():
    program = runpy.run_path(str(ROOT / "scripts" / "schema_of_commands.py"))
    assert program["SCHEMA"].read_text(encoding="utf-8") == program["text"](), "run: scripts/schema_of_commands.py"


def test_every_command_has_a_schema():
    program = runpy.run_path(str(ROOT / "scripts" / "schema_of_commands.py"))
    assert set(program["RESULTS"]) == set(xc.commands) - {"completion"}


@pytest.mark.slow
def test_the_examples_of_the_page_are_what_commands_print():
    """Numbers, times and names of files may differ, and nothing else."""
    program = runpy.run_path(str(ROOT / "scripts" / "examples_of_commands.py"))
    text = program["PAGE"].read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n\$ (xc [^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert {command.split()[1] for command, _ in blocks} == set(xc.commands) - {"completion"}
    for (command, shown), (_, printed) in zip(blocks, program["outputs"](text), strict=True):
        assert shape_of(shown) == shape_of(printed), f"xc {command}: run scripts/examples_of_commands.py"


def shape_of(text):
    """Return a text without its numbers, its padding, and the units that depend on numbers."""
    text = re.sub(r"__\d+_\d+-[0-9a-f]{16}", "FILE", text)
    text = re.sub(r"[-+]?\d[\d.,:T+-]*(?:e[-+]?\d+)?", "N", text)
    text = re.sub(r"\b(?:[KMG]iB|bytes|ms|s|min|h|d)\b", "U", text)
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("ls",),
        ("ls", "x", "--nosuch"),
        ("ls", "x", "--depth", "0"),
        ("diff", "a"),
        ("convert", "a", "b", "--spec", "w=a"),
        ("prune", "x", "--keep", "latest:1", "--yes", "--dry-run"),
    ],
)
def test_an_error_of_usage_is_one_line(arguments):
    answer = call(*arguments)
    assert answer.status == 2 and answer.out == ""
    (line,) = answer.err.splitlines()
    assert line.startswith("xc: ") and "--help' lists the options" in line


def test_no_command_shows_the_help():
    answer = call()
    assert answer.status == 2 and "Commands:" in answer.out + answer.err


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("latest:x", "'x' is no number"),
        ("best:x:loss", "'x' is no number"),
        ("every:1.5", "'1.5' is no number"),
        (f"latest:{10**30}", "at most 15 digits"),
        ("every:999999999999999d", "999999999999999d ago"),
        ("newer:999999999d", "999999999d ago"),
        ("newer:9" + "9" * 400 + "d", "ago is before"),
    ],
)
@pytest.mark.parametrize("verb", ["prune", "ls"])
def test_a_policy_with_an_impossible_number_names_the_number(made, verb, policy, named):
    answer = call(verb, made / "run", "--keep", policy)
    assert answer.status == 2 and named in answer.err and "int()" not in answer.err
    assert len(answer.err.splitlines()) == 1 and "--debug" not in answer.err


CLOSED = """
import os, runpy, sys
for number in map(int, sys.argv.pop(1)):
    os.close(number)
    setattr(sys, ("stdout", "stderr")[number - 1], None)  # as Python itself does when it starts
runpy.run_module("torch_xla_ckpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1", "2", "12"])
def test_closed_streams_change_no_answer(made, tmp_path, closed):
    for path, status in ((made / "ours", 0), (tmp_path / "absent", 2)):
        done = interpreters.run(["-c", CLOSED, closed, "ls", path])
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_streams_that_the_shell_closes_change_no_answer(tmp_path):
    command = ["sh", "-c", '"$0" -m torch_xla_ckpt ls "$1" >&- 2>&-', sys.executable, str(tmp_path / "absent")]
    assert subprocess.run(command, env=environment(), timeout=120).returncode == 2
