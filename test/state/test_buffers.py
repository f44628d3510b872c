"""Host memory for loading is used again, and never while somebody holds it."""

import gc

import torch

from torch_xla_ckpt.state.buffers import Buffers

MIB = 1 << 20


def test_memory_comes_back_when_the_last_tensor_that_shares_it_is_gone():
    buffers = Buffers()
    first = buffers.empty((2, MIB // 4), torch.float32)
    place = first.data_ptr()
    part = first[1].view(torch.int16)  # what a runtime that still uploads might hold
    del first
    second = buffers.empty((2 * MIB,), torch.uint8)
    assert second.data_ptr() != place
    part.fill_(3)
    second.fill_(4)
    assert part.eq(3).all()
    del part
    gc.collect()
    assert buffers.empty((MIB,), torch.int16).data_ptr() == place


def test_all_that_is_kept_is_never_more_than_was_in_use():
    buffers = Buffers()
    for nbytes in (4 * MIB, 3 * MIB, 5 * MIB, 2 * MIB):
        held = [buffers.empty((nbytes,), torch.uint8) for _ in range(2)]
        del held
    assert sum(memory.nbytes for memory in buffers._free) <= 10 * MIB


def test_every_shape_and_dtype():
    buffers = Buffers()
    for shape in ((), (0,), (3, 0), (7,), (1, 2 * MIB), (3, MIB)):
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn):
            tensor = buffers.empty(shape, dtype)
            assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
