"""Tensors that plain torch can read: in host memory, on other devices, and the local part of a DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, Shard, TensorLayout, elements_overlap
from torch_xla_ckpt.protocols import TensorAccess

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class HostAccess(TensorAccess):
    """``TensorAccess`` that uses ordinary torch operations."""

    def settle(self) -> None:
        """Do nothing: torch waits for pending computation when data is read."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        require_kind(tensor)
        if not isinstance(tensor, DTensor):
            return _whole(tuple(tensor.shape), tensor.dtype, str(tensor.device))
        box = _dcp.dtensor_box(tensor)
        return TensorLayout(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            shards=(Shard(box, str(tensor.device)),) if box is not None else (),
            shard_shape=box.sizes if box is not None else tuple(tensor.shape),
            sharding=str(tuple(tensor.placements)),
            identical=True,  # replicas of a DTensor are equal; partial placements are refused
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        if not layout.shards:
            return {}
        data = memory_of(_local(tensor).detach())
        if data.device.type != "cpu":
            data = data.cpu()
        if data.is_conj() or data.is_neg():  # flags, which torch applies when the elements are read
            data = data.resolve_conj().resolve_neg()
        return {layout.shards[0].box: data}

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return 0 if tensor.device.type == "cpu" else layout.nbytes

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        local = _local(tensor).detach()
        if torch._is_functional_tensor(local):  # the wrapper must see every write
            return None
        return local if local.device.type == "cpu" and local.is_contiguous() else None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        with torch.no_grad():
            _local(tensor).detach().copy_(shards[layout.shards[0].box])
        if isinstance(tensor, DTensor):
            data_changed(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the data of a host tensor.

    ``torch.zeros_like(xla_tensor, device="cpu")`` returns a host tensor in torch's functional wrapper. The wrapper has
    no data pointer, and its ``numpy()`` is garbage.
    """
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def require_kind(tensor: torch.Tensor) -> None:
    """Check that a tensor's data is one strided block of elements, because a checkpoint stores nothing else.

    Raises:
        CheckpointError: the tensor is of another kind. The error names the kind and the remedy.
    """
    refusal = _refusal(tensor)
    if refusal is not None:
        raise CheckpointError(refusal)


def _refusal(tensor: torch.Tensor) -> str | None:
    if _dcp.is_sharded_tensor(tensor):
        return "a ShardedTensor cannot be saved or loaded. Use DTensor, which replaces it in torch"
    if is_lazy(tensor):
        return "an uninitialized parameter of a lazy module has no data. Run the module once, or give it its shape"
    if tensor.is_nested:
        kind = "jagged" if tensor.layout == torch.jagged else "nested"
        return (
            f"a {kind} tensor (torch.nested) cannot be saved or loaded. Save its parts: tensor.values() and "
            "tensor.offsets() of a jagged tensor, or the list that tensor.unbind() returns"
        )
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        parts = "" if layout == "mkldnn" else "its indices and values, or "
        return f"a tensor with the layout {layout} cannot be saved or loaded. Use {parts}tensor.to_dense()"
    if tensor.is_quantized:
        return (
            f"a quantized tensor ({tensor.dtype}) cannot be saved or loaded, because a checkpoint does not store "
            "the scale and the zero point. Save tensor.int_repr() and the scale and zero point (q_scale(), "
            "q_zero_point(), or those per channel) as items of their own, or put the tensor in a tuple, which is "
            "saved as one object"
        )
    if tensor.device.type == "meta":
        return "a tensor on the meta device has no data. Give it a device first (module.to_empty)"
    if isinstance(tensor, DTensor):
        return _refusal_of_dtensor(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside a transform (torch.func, torch.vmap) has no data of its own. Save outside of it"
    return _refusal_of_memory(tensor) if type(tensor) in _PLAIN else _refusal_of_subclass(tensor)


def _refusal_of_memory(tensor: torch.Tensor) -> str | None:
    """Refuse a tensor that is larger than its memory, because reading it would end the process."""
    if not tensor.numel() or torch._is_functional_tensor(tensor):
        return None
    last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    held, needed = tensor.untyped_storage().nbytes(), (last + 1) * tensor.itemsize
    if held >= needed:
        return None
    return (
        f"a tensor whose memory was freed cannot be saved or loaded: it needs {needed:,} bytes, and its storage has "
        f"{held:,}. FSDP frees parameters between steps: take the state from its state_dict(), and not from parameters"
    )


def _refusal_of_dtensor(tensor: DTensor) -> str | None:
    if any(placement.is_partial() for placement in tensor.placements):
        return (
            f"a DTensor with the placements {tuple(tensor.placements)} holds a partial value on each rank, and its "
            "value is their reduction. Make it a Replicate or Shard first: "
            "tensor.redistribute(placements=[Replicate(), ...])"
        )
    return _refusal(tensor.to_local())


def _refusal_of_subclass(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, FakeTensor):
        return "a FakeTensor has no data. Save and load outside of FakeTensorMode"
    if isinstance(tensor, AsyncCollectiveTensor) or not tensor.numel() or _has_memory(tensor):
        return None
    inner = ""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = f" ({', '.join(names)})"
    return (
        f"a {type(tensor).__name__} wraps other tensors{inner} and has no memory of its own. Save the inner tensors as "
        "items of their own, or convert the wrapper to an ordinary tensor"
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return _plain(tensor).data_ptr() != 0
    except (RuntimeError, TypeError):  # there is no storage, or the class does not let torch read the address
        return False


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its subclass, so that reading the checkpoint does not need the class."""
    if type(tensor) in _PLAIN:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor in host memory share the same memory, as after ``expand``."""
    local = _local(tensor)
    return elements_overlap(tuple(local.shape), local.stride())


def data_changed(tensor: torch.Tensor) -> None:
    """Tell autograd that a tensor's data was replaced, as ``copy_`` does.

    A backward pass that needs the old data then raises an error. Tensors made in inference mode take no part in
    autograd.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> TensorLayout:
    """Return the layout of an ordinary tensor. Cached, because programs have thousands of tensors of few shapes."""
    box = Box.whole(shape)
    return TensorLayout(shape, dtype, (Shard(box, device),), box.sizes, sharding="host", identical=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor as an ordinary tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else _plain(local)
