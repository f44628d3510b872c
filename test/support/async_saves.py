"""Async saves by each call that makes them, what they saved, and random layouts for their states."""

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.meshes import same_bits

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def start(way, state, path, stager, writer=None):
    """Begin an async save by our call or DCP's; both return an object with the same two futures."""
    if way == "xc":
        return xc.async_save(state, path, stager=stager, storage_writer=writer)
    return dcp.async_save(
        state, checkpoint_id=path, storage_writer=writer, planner=xc.SPMDSavePlanner(), async_stager=stager
    )


def loaded(path):
    """Load a whole checkpoint by key with stock DCP, without a target."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.zeros(saved.size, dtype=saved.properties.dtype) if hasattr(saved, "size") else None
        for key, saved in metadata.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def agree(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = same_bits(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key
    return True


@st.composite
def layouts(draw):
    """A shape, a mesh, and a spec that fits them."""
    grid = draw(st.sampled_from([(8,), (1, 8), (2, 4), (4, 2), (2, 2, 2)]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    axes = draw(st.permutations([*"abc"[: len(grid)], *[None] * 3]))
    spec = tuple(axes[: len(shape)])
    if len(shape) and len(grid) > 1 and draw(st.booleans()):
        spec = (("a", "b"), *[None] * (len(shape) - 1))
    return shape, grid, draw(st.permutations(range(8))), spec if draw(st.integers(0, 5)) else None
