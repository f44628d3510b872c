"""Loads treat views, aliases and autograd as ``copy_`` does. Targets that cannot hold the data are refused."""

import logging

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import torch_xla_ckpt as xc
from support import interpreters
from support.meshes import mesh, put, settle
from torch_xla_ckpt.layout import elements_overlap

ON = mesh((4, 2))
DATA = torch.arange(64.0).reshape(8, 8)
LARGE = torch.arange(float(1 << 19)).reshape(1024, 512)  # large enough to go to the device straight from the file


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "w"
    xc.save({"w": DATA, "large": LARGE}, path, sync=False)
    return path


def tensor_on(device, data):
    tensor = torch.zeros(data.shape) if device == "host" else torch.zeros(data.shape).to("xla")
    if device in ("sharded", "wrapped"):
        wrapped = xs.mark_sharding(tensor, ON, ("a", "b"))
        settle()
        return wrapped if device == "wrapped" else tensor
    if device != "host":
        settle()
    return tensor


def inner(tensor):
    return getattr(tensor, "global_tensor", tensor)


@pytest.mark.parametrize("key", ["w", "large"])
@pytest.mark.parametrize("device", ["host", "whole", "sharded", "wrapped"])
@pytest.mark.parametrize("through", ["itself", "detach", "data"])
@pytest.mark.parametrize("synced", [False, True])
def test_views_and_aliases_see_loaded_data(path, key, device, through, synced):
    data = DATA if key == "w" else LARGE
    target = tensor_on(device, data)
    base = inner(target)
    views = {"rows": base[:4], "flat": base.view(-1), "t": base.t(), "data": base.data, "detach": base.detach()}
    if synced and device != "host":
        torch_xla.sync()
    if through != "itself":
        target = getattr(base, through)
        target = target() if through == "detach" else target
    xc.load({key: target}, path)
    expected = {"rows": data[:4], "flat": data.view(-1), "t": data.t(), "data": data, "detach": data}
    assert torch.equal(base.cpu(), data)
    assert [name for name, view in views.items() if not torch.equal(view.cpu(), expected[name])] == []
    views["rows"].add_(1)  # and they are still views
    assert torch.equal(base.cpu()[:4], data[:4] + 1) and torch.equal(base.cpu()[4:], data[4:])


@pytest.mark.parametrize("key", ["w", "large"])
@pytest.mark.parametrize("device", ["host", "whole", "sharded"])
def test_load_between_forward_and_backward_is_an_error_as_with_copy(path, key, device):
    tensor = tensor_on(device, DATA if key == "w" else LARGE).requires_grad_()
    loss = (tensor * tensor).sum()
    xc.load({key: tensor.detach()}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["host", "whole", "sharded"])
def test_tensors_of_inference_mode_are_loaded(path, device):
    with torch.inference_mode():
        target = tensor_on(device, DATA)
        view = target[:4]
        xc.load({"w": target}, path)
        assert torch.equal(target.cpu(), DATA) and torch.equal(view.cpu(), DATA[:4])


@pytest.mark.parametrize("shape", [(8, 8), (1, 8)])
def test_loading_into_a_view_fills_the_view_and_its_base(path, shape):
    base = torch.zeros(16, 8).to("xla")
    xs.mark_sharding(base, ON, ("a", "b"))
    settle()
    for view in (base[:8], base[8:].detach(), base.view(2, 8, 8)[0].expand(8, 8)):
        xc.load({"w": view}, path)
        assert torch.equal(view.cpu(), DATA)
    assert torch.equal(base.cpu(), torch.cat([DATA, DATA]))


def repeated(device, how):
    base = torch.zeros(8, 8) if device == "host" else torch.zeros(8, 8).to("xla")
    return {
        "expand": lambda: base[:1].expand(8, 8),
        "chain": lambda: base[:, :1].expand(8, 8).t(),
        "unfold": lambda: base.view(-1)[:15].unfold(0, 8, 1),
        "detached": lambda: base[:1].expand(8, 8).detach(),
        "parameter": lambda: torch.nn.Parameter(base[:1].expand(8, 8)),
    }[how]()


@pytest.mark.parametrize("device", ["host", "xla"])
@pytest.mark.parametrize("how", ["expand", "chain", "unfold", "detached", "parameter"])
def test_targets_whose_elements_share_memory_are_refused_before_anything_is_changed(tmp_path, device, how):
    xc.save({"a": torch.ones(4), "w": DATA}, tmp_path)
    target = {"a": torch.zeros(4), "w": repeated(device, how)}
    with pytest.raises(xc.CheckpointError, match=r"'w': .*share the same memory.*clone"):
        xc.load(target, tmp_path)
    assert not target["a"].any() and not target["w"].cpu().any()
    with pytest.raises(xc.CheckpointError, match="share the same memory"):
        xc.load({"a": torch.zeros(4), "w": (target["w"], 1)}, saved_tuple(tmp_path))


def saved_tuple(folder):
    xc.save({"a": torch.ones(4), "w": (DATA, 1)}, folder / "tuple")
    return folder / "tuple"


def test_shared_memory_is_detected_from_sizes_and_strides():
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        ndim = int(torch.randint(0, 4, (), generator=generator))
        sizes = torch.randint(0, 4, (ndim,), generator=generator).tolist()
        strides = torch.randint(0, 9, (ndim,), generator=generator).tolist()
        places = np.zeros(1, dtype=int)
        for size, stride in zip(sizes, strides):
            places = (places[:, None] + np.arange(size) * stride).reshape(-1)
        assert elements_overlap(sizes, strides) == (len(set(places.tolist())) < len(places)), (sizes, strides)


@pytest.mark.parametrize("device", ["host", "sharded"])
def test_keys_that_share_one_tensor_are_named_if_their_saved_values_differ(tmp_path, caplog, device):
    xc.save({"a": DATA, "b": DATA + 1, "c": DATA, "d": DATA}, tmp_path)
    for keys, expected, named in (
        (("a", "b"), DATA + 1, True),
        (("b", "a"), DATA + 1, True),
        (("c", "d"), DATA, False),
    ):
        tensor = tensor_on(device, DATA)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            xc.load({keys[0]: tensor, keys[1]: tensor.detach()}, tmp_path)
        assert torch.equal(tensor.cpu(), expected)
        assert ("share one tensor in the target" in caplog.text and ", ".join(sorted(keys)) in caplog.text) == named


def quantized(scale=0.1):
    return torch.quantize_per_tensor(torch.arange(4.0), scale, 10, torch.quint8)


def per_channel():
    return torch.quantize_per_channel(DATA, torch.rand(8) + 0.1, torch.zeros(8), 0, torch.qint8)


def fake():
    with FakeTensorMode():
        return torch.ones(4)


class Wrapping(torch.Tensor):
    """A tensor that wraps another tensor."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [a._data if isinstance(a, Wrapping) else a for a in args]
        out = func(*args, **(kwargs or {}))
        return Wrapping(out) if isinstance(out, torch.Tensor) else out


ODD = {
    "quantized": (quantized, "quantized .*int_repr"),
    "per channel": (per_channel, "quantized .*int_repr"),
    "sparse_coo": (lambda: DATA.to_sparse(), "sparse_coo.*to_dense"),
    "sparse_csr": (lambda: DATA.to_sparse_csr(), "sparse_csr.*to_dense"),
    "mkldnn": (lambda: DATA.to_mkldnn(), "mkldnn.*to_dense"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "jagged .*offsets",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested .*unbind"),
    "fake": (fake, "FakeTensor has no data"),
    "two": (lambda: TwoTensor(torch.ones(4), torch.zeros(4)), r"wraps other tensors \(a, b\)"),
    "wrapping": (lambda: Wrapping(torch.ones(4)), "wraps other tensors"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "lazy"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_save_refuses_tensors_that_are_not_plain_elements_and_names_the_key(tmp_path, kind):
    make, message = ODD[kind]
    tensor = make()
    with pytest.raises(xc.CheckpointError, match=rf"(?s)'odd': .*{message}"):
        xc.save({"odd": tensor}, tmp_path / "sync")
    with xc.SPMDStager() as stager, pytest.raises(xc.CheckpointError, match=rf"(?s)'odd': .*{message}"):
        xc.async_save({"odd": tensor}, tmp_path / "async", stager=stager)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["quantized", "mkldnn", "fake", "two", "wrapping"])
def test_load_refuses_targets_that_are_not_plain_elements_before_anything_is_changed(tmp_path, kind):
    make, message = ODD[kind]
    odd = make()
    xc.save({"a": torch.ones(4), "odd": torch.ones(odd.shape)}, tmp_path)
    target = {"a": torch.zeros(4), "odd": odd}
    with pytest.raises(xc.CheckpointError, match=rf"(?s)'odd': .*{message}"):
        xc.load(target, tmp_path)
    assert not target["a"].any()


def test_tensors_inside_a_transform_are_refused(tmp_path):
    def save(x):
        with pytest.raises(xc.CheckpointError, match=r"'x': .*torch.func"):
            xc.save({"x": x}, tmp_path)
        return x.sum()

    torch.vmap(save)(torch.ones(2, 3))
    torch.func.grad(save)(torch.ones(3))


def test_tensor_of_a_plain_subclass_is_saved_without_its_class(tmp_path):
    class Named(torch.Tensor):
        """A local class, which cannot be pickled."""

    xc.save({"x": DATA.clone().as_subclass(Named)}, tmp_path)
    for target in (torch.zeros(8, 8), torch.zeros(8, 8).as_subclass(Named)):
        xc.load({"x": target}, tmp_path)
        assert torch.equal(target.as_subclass(torch.Tensor), DATA)


def test_quantized_tensors_inside_objects_are_restored_exactly(tmp_path):
    for make, like in ((quantized, lambda: quantized(0.5)), (per_channel, per_channel)):
        saved, target = make(), {"pair": (like(), 1)}
        xc.save({"pair": (saved, 1)}, tmp_path)
        xc.load(target, tmp_path)
        assert torch.equal(target["pair"][0].dequantize(), saved.dequantize())
        assert target["pair"][0].qscheme() == saved.qscheme()


@pytest.mark.filterwarnings("ignore")
def test_quantized_module_is_restored_exactly(tmp_path):
    def linear(scale):
        module = torch.ao.nn.quantized.Linear(4, 4)
        module.set_weight_bias(torch.quantize_per_tensor(torch.randn(4, 4), scale, 3, torch.qint8), torch.randn(4))
        module.scale, module.zero_point = scale * 2, int(scale * 100)
        return module

    saved = linear(0.125)
    xc.save({"model": saved.state_dict()}, tmp_path)
    for restore in (through_load, through_restore):
        module = linear(0.5)
        restore(module, tmp_path)
        assert torch.equal(module.weight().dequantize(), saved.weight().dequantize())
        assert torch.equal(module.bias(), saved.bias())
        assert (module.scale, module.zero_point) == (saved.scale, saved.zero_point)


def through_load(module, path):
    state = {"model": module.state_dict()}
    xc.load(state, path)
    module.load_state_dict(state["model"])


def through_restore(module, path):
    xc.restore(path, model=module)


def test_quantized_items_of_other_checkpoints_are_not_loaded_as_integers(tmp_path, caplog):
    """Stock DCP, and earlier versions of this package, saved the integers without their scale."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"g": {"q": quantized(), "w": torch.ones(4)}}, checkpoint_id=tmp_path)
    target = {"g": {"q": torch.zeros(4), "w": torch.zeros(4)}}
    with pytest.raises(xc.MismatchError, match=r"g\.q: .*without its scale"):
        xc.load(target, tmp_path)
    assert not target["g"]["w"].any()
    with pytest.raises(xc.CheckpointError, match="quantized"):
        xc.load({"g": {"q": quantized(), "w": torch.zeros(4)}}, tmp_path)
    target = {"g": {"w": torch.zeros(4)}}
    with caplog.at_level(logging.WARNING):
        report = xc.load(target, tmp_path)
    assert report.unexpected == ("g.q",) and "g.q" in caplog.text and target["g"]["w"].all()


def test_none_and_empty_lists_are_replaced_by_saved_values(tmp_path):
    xc.save({"w": DATA, "g": {"a": torch.ones(2), "l": [torch.ones(1)]}}, tmp_path)
    for hollow in (None, []):
        target = {"w": hollow, "g": {"a": hollow, "l": hollow}}
        report = xc.load(target, tmp_path)
        assert torch.equal(target["w"], DATA) and target["g"]["a"].tolist() == [1, 1]
        assert [one.tolist() for one in target["g"]["l"]] == [[1]]
        assert set(report.created) == {"w", "g.a", "g.l.0"}
    target = {"v": None}
    xc.load(target, tmp_path, rename={"w": "v"}, placement=lambda key, shape, dtype: (ON, ("a", "b")))
    assert target["v"].device.type == "xla" and torch.equal(target["v"].cpu(), DATA)


PARTIAL = """
import sys, torch, torch.distributed as dist, torch_xla_ckpt as xc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
partial = DTensor.from_local(torch.ones(4) * (rank + 1), mesh, [Partial()])
for call in (lambda: xc.save({"d": partial}, path), lambda: xc.load({"d": partial}, path)):
    try:
        call()
    except xc.CheckpointError as error:
        assert "'d'" in str(error) and "redistribute" in str(error), error
    else:
        raise AssertionError("a partial value was taken for the tensor's")
    whole = partial.redistribute(placements=[Replicate()])
    xc.save({"d": whole}, path)
target = DTensor.from_local(torch.zeros(4), mesh, [Replicate()])
version = target._version
xc.load({"d": target}, path)
assert target.full_tensor().tolist() == [3, 3, 3, 3] and target._version > version
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_partial_dtensor_is_refused_and_the_remedy_works(tmp_path):
    arguments = [tmp_path / "store", tmp_path / "saved"]
    ranks = [interpreters.Program(["-c", PARTIAL, rank, *arguments]) for rank in range(2)]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_host_tensors_in_the_functional_wrapper_are_saved_and_loaded(tmp_path):
    """``torch.zeros_like(xla_tensor, device="cpu")`` returns a wrapper that has no data pointer."""
    like = put(DATA, mesh((4, 2)), ("a", "b"))
    saved = {"copy": torch.empty_like(like, device="cpu").copy_(DATA), "other": torch.zeros_like(like, device="cpu")}
    assert torch._is_functional_tensor(saved["copy"]), "otherwise this tests nothing"
    saved["tuple"] = (saved["copy"], 1)
    with xc.SPMDStager() as stager:
        xc.async_save(saved, tmp_path / "async", stager=stager).result()
    xc.save(saved, tmp_path / "sync")
    for path in (tmp_path / "async", tmp_path / "sync"):
        plain = {"copy": torch.zeros(8, 8), "other": torch.ones(8, 8), "tuple": None}
        xc.load(plain, path)
        assert torch.equal(plain["copy"], DATA) and not plain["other"].any() and torch.equal(plain["tuple"][0], DATA)
        target = {key: torch.zeros_like(like, device="cpu") for key in ("copy", "other")}
        row, version = target["copy"][1], target["copy"]._version
        xc.load(target, path)
        assert torch.equal(target["copy"], DATA) and torch.equal(row, DATA[1]) and not target["other"].any()
        assert target["copy"]._version > version
