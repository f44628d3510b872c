"""Objects come back equal, and nothing that a file names is run."""

import collections
import io
import os
import pickle

import numpy as np
import pytest
import torch

import torch_xla_ckpt as xc
from support.objects import HARMLESS, Colour, Config, Point
from torch_xla_ckpt.serialization.objects import decode, encode


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
    return type(a) is type(b) and a == b


def through(value, **options):
    options = {"allow_types": (), "trust_pickle": False, **options}
    return decode("key", encode("key", value, to_host=torch.Tensor.cpu), **options)


@pytest.mark.parametrize("value", HARMLESS, ids=repr)
def test_harmless_values_come_back_equal(value):
    assert same(through(value), value)


def test_random_states_come_back_equal():
    state = np.random.RandomState(3).get_state()
    back = through(state)
    assert back[0] == state[0] and (back[1] == state[1]).all() and back[2:] == state[2:]
    generator = np.random.default_rng(3).bit_generator.state
    assert through(generator) == generator


def test_a_tensor_inside_an_object_comes_back_bit_for_bit():
    value = (torch.tensor([1.0, float("nan")]), [torch.ones(2, dtype=torch.bfloat16)])
    back = through(value)
    assert torch.equal(back[0].view(torch.int32), value[0].view(torch.int32)) and torch.equal(back[1][0], value[1][0])


@pytest.mark.parametrize("value", [Colour.RED, Config(3, "x"), Point(1, 2)], ids=repr)
def test_the_callers_own_types_need_the_callers_word(value):
    with pytest.raises(xc.UnsafeObjectError) as caught:
        through(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    assert caught.value.key == "key" and caught.value.types == (name,)
    for said in ("'key'", name, f"allow_types=[{type(value).__name__}]", "trust_pickle=True"):
        assert said in str(caught.value)
    assert same(through(value, allow_types=[type(value)]), value)
    assert same(through(value, trust_pickle=True), value)


class Runs:
    """Pickles to a call of ``call(*args)``."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.mark.parametrize(
    "payload",
    [
        lambda path: Runs(os.mkdir, path),
        lambda path: Runs(eval, f"__import__('os').mkdir({path!r})"),
        lambda path: Runs(exec, f"import os; os.mkdir({path!r})"),
        lambda path: {"deep": [(Runs(os.mkdir, path),)]},
        lambda path: np.array([Runs(os.mkdir, path)], dtype=object),
        lambda path: collections.defaultdict(list, a=Runs(os.mkdir, path)),
        lambda path: Runs(getattr, Runs(__import__, "os"), "mkdir"),
        lambda path: Runs(pickle.loads, pickle.dumps(Runs(os.mkdir, path))),
        lambda path: Runs(map, Runs(os.mkdir, path), [path]),
        lambda path: Runs(torch.load, path),
    ],
)
def test_code_in_a_file_is_refused_and_not_run(payload, tmp_path):
    path = str(tmp_path / "ran")
    data = io.BytesIO()
    torch.save(payload(path), data)
    data.seek(0)
    with pytest.raises(xc.UnsafeObjectError):
        decode("key", data, (), False)
    assert not os.path.exists(path)


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(xc.CheckpointError, match=r"cannot save 'key'.*generator"):
        encode("key", (n for n in range(3)), to_host=torch.Tensor.cpu)


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_truncated_bytes_are_an_error_of_ours(keep):
    data = encode("key", {"a": 1}, to_host=torch.Tensor.cpu).getvalue()[:keep]
    with pytest.raises(xc.CheckpointError, match="cannot read 'key'"):
        decode("key", io.BytesIO(data), (), False)


def test_the_allowlist_of_the_process_is_left_as_it_was():
    before = set(torch.serialization.get_safe_globals())
    through(np.float32(1), allow_types=[Config])
    assert set(torch.serialization.get_safe_globals()) == before
