"""Slices written as text select what Python would, and nothing is evaluated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting.slices import parse_region, split_key

T = torch.arange(5 * 4 * 3).reshape(5, 4, 3)


def selected(text, tensor=T):
    region = parse_region(text, tuple(tensor.shape))
    part = tensor[region.box.slices]
    return part[tuple(0 if dim in region.dropped else slice(None, None, n) for dim, n in enumerate(region.steps))]


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        ":",
        "1:3",
        "::2",
        "1:4:2",
        "..., 0",
        "0, ..., 1:",
        "...",
        ":, -2",
        " 1 : 3 , 0 ",
        "2:100",
        "-100:2",
        "3:1",
    ],
)
def test_selects_what_python_selects(text):
    assert torch.equal(selected(text), eval(f"T[{text}]"))


numbers = st.one_of(st.just(""), st.integers(-7, 7).map(str))
steps = st.one_of(st.just(""), st.integers(1, 4).map(lambda n: f":{n}"))


@given(st.lists(st.builds(lambda a, b, c: f"{a}:{b}{c}", numbers, numbers, steps), min_size=1, max_size=3))
def test_any_slices_select_what_python_selects(parts):
    text = ",".join(parts)
    assert torch.equal(selected(text), eval(f"T[{text}]"))


@pytest.mark.parametrize(
    "text", ["5", "-6", "0,0,0,0", "::0", "::-1", "x", "1.5", "0,,1", "...,...", "__import__('os')", "9" * 40, ":" * 9]
)
def test_other_text_is_refused_in_one_line(text):
    with pytest.raises(CheckpointError, match="Write slices as in Python") as failure:
        selected(text)
    assert "\n" not in str(failure.value)


def test_a_key_with_brackets_wins_over_a_slice():
    assert split_key("a[0]", {"a", "a[0]"}) == ("a[0]", None)
    assert split_key("a[0]", {"a"}) == ("a", "0")
    assert split_key("b[0]", {"a"}) == ("b[0]", None)
    assert split_key("a[0][1]", {"a[0]"}) == ("a[0]", "1")


def test_a_scalar_has_one_element():
    assert selected(None, torch.tensor(3)).item() == 3
    assert selected("...", torch.tensor(3)).item() == 3
