"""``planner.report`` after a plain ``dcp.load``: the outcome of every key, and when there is no report."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torch_xla_ckpt as xc


def test_planner_reports_the_outcome_of_every_key_after_a_plain_dcp_load(tmp_path):
    xc.save({"m": {"a": torch.ones(4), "old": torch.ones(3), "extra": 1, "head": torch.ones(2)}, "other": 5}, tmp_path)
    own = {"a": torch.zeros(4).double(), "new": torch.zeros(3), "head": torch.zeros(9), "lost": torch.zeros(1)}
    planner = xc.SPMDLoadPlanner(missing="keep", shape="keep", rename={"m.old": "m.new"})
    dcp.load({"m": own}, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner)
    report = planner.report
    assert set(report.loaded) == {"m.a", "m.new"} and report.renamed == {"m.new": "m.old"}
    assert report.created == ("m.extra",) and report.missing == ("m.lost",) and report.kept == ("m.head",)
    assert report.not_requested == ("other",) and report.cast == {"m.a": (torch.float32, torch.float64)}
    assert (report.bytes_needed, report.bytes_read, report.bytes_per_second, report.restarts) == (None, None, None, 0)
    assert report.plan_seconds > 0 and report.read_seconds >= 0 and report.put_seconds >= 0
    assert str(report).startswith("loaded in ") and "m.head (target (9,), checkpoint (2,))" in str(report)


def test_outcomes_of_the_planner_are_those_that_xc_load_reports(tmp_path):
    xc.save({"a": torch.ones(4), "n": {"x": 1}}, tmp_path)
    planner = xc.SPMDLoadPlanner()
    dcp.load({"a": torch.zeros(4), "n": {}}, checkpoint_id=tmp_path, planner=planner)
    report = xc.load({"a": torch.zeros(4), "n": {}}, tmp_path)
    assert planner.report.outcomes == planner.outcomes == report.outcomes


def test_planner_has_no_report_before_a_load_and_after_a_failed_load(tmp_path):
    xc.save({"a": torch.ones(4), "n": 1}, tmp_path)
    planner = xc.SPMDLoadPlanner()
    with pytest.raises(xc.CheckpointError, match=r"after dcp\.load has returned"):
        _ = planner.report
    target = {"a": torch.zeros(4), "n": 0}
    dcp.load(target, checkpoint_id=tmp_path, planner=planner)
    assert planner.report.loaded
    with pytest.raises(CheckpointException):
        dcp.load({"a": torch.zeros(5)}, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(xc.CheckpointError, match="has not completed a load"):
        _ = planner.report


def test_planner_that_was_given_no_state_dict_says_so():
    planner = xc.SPMDLoadPlanner()
    assert planner.outcomes == {}
    planner.undo()
    with pytest.raises(xc.CheckpointError, match="set_up_planner"):
        planner.create_local_plan()
