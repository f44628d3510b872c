"""Policies of a load, where target and checkpoint differ: create, cast, rename, keep, refuse, and report."""

import collections
import copy
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import torch_xla_ckpt as xc


def saved(path, state):
    xc.save(state, path)
    return path


def tensors(*names):
    return {name: torch.full((4,), float(n + 1)) for n, name in enumerate(names)}


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "torch_xla_ckpt")
    return lambda: [record.getMessage() for record in caplog.records]


# --- the program of pytorch#126881


class Lazy:
    """A Stateful whose state has "data" only after content was set."""

    def __init__(self):
        self.content = None

    def state_dict(self):
        return {"kind": "lazy"} if self.content is None else {"kind": "lazy", "data": self.content}

    def load_state_dict(self, state):
        self.content = state.get("data")


@pytest.mark.parametrize("call", ["dcp", "xc"])
def test_values_missing_from_a_nested_dict_are_created(tmp_path, call):
    content = {"values": torch.arange(5), "name": "n", "deep": [{"x": torch.ones(2)}, 3]}
    saved(tmp_path, {"app": {"data": content, "step": 1}})
    target = {"app": {"step": 0}}
    if call == "dcp":
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path), planner=xc.SPMDLoadPlanner())
    else:
        report = xc.load(target, tmp_path)
        assert set(report.created) == {
            "app.data.values", "app.data.name", "app.data.deep.0.x", "app.data.deep.1"
        }  # fmt: skip
    assert target["app"]["step"] == 1
    data = target["app"]["data"]
    assert torch.equal(data["values"], content["values"]) and data["name"] == "n"
    assert torch.equal(data["deep"][0]["x"], torch.ones(2)) and data["deep"][1] == 3


@pytest.mark.parametrize("call", ["dcp", "xc"])
def test_values_missing_from_a_stateful_are_created(tmp_path, call):
    writer = Lazy()
    writer.content = {"position": 7, "buffer": torch.arange(3)}
    saved(tmp_path, {"loader": writer})
    reader = Lazy()
    if call == "dcp":
        dcp.load({"loader": reader}, checkpoint_id=tmp_path, planner=xc.SPMDLoadPlanner())
    else:
        xc.load({"loader": reader}, tmp_path)
    assert reader.content["position"] == 7
    assert torch.equal(reader.content["buffer"], torch.arange(3))


@pytest.mark.parametrize("placeholder", [None, [], {}])
def test_placeholders_are_replaced_by_saved_containers(tmp_path, placeholder):
    saved(tmp_path, {"a": {"list": [torch.ones(1), {"x": 2}], "dict": {"k": 1, "t": torch.zeros(2)}}})
    for name in ("list", "dict"):
        target = {"a": {name: copy.copy(placeholder)}}
        xc.load(target, tmp_path)
        assert type(target["a"][name]) is (list if name == "list" else dict)
    assert target["a"]["dict"]["k"] == 1


def test_integer_keys_stay_integers_and_string_keys_stay_strings(tmp_path):
    state = {"a": {0: torch.ones(1), 7: {"x": 1}}, "b": {"0": torch.ones(1), "7": 3}, "c": {-2: 1, "y": 2}}
    saved(tmp_path, state)
    target = {"a": {}, "b": {}, "c": {}}
    xc.load(target, tmp_path)
    deeper = {"a": {7: {}}, "c": {-2: None}}
    xc.load(deeper, tmp_path)
    assert deeper == {"a": {7: {"x": 1}, 0: torch.ones(1)}, "c": {-2: 1, "y": 2}}
    assert list(target["a"]) == [0, 7] and sorted(target["b"]) == ["0", "7"] and set(target["c"]) == {-2, "y"}


def test_optimizer_state_of_stock_dcp_checkpoints_is_keyed_by_integers(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path)
    target = {"optim": torch.optim.Adam(model.parameters()).state_dict()}
    xc.load(target, tmp_path)
    assert list(target["optim"]["state"]) == [0, 1]


def test_empty_containers_are_saved_and_loaded(tmp_path):
    state = {"a": {"none": {}, "list": [{}, torch.ones(1), []], "optim": {"state": {}, "lr": 1}}, "b": {}}
    saved(tmp_path, state)
    target = {"a": {}, "b": None}
    xc.load(target, tmp_path)
    assert str(target) == str(state)
    kept = collections.OrderedDict()
    target = {"a": {"none": kept}}
    xc.load(target, tmp_path)
    assert target["a"]["none"] is kept


def test_saved_empty_dict_does_not_replace_tensors(tmp_path):
    saved(tmp_path, {"optim": {"state": {}}})
    with pytest.raises(xc.MismatchError, match=r"optim\.state\.0\.m"):
        xc.load({"optim": {"state": {0: {"m": torch.ones(1)}}}}, tmp_path)


# --- missing


def test_one_error_lists_all_missing_keys_and_nothing_is_changed(tmp_path):
    saved(tmp_path, {"model": tensors("a")})
    target = {"model": {**tensors("a", "b", "c"), "n": 3}}
    before = copy.deepcopy(target)
    with pytest.raises(xc.MismatchError) as error:
        xc.load(target, tmp_path)
    assert {m.key for m in error.value.mismatches} == {"model.b", "model.c", "model.n"}
    assert str(target) == str(before)


@pytest.mark.parametrize("policy", ["warn", "keep"])
def test_missing_keys_keep_the_values_of_the_target(tmp_path, said, policy):
    saved(tmp_path, {"model": tensors("a")})
    target = {"model": {"a": torch.zeros(4), "b": torch.full((4,), 9.0), "n": 3}}
    report = xc.load(target, tmp_path, missing=policy)
    assert target["model"]["a"].eq(1).all() and target["model"]["b"].eq(9).all() and target["model"]["n"] == 3
    assert set(report.missing) == {"model.b", "model.n"}
    assert len(said()) == (policy == "warn")
    assert policy == "keep" or ("model.b" in said()[0] and "model.n" in said()[0])


# --- unexpected


def test_parts_that_the_target_does_not_name_are_not_requested_and_cause_no_warning(tmp_path, said):
    saved(tmp_path, {"model": tensors("a"), "optim": {"state": tensors("m")}, "step": 4})
    report = xc.load({"model": tensors("a")}, tmp_path)
    assert set(report.not_requested) == {"optim.state.m", "step"}
    assert (report.unexpected, report.created, said()) == ((), (), [])


def test_empty_dict_requests_its_part_of_the_tree(tmp_path):
    saved(tmp_path, {"model": tensors("a"), "optim": {"state": tensors("m")}})
    target = {"model": tensors("a"), "optim": {}}
    report = xc.load(target, tmp_path)
    assert report.created == ("optim.state.m",) and target["optim"]["state"]["m"].eq(1).all()


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_unexpected_keys_are_left_out(tmp_path, said, policy):
    saved(tmp_path, {"model": tensors("a", "b")})
    target = {"model": {"a": torch.zeros(4)}}
    report = xc.load(target, tmp_path, unexpected=policy)
    assert report.unexpected == ("model.b",) and list(target["model"]) == ["a"]
    assert len(said()) == (policy == "warn")


def test_one_error_lists_all_unexpected_keys(tmp_path):
    saved(tmp_path, {"model": {**tensors("a", "b", "c"), "n": 1}})
    target = {"model": {"a": torch.zeros(4)}}
    with pytest.raises(xc.MismatchError) as error:
        xc.load(target, tmp_path, unexpected="error")
    assert {m.key for m in error.value.mismatches} == {"model.b", "model.c", "model.n"}
    assert target["model"]["a"].eq(0).all()


def test_flat_target_of_tensors_gets_a_warning_instead_of_new_keys(tmp_path, said):
    saved(tmp_path, tensors("a", "b"))
    target = {"a": torch.zeros(4)}
    report = xc.load(target, tmp_path)
    assert list(target) == ["a"] and report.unexpected == ("b",)
    assert len(said()) == 1 and "b" in said()[0]


def test_placement_decides_where_tensors_are_created(tmp_path):
    saved(tmp_path, {"m": {"a": torch.ones(2, 3), "n": 5}})
    asked = []

    def placement(key, shape, dtype):
        asked.append((key, shape, dtype))
        return torch.device("cpu")

    target = {"m": {}}
    xc.load(target, tmp_path, placement=placement)
    assert asked == [("m.a", torch.Size((2, 3)), torch.float32)]
    assert target["m"]["a"].eq(1).all() and target["m"]["n"] == 5


def test_lists_grow_and_keys_without_room_are_reported(tmp_path, said):
    saved(tmp_path, {"m": {"xs": [torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)]}})
    target = {"m": {"xs": [torch.full((1,), 9.0)]}}
    xc.load(target, tmp_path)
    assert [x.item() for x in target["m"]["xs"]] == [0, 1, 2]
    target = {"m": {"xs": [torch.full((1,), 9.0)]}}
    report = xc.load(target, tmp_path, exclude="m.xs.1")
    assert [x.item() for x in target["m"]["xs"]] == [0] and report.unexpected == ("m.xs.2",)
    assert report.not_requested == ("m.xs.1",) and len(said()) == 1


def test_failed_load_inserts_no_created_values(tmp_path):
    saved(tmp_path, {"m": {"a": torch.ones(4), "big": torch.ones(1 << 16), "n": {"x": 1}}})
    with open(next(tmp_path.glob("*.distcp")), "r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 2048)
    target = {"m": {"n": {"x": 0}, "a": torch.zeros(4)}}
    with pytest.raises(xc.CorruptCheckpointError):
        xc.load(target, tmp_path)
    assert set(target["m"]) == {"n", "a"} and target["m"]["n"] == {"x": 0}


class Odd:
    """A type that loads refuse unless it is allowed."""


def test_object_of_a_type_that_is_not_allowed_is_not_created(tmp_path):
    saved(tmp_path, {"m": {"a": torch.ones(4), "odd": Odd(), "n": {"x": 1}}})
    target = {"m": {"n": {"x": 0}}}
    with pytest.raises(xc.UnsafeObjectError, match=r"'m\.odd'.*Odd"):
        xc.load(target, tmp_path)
    assert target == {"m": {"n": {"x": 0}}}
    xc.load(target, tmp_path, allow_types=[Odd])
    assert type(target["m"]["odd"]) is Odd and target["m"]["n"] == {"x": 1}


def test_all_edits_are_undone_if_a_container_refuses_a_value(tmp_path):
    class Picky(dict):
        def __setitem__(self, key, value):
            if key == "b":
                raise KeyError("not here")
            super().__setitem__(key, value)

    saved(tmp_path, {"m": tensors("a", "b", "c"), "k": {"n": 2}})
    target = {"m": Picky(), "k": {"n": 1}}
    with pytest.raises(xc.CheckpointError, match="not here"):
        xc.load(target, tmp_path)
    assert target == {"m": {}, "k": {"n": 1}}


# --- dtype


def test_casts_are_reported_or_refused(tmp_path, said):
    saved(tmp_path, {"m": tensors("a", "b")})
    target = {"m": {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(4)}}
    with pytest.raises(xc.MismatchError) as error:
        xc.load(target, tmp_path, dtype="error")
    assert [(m.key, m.kind) for m in error.value.mismatches] == [("m.a", "dtype")]
    assert target["m"]["b"].eq(0).all()
    report = xc.load(target, tmp_path)
    assert report.cast == {"m.a": (torch.float32, torch.bfloat16)} and "m.a" in said()[-1]


# --- names


@pytest.mark.parametrize("wrapper", ["_orig_module", "_orig_mod", "module"])
@pytest.mark.parametrize("side", ["saved", "target"])
def test_keys_match_despite_prefixes_of_wrappers(tmp_path, wrapper, side):
    plain = {"layer.weight": torch.ones(3), "layer.bias": torch.full((3,), 2.0)}
    wrapped = {f"{wrapper}.{key}": value for key, value in plain.items()}
    saved(tmp_path, {"model": wrapped if side == "saved" else plain})
    target = {"model": {key: torch.zeros(3) for key in (plain if side == "saved" else wrapped)}}
    report = xc.load(target, tmp_path)
    assert [value[0].item() for value in target["model"].values()] == [1, 2]
    assert len(report.renamed) == 2 and report.created == report.unexpected == ()


def test_prefixes_of_wrappers_count_if_they_tell_keys_apart(tmp_path):
    saved(tmp_path, {"model": {"module.w": torch.ones(1), "_orig_mod.w": torch.ones(1)}})
    with pytest.raises(xc.MismatchError, match=r"model\.w"):
        xc.load({"model": {"w": torch.zeros(1)}}, tmp_path)


def test_keys_are_renamed_by_mapping_and_by_function(tmp_path):
    saved(tmp_path, {"model": {"old": torch.ones(1), "same": torch.full((1,), 2.0)}})
    for rename in ({"model.old": "model.new"}, lambda key: key.replace("old", "new")):
        target = {"model": {"new": torch.zeros(1), "same": torch.zeros(1)}}
        report = xc.load(target, tmp_path, rename=rename)
        assert (target["model"]["new"].item(), target["model"]["same"].item()) == (1, 2)
        assert report.renamed == {"model.new": "model.old"} and report.created == ()


def test_one_saved_key_with_two_new_names_fills_tied_weights(tmp_path):
    saved(tmp_path, {"model": {"embed": torch.rand(8, 4)}})
    target = {"model": {"embed": torch.zeros(8, 4), "head": torch.zeros(8, 4)}}
    xc.load(target, tmp_path, rename={"model.embed": ["model.embed", "model.head"]})
    assert torch.equal(target["model"]["embed"], target["model"]["head"]) and target["model"]["head"].any()


def test_renames_of_absent_keys_and_to_the_same_name_are_refused(tmp_path):
    saved(tmp_path, {"model": tensors("a", "b")})
    target = {"model": {"c": torch.zeros(4)}}
    with pytest.raises(xc.CheckpointError, match=r"both 'model.a' and 'model.b'"):
        xc.load(target, tmp_path, rename=lambda key: "model.c")
    with pytest.raises(xc.CheckpointError, match=r"lacks: model.nope"):
        xc.load(target, tmp_path, rename={"model.nope": "model.c"})
    assert target["model"]["c"].eq(0).all()


# --- parts


def test_keys_that_patterns_leave_out_cause_no_warning(tmp_path, said):
    saved(tmp_path, {"model": tensors("enc.a", "enc.b", "dec.a"), "step": 3})
    target = {"model": {"enc.a": torch.zeros(4), "enc.b": torch.zeros(4), "dec.x": torch.zeros(4)}, "step": 0}
    report = xc.load(target, tmp_path, only="model.enc.*")
    assert target["model"]["enc.b"].eq(2).all() and target["step"] == 0
    assert set(report.not_requested) == {"model.dec.a", "model.dec.x", "step"} and said() == []
    with pytest.raises(xc.MismatchError, match=r"model\.enc\.c"):
        xc.load({"model": {"enc.c": torch.zeros(4)}}, tmp_path, only=["model.enc.*"], exclude="*.a")


def test_patterns_that_match_no_key_are_refused(tmp_path):
    saved(tmp_path, {"model": tensors("a")})
    with pytest.raises(xc.CheckpointError, match=r"'modle\.\*'"):
        xc.load({"model": tensors("a")}, tmp_path, only=["model.*", "modle.*"])


@pytest.mark.parametrize(
    "option", [{"missing": "raise"}, {"unexpected": "create"}, {"dtype": "keep"}, {"shape": "cast"}]
)
def test_unknown_values_of_options_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        xc.SPMDLoadPlanner(**option)


def test_report_prints_a_table(tmp_path):
    saved(tmp_path, {"m": {**tensors("a", "b"), "n": 1}, "other": 2})
    text = str(xc.load({"m": {"a": torch.zeros(4, dtype=torch.float64)}}, tmp_path))
    for line in ("loaded", "cast", "m.a (float32 -> float64)", "created", "m.b", "not requested"):
        assert line in text


# --- any pair of trees

KEYS = st.sampled_from(["a", "b", "c", 0, 1])
TENSORS = st.integers(0, 9).map(lambda n: torch.full((2,), float(n)))
VALUES = st.integers(1, 9) | TENSORS
TREES = st.dictionaries(
    st.sampled_from(["x", "y", "z"]),
    st.recursive(
        st.dictionaries(KEYS, VALUES, max_size=3) | st.lists(TENSORS, max_size=3),
        lambda trees: st.dictionaries(KEYS, trees | VALUES, max_size=3) | st.lists(trees | TENSORS, max_size=3),
    ),
    max_size=3,
)


def opens(value):
    """Whether DCP gives the values inside keys of their own: dicts, and lists with tensors or such containers."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(isinstance(entry, torch.Tensor) or opens(entry) for entry in value)


def children(tree):
    return [(str(key), value) for key, value in (tree.items() if isinstance(tree, dict) else enumerate(tree))]


def leaves(tree, path=()):
    if not opens(tree) or (path and not tree):
        yield path, tree
        return
    for name, value in children(tree):
        yield from leaves(value, (*path, name))


def subtree(tree, path):
    for element in path:
        if not isinstance(tree, (dict, list)):
            return None
        tree = dict(children(tree)).get(element)
    return tree


def has_tensor(tree):
    return any(isinstance(value, torch.Tensor) for _, value in leaves(tree))


def nothing(value):
    return value is None or (isinstance(value, (dict, list)) and not value)


def expected(saved_tree, target):
    """A simple model of the outcome of every key; None if a tensor meets an object."""
    have = dict(leaves(saved_tree))
    want = dict(leaves(target))
    starts = {path[:n] for path in have for n in range(len(path))}
    # What is empty gives way to a tensor. Else it is no key of the target, unless it was saved as one; an empty list
    # is, unless it gives way to a container.
    want = {
        path: value
        for path, value in want.items()
        if not nothing(value)
        or (isinstance(value, list) and path not in starts and not isinstance(have.get(path), torch.Tensor))
        or (isinstance(value, dict) and path in have and not isinstance(have[path], torch.Tensor))
    }
    outcomes = {}
    # A part of the target without tensors gives way to an object that was saved in its place.
    for path, value in have.items():
        there = subtree(target, path)
        if opens(there) and there and not has_tensor(there) and not isinstance(value, torch.Tensor):
            want = {other: v for other, v in want.items() if other[: len(path)] != path} | {path: {}}
    for path, value in want.items():
        if path not in have:
            outcomes[path] = "missing"
        elif isinstance(value, torch.Tensor) != isinstance(have[path], torch.Tensor):
            return None
        else:
            outcomes[path] = "loaded"
    for path in have:
        if path in outcomes:
            continue
        ways = [(subtree(target, path[:n]), subtree(saved_tree, path[:n])) for n in range(1, len(path) + 1)]
        # Containers of the same kind on the way, or what gives way: nothing, and empty containers.
        free = all(nothing(a) or (opens(a) and type(a) is type(b)) for a, b in ways) and nothing(ways[-1][0])
        outcomes[path] = "not requested" if path[0] not in target else "created" if free else "unexpected"
    for top, value in target.items():
        if has_only_dicts(value) and not any(path[0] == top for path in have):
            outcomes[top,] = "missing"
    return outcomes


def has_only_dicts(tree):
    return isinstance(tree, dict) and all(map(has_only_dicts, tree.values()))


@pytest.mark.slow
@given(TREES, TREES)
def test_any_target_gets_the_values_it_requests_and_the_report_is_right(tmp_path_factory, saved_tree, target):
    path = tmp_path_factory.mktemp("trees")
    xc.save(saved_tree, path)
    outcomes = expected(saved_tree, target)
    before = dict(leaves(target))
    if outcomes is None:
        with pytest.raises(xc.MismatchError):
            xc.load(target, path, missing="keep")
        assert str(dict(leaves(target))) == str(before)
        return
    report = xc.load(target, path, missing="keep")
    assert {key: outcome.status for key, outcome in report.outcomes.items()} == {
        ".".join(path): status for path, status in outcomes.items()
    }
    have = dict(leaves(saved_tree))
    for key, status in outcomes.items():
        if status in ("loaded", "created"):
            assert str(subtree(target, key)) == str(have[key])
        elif status == "missing" and key in before:
            assert str(subtree(target, key)) == str(before[key])
    known = {key[:n] for key in outcomes for n in range(len(key) + 1)}
    assert not [key for key, value in leaves(target) if key not in known and not nothing(value)]


@pytest.mark.parametrize("target", [{"modle": {}}, {"modle": {"encoder": {}}}, {"model": {}, "modle": {}}])
def test_an_empty_dict_of_whose_name_the_checkpoint_has_nothing_is_missing(tmp_path, target, said):
    xc.save({"model": tensors("w"), "nothing": {}}, tmp_path)
    with pytest.raises(xc.MismatchError, match=r"modle"):
        xc.load(copy.deepcopy(target), tmp_path)
    report = xc.load(target, tmp_path, missing="warn")
    assert report.outcomes["modle"].status == "missing" and any("modle" in line for line in said())
    xc.load({"nothing": {}, "model": {}}, tmp_path)
    xc.load({"net": {}}, tmp_path, rename={"model.w": "net.w"})


def test_stock_checkpoints_have_no_empty_dicts_so_their_names_may_be_absent(tmp_path, said):
    dcp.save({"model": tensors("w"), "scaler": {}}, checkpoint_id=tmp_path, no_dist=True)
    target = {"model": {}, "scaler": {}}
    xc.load(target, tmp_path)
    assert target["scaler"] == {} and target["model"].keys() == {"w"} and any("'scaler'" in line for line in said())
