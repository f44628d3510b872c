"""``assert_same_state`` finds any difference of two states, and none between shardings of the same values."""

import collections
import datetime
import random
import struct
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_xla_ckpt as xc
from support.async_saves import DTYPES
from support.meshes import mesh, put, random_bits
from torch_xla_ckpt.testing import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore")

NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000 + n))[0] for n in (0, 1))


def difference(a, b):
    """The text of the error for two states that differ."""
    with pytest.raises(AssertionError) as error:
        assert_same_state(a, b)
    return str(error.value)


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def test_tensors_with_other_shardings_and_devices_are_the_same():
    host = torch.rand(12, 10)  # neither dimension is a multiple of 8, so shards are padded
    states = [
        {"w": host},
        {"w": put(host, mesh((8,)), ("a", None))},
        {"w": put(host, mesh((4, 2)), ("b", "a"))},
        {"w": put(host, mesh((2, 4), tuple(reversed(range(8)))), (None, ("a", "b")))},
        {"w": put(host, mesh((8,)), None)},
    ]
    for a in states:
        for b in states:
            assert_same_state(a, b)


def test_one_bit_of_any_dtype_is_found_in_a_shard_of_another_mesh():
    for n, dtype in enumerate(DTYPES):
        host = random_bits((6, 10), dtype, n)
        changed = host.clone()
        rows = changed.view(torch.uint8).view(60, dtype.itemsize)
        rows[37, 0] ^= 1
        a, b = put(host, mesh((4, 2)), ("a", "b")), put(changed, mesh((8,)), (None, "a"))
        assert_same_state({"t": a}, {"t": host})
        text = difference({"t": a}, {"t": b})
        assert "t: 1 of 60 elements differ, first at [3, 7]: " in text, (dtype, text)


def test_nans_with_other_payloads_and_negative_zeros_differ():
    for a, b, words in (
        (torch.tensor([0.0]), torch.tensor([-0.0]), "0.0 and -0.0"),
        (
            torch.tensor([NAN], dtype=torch.float64),
            torch.tensor([OTHER_NAN], dtype=torch.float64),
            "nan with bits 0x7ff8",
        ),
        (0.0, -0.0, "0.0 and -0.0"),
        (NAN, OTHER_NAN, "nan with bits 0x"),
        (complex(0.0, 1), complex(-0.0, 1), "1j"),
        (np.array([1, 0.0]), np.array([1, -0.0]), "1 of 2 elements differ, first at [1]"),
        (np.float32(0.0), np.float32(-0.0), "0.0"),
    ):
        assert words in difference({"value": a}, {"value": b})
    assert_same_state({"nan": NAN, "t": torch.tensor([NAN])}, {"nan": NAN, "t": torch.tensor([NAN])})


def test_each_kind_of_difference_is_named_with_its_key():
    a = {
        "model": {"w": torch.zeros(2, 3), "b": torch.zeros(3), "list": [torch.ones(2), torch.ones(2)]},
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}},
        "only a": 1,
        "type": 1,
        "tensor": torch.ones(2),
        "length": [1, 2],
        "same": "x",
    }
    b = {
        "model": {
            "w": torch.zeros(3, 2),
            "b": torch.zeros(3, dtype=torch.bfloat16),
            "list": [torch.ones(2), torch.zeros(2)],
        },
        "optim": {"state": {0: {"step": torch.tensor(4.0)}}},
        "type": 1.0,
        "tensor": [1.0, 1.0],
        "length": [1, 2, 3],
        "same": "x",
        "only b": 1,
    }
    lines = difference(a, b).splitlines()
    assert lines[0] == "the states differ in 9 keys (first state, then second state):"
    assert set(lines[1:]) == {
        "  model.w: shape (2, 3) and (3, 2)",
        "  model.b: dtype torch.float32 and torch.bfloat16",
        "  model.list.1: 2 of 2 elements differ, first at [0]: 1.0 and 0.0",
        "  optim.state.0.step: 3.0 and 4.0",
        "  only a: only in the first state",
        "  only b: only in the second state",
        "  type: int 1 and float 1.0",
        "  tensor: a tensor of shape (2,) and torch.float32 and list [1.0, 1.0]",
        "  length: 2 and 3 elements",
    }


def test_an_error_lists_a_dozen_keys_and_counts_the_rest():
    text = difference({str(n): n for n in range(40)}, {str(n): -n for n in range(40)})
    assert len(text.splitlines()) == 14 and "differ in 39 keys" in text and text.endswith("and 27 more")


def test_modules_and_optimizers_are_compared_by_their_state_dicts(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, other_optimizer), (twin, twin_optimizer) = made(1), made(2), made(1)
    assert_same_state({"m": model, "o": optimizer}, {"m": twin.state_dict(), "o": twin_optimizer.state_dict()})
    assert_same_state(model, twin)
    text = difference({"m": model, "o": optimizer}, {"m": other, "o": other_optimizer})
    assert "m.weight: 12 of 12 elements differ, first at [0, 0]" in text and "o.state.0.exp_avg:" in text
    xc.save({"m": model, "o": optimizer}, tmp_path)
    xc.load({"m": other, "o": other_optimizer}, tmp_path)
    assert_same_state({"m": model, "o": optimizer}, {"m": other, "o": other_optimizer})


def test_objects_are_compared_by_what_pickle_saves():
    when = datetime.datetime(2026, 1, 2)
    cycle, other_cycle = Thing(n=1), Thing(n=1)
    cycle.itself, other_cycle.itself = cycle, other_cycle
    lock = threading.Lock()
    for same, other in (
        (Thing(a=1, t=torch.ones(2)), Thing(a=1, t=torch.ones(2))),
        (cycle, other_cycle),
        (random.Random(3), random.Random(3)),
        (when, datetime.datetime(2026, 1, 2)),
        (collections.deque([torch.ones(2)]), collections.deque([torch.ones(2)])),
        (collections.OrderedDict(a=1), {"a": 1}),
        ((1, {2, 3}, None, b"x", range(3), lock), (1, {2, 3}, None, b"x", range(3), lock)),
    ):
        assert_same_state({"o": same}, {"o": other})
    other_cycle.n = 2
    for a, b, text in (
        (Thing(a=1, t=torch.ones(2)), Thing(a=1, t=torch.zeros(2)), "o.t: 2 of 2 elements differ"),
        (Thing(a=Thing(b=1)), Thing(a=Thing(b=2)), "o.a.b: 1 and 2"),
        (Thing(a=1), Thing(), "o.a: only in the first state"),
        (cycle, other_cycle, "o.n: 1 and 2"),
        (random.Random(3), random.Random(4), "o: <random.Random"),
        (when, datetime.datetime(2026, 1, 3), "o: datetime.datetime(2026, 1, 2"),
        (collections.deque([1]), collections.deque([2]), "o: deque([1]) and deque([2])"),
        ({1, 2}, {1, 3}, "o: {1, 2} and {1, 3}"),
        (threading.Lock(), lock, "o: <unlocked"),
        ((1, 2), [1, 2], "o: tuple (1, 2) and list [1, 2]"),
    ):
        assert text in difference({"o": a}, {"o": b})


def test_dtensors_are_compared_with_tensors_in_host_memory():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        on = init_device_mesh("cpu", (1,))
        host = torch.arange(6.0)
        assert_same_state({"t": distribute_tensor(host, on, [Shard(0)])}, {"t": host})
        text = difference({"t": distribute_tensor(host, on, [Shard(0)])}, {"t": host + 1})
        assert "t: 6 of 6 elements differ, first at [0]: 0.0 and 1.0" in text
    finally:
        dist.destroy_process_group()


def test_regions_that_this_rank_does_not_hold_are_not_passed_over(monkeypatch):
    from support.hosts import share_access
    from torch_xla_ckpt.testing import compare

    monkeypatch.setattr(compare, "access_of", share_access(0, 2))
    host = torch.rand(16, 4)
    by_rows = put(host, mesh((8,)), ("a", None))
    changed = host.clone()
    changed[3, 1] += 1
    assert_same_state({"t": by_rows}, {"t": put(host, mesh((8,)), ("a", None))})
    assert "first at [3, 1]" in difference({"t": by_rows}, {"t": put(changed, mesh((8,)), ("a", None))})
    with pytest.raises(ValueError, match="t: this rank holds different regions of the two tensors"):
        assert_same_state({"t": by_rows}, {"t": put(host, mesh((8,)), (None, None))})


def test_keys_that_python_takes_for_one_number_differ():
    for a, b in [(1, True), (1, 1.0), (0.0, False)]:
        with pytest.raises(AssertionError, match="only in the first"):
            assert_same_state({a: 2}, {b: 2})
    assert_same_state({1: 2, "1": 3}, {"1": 3, 1: 2})


def test_a_tensor_that_cannot_be_compared_is_named_by_its_key():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(xc.CheckpointError, match=r"'model\.a'"):
        assert_same_state({"model": {"a": sparse}}, {"model": {"a": sparse.clone()}})
