"""Host buffers are reused, and never while a tensor still uses them."""

import gc

import torch

from torch_xla_ckpt.state import Buffers

MIB = 1 << 20


def test_memory_is_reused_after_the_last_tensor_that_shares_it_was_deleted():
    buffers = Buffers()
    first = buffers.empty((2, MIB // 4), torch.float32)
    address = first.data_ptr()
    part = first[1].view(torch.int16)  # a view that a runtime might hold while it uploads
    del first
    second = buffers.empty((2 * MIB,), torch.uint8)
    assert second.data_ptr() != address
    part.fill_(3)
    second.fill_(4)
    assert part.eq(3).all()
    del part
    gc.collect()
    assert buffers.empty((MIB,), torch.int16).data_ptr() == address


def test_kept_memory_never_exceeds_the_most_that_was_in_use():
    buffers = Buffers()
    for nbytes in (4 * MIB, 3 * MIB, 5 * MIB, 2 * MIB):
        held = [buffers.empty((nbytes,), torch.uint8) for _ in range(2)]
        del held
    assert sum(memory.nbytes for memory in buffers._free) <= 10 * MIB


def test_buffers_have_the_requested_shape_and_dtype():
    buffers = Buffers()
    for shape in ((), (0,), (3, 0), (7,), (1, 2 * MIB), (3, MIB)):
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn):
            tensor = buffers.empty(shape, dtype)
            assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)
