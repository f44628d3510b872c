"""Tensors on meshes of eight virtual devices, and what each device then really holds.

What devices hold is read through torch_xla's own public ``XLAShardedTensor``, so that a mistake in the package's
device access cannot hide itself.
"""

import math

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

if not xr.is_spmd():
    xr.use_spmd()


def mesh(shape, order=None):
    """A mesh with axes "a", "b", ... over the eight devices, in the given order."""
    devices = np.arange(8) if order is None else np.array(order)
    return xs.Mesh(devices, tuple(shape), tuple("abc"[: len(shape)]))


def random_bits(shape, dtype, seed=0):
    """A host tensor of random bits: NaNs, infinities and denormals too.

    float16 NaNs are left out, because torch_xla drops their payload on the way to a device.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    bits = raw.view(dtype).reshape(shape)
    return torch.where(bits.isnan(), 1.0, bits).to(dtype) if dtype == torch.float16 else bits


def put(host, on, spec):
    """``host`` on the devices, sharded over the mesh ``on`` by ``spec``; unmarked when that is None."""
    tensor = host.to(torch_xla.device())
    if spec is not None:
        xs.mark_sharding(tensor, on, spec)
    return tensor


def settle():
    torch_xla.sync()
    xm.wait_device_ops()


def same_bits(a, b):
    raw = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def holds(tensor, expected):
    """Whether every device holds exactly its part of ``expected``, bit for bit."""
    settle()
    if tensor.dtype == torch.complex128:  # torch_xla drops the imaginary part of what it brings to the host
        return same_bits(torch.view_as_real(tensor).cpu(), torch.view_as_real(expected))
    sharded = xs.wrap_if_sharded(tensor)
    if not isinstance(sharded, xs.XLAShardedTensor) or sharded.sharding_type == xs.ShardingType.REPLICATED:
        return same_bits(tensor.detach().cpu(), expected)
    # torch_xla returns shards of unsigned tensors as the signed type.
    return all(
        same_bits(shard.unpadded_data.contiguous().view(expected.dtype), expected[tuple(shard.indices)])
        for shard in sharded.local_shards
    )


def spec_of(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)
