"""Casts name every tensor whose values do not fit."""

import logging
import math

import pytest
import torch

import torch_xla_ckpt as xc
from support.exported import MESH, written
from support.meshes import mesh, put, same_bits

INF = math.inf
WIDE = torch.tensor([70000.0, -70000.0, 65504.0, 65519.0, INF, math.nan, 1.0, 0.0])
STATE = {"wide": WIDE, "fits": torch.tensor([65504.0, -65504.0]), "known": torch.tensor([INF, -INF, math.nan])}


@pytest.mark.parametrize("kind", ["live", "sharded", "checkpoint", "store"])
def test_finite_values_that_become_infinite_are_counted_and_warned_of(tmp_path, caplog, kind):
    source, target = STATE, tmp_path / "model"
    if kind == "sharded":
        source = {**STATE, "wide": put(WIDE, mesh(MESH), (("a", "b"),))}
    if kind in ("checkpoint", "store"):
        xc.save({"model": STATE}, tmp_path / "checkpoint")
        source = tmp_path / "checkpoint"
    if kind == "store":
        target = "memory://casting/model"
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt.exchange"):
        report = xc.export(source, target, dtype=torch.float16)
    assert report.overflowed == {"wide": 2}
    assert "overflowed" in str(report) and "wide (2 values are infinite now)" in str(report)
    assert "torch.float16" in caplog.text and "wide (2)" in caplog.text and "fits" not in caplog.text
    if kind != "store":
        assert same_bits(written(target)["wide"], WIDE.half())


def test_cast_to_a_larger_range_warns_of_nothing(tmp_path, caplog):
    state = {"w": torch.tensor([65504.0, INF, 1.0]).half(), "v": torch.tensor([torch.finfo(torch.bfloat16).max])}
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt.exchange"):
        report = xc.export(state, tmp_path / "model", dtype=torch.bfloat16)
    assert not report.overflowed and not caplog.text and "overflowed" not in str(report)


def test_largest_float32_overflows_bfloat16(tmp_path):
    """It is rounded up, beyond the largest bfloat16."""
    report = xc.export({"w": torch.tensor([torch.finfo(torch.float32).max])}, tmp_path / "m", dtype=torch.bfloat16)
    assert report.overflowed == {"w": 1}
