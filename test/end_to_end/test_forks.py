"""Children are bystanders: forked at any stage of a save, they exit, end on SIGTERM, and leave the save alone."""

import json
import os

import pytest

from support import interpreters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore"),
]


def forked_at(stage, mode, folder):
    command = ["-m", "support.forking_program", stage, mode, folder]
    program = interpreters.run(
        command, modules=interpreters.XLA if mode == "device" else interpreters.HOST, timeout=280
    )
    assert program.returncode == 0, program.stderr[-5000:]
    said = json.loads(program.stdout.splitlines()[-1])
    assert not said["problems"], "\n".join(said["problems"]) + program.stderr[-5000:]
    return said["made"]


@pytest.mark.parametrize(
    "stage",
    [
        *("before", "copying", "waiting for a slot", "planning", "writing", "committing", "cleaning up", "committed"),
        *("writing, in its thread", "committing, in its thread"),
    ],
)
def test_children_made_at_any_stage_of_an_async_save_exit_and_leave_it_alone(tmp_path, stage):
    assert forked_at(stage, "host", tmp_path)


def test_children_made_while_devices_are_saved_exit_and_leave_the_save_alone(tmp_path):
    pytest.importorskip("torch_xla")
    assert forked_at("writing", "device", tmp_path)


@pytest.mark.parametrize("stage", ["a save writes", "a save fetches"])
def test_a_child_forked_inside_a_save_that_exits_removes_none_of_its_files(tmp_path, stage):
    assert "left_by_sys_exit" in forked_at(stage, "host", tmp_path)
