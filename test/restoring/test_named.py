"""Values passed by name that a restore cannot fill are refused, and the error names the right call."""

import enum

import numpy as np
import pytest
import torch

import torch_xla_ckpt as xc
from torch_xla_ckpt.restoring.restore import require_restorable


def require(name, value):
    require_restorable(name, value, call="restore", remedy="restore(state=...)", options=("missing", "sharding"))


class Color(enum.Enum):
    RED = 1


LOST = [0, 1.5, True, None, "text", b"bytes", (1, 2), (torch.ones(1),), frozenset(), Color.RED, np.float32(1), [], [1]]


@pytest.mark.parametrize(
    "value", [*LOST, np.ones(2), torch.nn.Linear, lambda: None], ids=lambda value: repr(value).partition(" at ")[0]
)
def test_value_that_would_be_lost_is_refused_with_the_right_call(value):
    with pytest.raises(TypeError, match=r"'step'.* saved value would be lost.*Use: restore\(state=\.\.\.\)"):
        require("step", value)


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), {}, {"step": 0}, [torch.ones(1)], [{"a": 1}], torch.nn.Linear(1, 1), xc.PerRank(0)],
    ids=lambda value: type(value).__name__,
)
def test_value_that_can_be_filled_in_place_is_accepted(value):
    require("anything", value)


def test_misspelt_option_is_named_with_the_option_that_is_meant():
    with pytest.raises(TypeError, match=r"no option 'mising'. Did you mean missing=\?"):
        require("mising", "warn")
