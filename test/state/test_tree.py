"""Keys are named as DCP names them, and edits reach the right container."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torch_xla_ckpt import CheckpointError
from torch_xla_ckpt.state import StateDictEditor, flatten

leaves = st.one_of(st.integers(), st.text(max_size=2), st.none(), st.builds(lambda: torch.zeros(1)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 0, 1]), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["m", "o", 7]), trees, max_size=3))
def test_keys_and_paths_are_the_same_as_in_dcp(state):
    flat, paths = flatten_state_dict(state)
    leaves = flatten(state)
    assert {key: leaf.path for key, leaf in leaves.items()} == paths
    assert all(leaf.value is flat[key] for key, leaf in leaves.items())


@given(st.dictionaries(st.sampled_from(["m", "o", 7]), trees, max_size=3))
def test_replaced_value_is_found_under_its_key_and_undone(state):
    for key, leaf in flatten(state).items():
        new = torch.zeros(2)
        editor = StateDictEditor(state)
        editor.replace(leaf, new)
        assert flatten(state)[key].value is new
        editor.undo()
        assert flatten(state)[key].value is leaf.value


def test_integer_keys_of_mappings_stay_integers():
    """DCP's own set_element would add a second key, a string, and keep the old value."""
    state = {"state": {0: {"step": 1}}}
    StateDictEditor(state).replace(flatten(state)["state.0.step"], 2)
    assert state == {"state": {0: {"step": 2}}}


def test_values_of_any_mapping_have_keys_of_their_own():
    state = {"a": OrderedDict(b=OrderedDict(c=1))}
    assert flatten(state)["a.b.c"].path == ("a", "b", "c")


@pytest.mark.parametrize("state", [{"a.b": 1, "a": {"b": 2}}, {"a": {1: 1, "1": 2}}])
def test_two_values_with_the_same_key_are_refused(state):
    with pytest.raises(CheckpointError, match="two values of the state dict have the key"):
        flatten(state)


@given(trees)
def test_inserting_all_leaves_rebuilds_the_state_dict(state):
    """Inserted path by path into an empty dict, the leaves make the same tree; undo empties it again."""
    if not isinstance(state, dict):
        state = {"root": state}
    leaves = flatten(state, with_empty=True)
    grown = {}
    editor = StateDictEditor(grown)
    paths = [leaf.path for leaf in leaves.values()]
    assert all(editor.has_room(path) for path in paths)
    editor.insert((path, leaves[".".join(map(str, path))].value) for path in paths)
    again = flatten(grown, with_empty=True)
    assert [(key, type(leaf.slot)) for key, leaf in again.items()] == [
        (key, type(leaf.slot)) for key, leaf in leaves.items()
    ]
    assert all(again[key].value is leaf.value or again[key].value == {} for key, leaf in leaves.items())
    editor.undo()
    assert grown == {}


def test_list_takes_no_position_beyond_its_end():
    editor = StateDictEditor({"xs": [1, torch.ones(1)], "whole": [1, 2]})
    assert not editor.has_room(("xs", 3))
    assert editor.has_room(("xs", 2)) and editor.has_room(("xs", 3, "a"))
    assert not editor.has_room(("new", 1)) and editor.has_room(("other", 0)) and editor.has_room(("other", 1))
    assert not editor.has_room(("xs", 0, "a")) and not editor.has_room(("xs", "name"))
    assert not editor.has_room(("whole", 2))  # a list without tensors is one object
