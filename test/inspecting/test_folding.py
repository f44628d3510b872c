"""Keys that are alike share a line, and the line says exactly which keys they are."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_ckpt.inspecting.folding import braces, fold


def expanded(name):
    """All keys that a line stands for, as a shell expands braces."""
    parts = re.split(r"(\{[^}]*\})", name)
    choices = []
    for part in parts:
        if not part.startswith("{"):
            choices.append([part])
            continue
        numbers = []
        for piece in part[1:-1].split(","):
            first, *rest = map(int, piece.split(".."))
            numbers += range(first, rest[0] + 1, rest[1] if len(rest) > 1 else 1) if rest else [first]
        choices.append(list(map(str, numbers)))
    return ["".join(one) for one in itertools.product(*choices)]


def folded(keys, kind=lambda key: None):
    return [line.name for line in fold(keys, lambda key: key, kind)]


def test_layers_share_a_line():
    keys = [f"model.layers.{n}.{name}" for n in range(32) for name in ("q.weight", "q.bias")]
    assert folded(keys) == ["model.layers.{0..31}.q.weight", "model.layers.{0..31}.q.bias"]


def test_experts_in_layers_share_a_line():
    keys = [f"layers.{n}.experts.{m}.w" for n in range(4) for m in range(8)]
    assert folded(keys) == ["layers.{0..3}.experts.{0..7}.w"]


def test_a_layer_of_another_shape_has_a_line_of_its_own():
    keys = [f"layers.{n}.w" for n in range(6)]
    assert folded(keys, lambda key: key == "layers.3.w") == ["layers.{0..2,4,5}.w".replace("4,5", "4..5"), "layers.3.w"]


def test_a_missing_layer_is_not_claimed():
    keys = ["a.0.b.0", "a.0.b.1", "a.1.b.0"]
    assert sorted(itertools.chain.from_iterable(map(expanded, folded(keys)))) == sorted(keys)


@pytest.mark.parametrize("key", ["a.007.b", "a.-1", "a.١.b", "", "...", "1e5", "a.99999999999999999999.b"])
def test_a_key_alone_is_shown_as_it_is(key):
    assert folded([key]) == [key]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 1, 2], "{0..2}"),
        ([0, 9, 18, 27], "{0..27..9}"),
        ([0, 1, 5], "{0..1,5}"),
        ([3, 7], "{3,7}"),
        ([4], "4"),
    ],
)
def test_braces(numbers, text):
    assert braces(numbers) == text


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1), st.integers(0, 2))
def test_lines_stand_for_exactly_the_keys(pairs, kinds):
    keys = [f"x.{a}.y.{b}.z" for a, b in pairs]
    lines = fold(keys, lambda key: key, lambda key: len(key) + hash(key[2]) % (kinds + 1))
    assert sorted(key for line in lines for key in line.members) == sorted(keys)
    for line in lines:
        assert sorted(expanded(line.name)) == sorted(line.members)
