"""Resharding from any mesh to any mesh, bit for bit: random meshes, device orders, specs, shapes and dtypes."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put, random_bits, same_bits

pytestmark = pytest.mark.slow

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]
MESHES = [(8,), (1, 8), (8, 1), (2, 4), (4, 2), (2, 2, 2), (1, 4, 2), (4, 1, 2)]


@st.composite
def placements(draw, tensor_shape):
    """A mesh, a device order and a partition spec. Each mesh axis shards one dimension or none.

    torch_xla cannot shard a tensor without elements.
    """
    shape = draw(st.sampled_from(MESHES))
    order = draw(st.one_of(st.none(), st.permutations(range(8))))
    axes = "abc"[: len(shape)]
    dims = [draw(st.sampled_from([None, *(range(len(tensor_shape)) if 0 not in tensor_shape else ())])) for _ in axes]
    spec = [tuple(axis for axis, at in zip(axes, dims) if at == dim) for dim in range(len(tensor_shape))]
    marked = draw(st.integers(0, 9)) > 0
    return shape, order, tuple(part or None for part in spec) if marked else None


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9) | st.integers(1, 3), max_size=5)))
    dtype = draw(st.sampled_from(DTYPES))
    return random_bits(shape, dtype, draw(st.integers(0, 99))), draw(placements(shape)), draw(placements(shape))


@settings(max_examples=150)
@given(st.lists(tensors(), min_size=1, max_size=4))
def test_no_element_is_lost_or_changed_from_any_mesh_to_any_mesh(cases):
    folder = tempfile.mkdtemp()
    try:
        saved = {str(n): put(host, mesh(*on[:2]), on[2]) for n, (host, on, _) in enumerate(cases)}
        xc.save(saved, folder)

        target = {str(n): put(torch.zeros_like(host), mesh(*on[:2]), on[2]) for n, (host, _, on) in enumerate(cases)}
        xc.load(target, folder)
        for n, (host, _, _) in enumerate(cases):
            assert holds(target[str(n)], host)

        stock = {str(n): torch.zeros_like(host) for n, (host, _, _) in enumerate(cases)}
        dcp.load(stock, checkpoint_id=folder)
        for n, (host, _, _) in enumerate(cases):
            assert same_bits(stock[str(n)], host)
    finally:
        shutil.rmtree(folder)
