"""Tensors that have another shape in the checkpoint: an error with remedies, or ``shape="keep"``."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "torch_xla_ckpt")
    return lambda: [record.getMessage() for record in caplog.records]


def test_another_shape_is_an_error_that_names_the_remedies(tmp_path):
    xc.save({"m": {"a": torch.ones(4)}}, tmp_path)
    with pytest.raises(xc.MismatchError, match=r"m\.a") as error:
        xc.load({"m": {"a": torch.zeros(5)}}, tmp_path, missing="keep", unexpected="ignore")
    assert 'shape="keep"' in str(error.value) and "exclude=" in str(error.value)


def test_shape_keep_loads_the_rest_and_names_the_keys_with_another_shape(tmp_path, warnings):
    xc.save(
        {"m": {"body": torch.ones(4), "head": torch.ones(4), "bias": torch.ones(4)}, "optim": {"head": torch.ones(4)}},
        tmp_path,
    )
    old = torch.full((5, 2), 9.0)
    target = {"m": {"body": torch.zeros(4), "head": old, "bias": torch.zeros(4)}, "optim": {"head": torch.zeros(5)}}
    report = xc.load(target, tmp_path, shape="keep")
    assert target["m"]["head"] is old and old.eq(9).all() and target["optim"]["head"].eq(0).all()
    assert target["m"]["body"].eq(1).all() and target["m"]["bias"].eq(1).all()
    assert report.kept == ("m.head", "optim.head") and set(report.loaded) == {"m.body", "m.bias"}
    assert report.outcomes["m.head"].shapes == ((4,), (5, 2))
    assert (report.unexpected, report.missing, report.created, report.not_requested) == ((), (), (), ())
    (warning,) = warnings()
    assert "m.head (target (5, 2), checkpoint (4,))" in warning and "optim.head" in warning
    assert "kept" in str(report) and "m.head (target (5, 2), checkpoint (4,))" in str(report)
    assert report.bytes_needed == 2 * 16


def test_shape_keep_holds_for_renamed_keys_and_for_tensors_on_the_meta_device(tmp_path):
    xc.save({"m": {"old": torch.ones(4), "meta": torch.ones(3)}}, tmp_path)
    target = {"m": {"new": torch.zeros(2), "meta": torch.empty(2, device="meta")}}
    report = xc.load(target, tmp_path, shape="keep", rename={"m.old": "m.new"})
    assert report.kept == ("m.new", "m.meta") and report.renamed == {"m.new": "m.old"}
    assert target["m"]["new"].eq(0).all() and target["m"]["meta"].shape == (2,)


def test_shape_keep_does_not_excuse_an_object_where_the_target_has_a_tensor(tmp_path):
    xc.save({"m": {"a": 5, "b": torch.ones(2)}}, tmp_path)
    with pytest.raises(xc.MismatchError) as error:
        xc.load({"m": {"a": torch.zeros(2), "b": 1}}, tmp_path, shape="keep")
    assert {(m.key, m.kind) for m in error.value.mismatches} == {("m.a", "type"), ("m.b", "type")}


def plans_of(targets, path, **options):
    """Return the plans that ranks with these targets send to the coordinator, and the coordinator's planner."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    planners = [xc.SPMDLoadPlanner(**options) for _ in targets]
    plans = []
    for planner, target in zip(planners, targets):
        planner.set_up_planner(target, metadata, is_coordinator=planner is planners[0])
        plans.append(planner.create_local_plan())
    return plans, planners[0]


def test_shape_keep_is_refused_if_some_ranks_would_load_a_key_that_others_keep(tmp_path):
    xc.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path)
    shapes = [(4, 5), (5, 5), (6, 5)]
    plans, coordinator = plans_of(
        [{"a": torch.zeros(a), "b": torch.zeros(b)} for a, b in shapes], tmp_path, shape="keep"
    )
    with pytest.raises(xc.MismatchError, match=r"(?s)some ranks.*\n  a: .*\(5,\).*\(rank 1\).*same shape on all ranks"):
        coordinator.create_global_plan(plans)


def test_ranks_that_all_keep_a_key_report_it_alike(tmp_path):
    xc.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path)
    plans, coordinator = plans_of([{"a": torch.zeros(4), "b": torch.zeros(5)}] * 2, tmp_path, shape="keep")
    for plan in coordinator.create_global_plan(plans):
        assert plan.planner_data["b"].status == "kept" and plan.planner_data["a"].status == "loaded"
