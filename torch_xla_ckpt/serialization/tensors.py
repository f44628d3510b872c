"""Tensors, rebuilt from storages in the archive.

torch's own functions trust the pickle: up to torch 2.9 they make storages as large as the file claims, and views that
end behind their storage. Here a storage has the bytes that are in the archive, and a view outside of its storage is
refused. All tensors are made on the host, whatever device they were saved from.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.serialization.budget import MAX_EXPANDED
from torch_xla_ckpt.serialization.plain import set_attributes
from torch_xla_ckpt.serialization.storages import STORAGE_KINDS
from torch_xla_ckpt.serialization.table import CheckedFunction, Refused
from torch_xla_ckpt.serialization.torch_values import LIMIT, checked_sizes

_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}  # elements in a byte
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_MAX_DIMENSIONS = 64


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise Refused(f"its pickle has {problem}")


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = checked_sizes(value)
    _require(len(sizes) <= _MAX_DIMENSIONS, "a tensor with too many dimensions")
    return sizes


def _geometry(size: Any, stride: Any, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return a tensor's sizes and strides, and the number of elements from its first to its last."""
    sizes, strides = _sizes(size), _sizes(stride)
    is_possible = len(sizes) == len(strides) and math.prod(max(n, 1) for n in sizes) * itemsize < LIMIT
    _require(is_possible, "a tensor of an impossible shape")
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides)) if all(sizes) else 0
    _require(span < LIMIT, "a tensor of an impossible shape")
    return sizes, strides, span


def _no_hooks(hooks: Any) -> None:
    _require(hooks is None or (type(hooks) in (dict, collections.OrderedDict) and not hooks), "a tensor with hooks")


def _with_grad(tensor: torch.Tensor, requires_grad: Any) -> torch.Tensor:
    _require(type(requires_grad) is bool, "a tensor with an impossible requires_grad")
    return tensor.requires_grad_() if requires_grad else tensor


def _viewed(storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> tuple[Any, ...]:
    """Return the arguments of ``Tensor.set_`` for a view that lies inside of its storage."""
    _require(type(storage) is torch.storage.TypedStorage, "a tensor without a storage")
    sizes, strides, span = _geometry(size, stride, dtype.itemsize)
    stored = storage.nbytes() // dtype.itemsize * _PACKED.get(dtype, 1)
    is_inside = type(offset) is int and offset >= 0 and offset + span <= max(stored, offset if not span else 0)
    _require(is_inside and offset < LIMIT, "a tensor outside of its storage")
    return storage.untyped(), offset, sizes, strides


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    _require(type(storage) is torch.storage.TypedStorage and len(more) in (0, 2, 3), "a tensor without a storage")
    return _made(storage, storage.dtype, offset, size, stride, *more)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> torch.Tensor:
    _require(isinstance(dtype, torch.dtype) and len(more) < 2, "a tensor without a dtype")
    return _made(storage, dtype, offset, size, stride, grad, hooks, *more)


def _made(
    storage: Any,
    dtype: torch.dtype,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    about: Any = None,
) -> torch.Tensor:
    _no_hooks(hooks)
    view = _viewed(storage, dtype, offset, size, stride)
    tensor = torch.empty(0, dtype=dtype).set_(*view)
    about = {} if about is None else about
    is_known = (
        type(about) is dict and set(about) <= {"conj", "neg"} and all(type(bit) is bool for bit in about.values())
    )
    _require(is_known, "a tensor with unknown metadata")
    if about.get("conj"):
        tensor = tensor.conj()
    if about.get("neg"):
        tensor = torch._neg_view(tensor)
    return _with_grad(tensor, requires_grad)


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, how: Any, grad: Any = False, hooks: Any = None
) -> torch.Tensor:
    _no_hooks(hooks)
    _require(type(storage) is torch.storage.TypedStorage and type(how) is tuple, "a quantized tensor without a scale")
    dtype = storage.dtype
    untyped, offset, sizes, strides = _viewed(storage, dtype, offset, size, stride)
    if how[0] == torch.per_tensor_affine:
        _, scale, zero = how
        _require(type(scale) is float and type(zero) is int, "a quantized tensor without a scale")
        tensor = torch._empty_affine_quantized([0], scale=scale, zero_point=zero, dtype=dtype)
    else:
        _require(how[0] in _PER_CHANNEL, "a quantized tensor of an unknown scheme")
        _, scales, zeros, axis = how
        _require(type(axis) is int and 0 <= axis < len(sizes), "a quantized tensor without its axis")
        # torch writes per_channel_affine for both schemes. The dtype of the zero points tells which scheme it is.
        is_affine = type(zeros) is list or not getattr(zeros, "is_floating_point", bool)()
        scales = _numbers(scales, torch.float64 if is_affine else torch.float32, sizes[axis])
        zeros = _numbers(zeros, torch.int64 if is_affine else torch.float32, sizes[axis])
        tensor = torch._empty_per_channel_affine_quantized(
            list(sizes), scales=scales, zero_points=zeros, axis=axis, dtype=dtype
        )
    return _with_grad(tensor.set_(untyped, offset, sizes, strides), grad)


def _numbers(values: Any, dtype: torch.dtype, count: int) -> torch.Tensor:
    _require(type(values) in (list, torch.Tensor) and len(values) == count, "a quantized tensor without scales")
    made = torch.as_tensor(values, dtype=dtype, device="cpu")
    _require(made.dim() == 1 and made.layout == torch.strided, "a quantized tensor without scales")
    return made.contiguous()


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    _require(isinstance(layout, torch.layout) and type(parts) is tuple, "a sparse tensor without its parts")
    if layout == torch.sparse_coo:
        indices, values, size, *coalesced = parts
        _require_plain(indices, values)
        _require(all(type(one) in (bool, type(None)) for one in coalesced), "a sparse tensor without its parts")
        known = {"is_coalesced": coalesced[0]} if coalesced else {}
        return torch.sparse_coo_tensor(indices, values, _sizes(size), check_invariants=True, **known)
    *pointers, values, size = parts
    _require_plain(*pointers, values)
    compressed, plain = pointers
    return torch.sparse_compressed_tensor(compressed, plain, values, _sizes(size), layout=layout, check_invariants=True)


def _require_plain(*tensors: Any) -> None:
    """Require plain host tensors that may be computed with."""
    are_plain = all(
        type(one) is torch.Tensor and one.layout == torch.strided and one.device.type == "cpu" for one in tensors
    )
    are_plain = are_plain and not any(one.is_nested for one in tensors)
    _require(are_plain, "a tensor made of something else than tensors")
    _require(all(map(_is_bounded, tensors)), "a tensor that repeats its data too often")


def _is_bounded(tensor: torch.Tensor) -> bool:
    """Whether computing with a tensor takes time in proportion to its storage. Strides of 0 repeat the data."""
    return tensor.numel() * tensor.itemsize <= max(tensor.untyped_storage().nbytes(), MAX_EXPANDED)


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> torch.Tensor:
    _require_plain(buffer, sizes, strides, offsets)
    _require(
        sizes.dim() == 2
        and sizes.shape == strides.shape
        and offsets.shape == sizes.shape[:1]
        and buffer.dim() == 1
        and {sizes.dtype, strides.dtype, offsets.dtype} == {torch.int64}
        and buffer.is_contiguous(),
        "a nested tensor without its parts",
    )
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist()):
        *_, span = _geometry(tuple(size), tuple(stride), buffer.itemsize)
        _require(offset >= 0 and offset + span <= buffer.numel(), "a nested tensor outside of its buffer")
    return torch._nested_view_from_buffer(buffer, sizes.contiguous(), strides.contiguous(), offsets.contiguous())


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    _require(isinstance(dtype, torch.dtype), "a tensor without a dtype")
    sizes, strides, _ = _geometry(size, stride, dtype.itemsize)
    return _with_grad(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), requires_grad)


def _device_tensor(data: Any, dtype: Any, _device: Any, requires_grad: Any) -> torch.Tensor:
    """Return the tensor of a device whose tensors torch saves as host tensors or arrays."""
    data = torch.from_numpy(data) if type(data) is np.ndarray else data
    _require_plain(data)
    _require(isinstance(dtype, torch.dtype), "a tensor without a dtype")
    return _with_grad(data.to(dtype), requires_grad)


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> torch.nn.Parameter:
    _no_hooks(hooks)
    _require(isinstance(data, torch.Tensor) and type(requires_grad) is bool, "a Parameter without data")
    made = torch.nn.Parameter(data, requires_grad)
    set_attributes(made, state)
    return made


def _typed(make: Any, cls: Any, arguments: Any, state: Any) -> torch.Tensor:
    """Return a tensor with attributes, or of a class that the caller allows."""
    is_known = type(make) is CheckedFunction and make.name in _FUNCTIONS and type(arguments) is tuple
    _require(is_known and isinstance(cls, type) and issubclass(cls, torch.Tensor), "a tensor of an unknown class")
    made: torch.Tensor = make.make(*arguments)
    if cls in (torch.Tensor, torch.nn.Parameter):
        _require(isinstance(made, torch.Tensor), "a tensor of an unknown class")
        made = made if type(made) is cls else made.as_subclass(cls)
        set_attributes(made, state)
        return made
    # Other classes are on the stack only if the caller allows them.
    return torch._tensor._rebuild_from_type_v2(lambda: made, cls, (), state)  # type: ignore[no-any-return]


def _wrapper(
    cls: Any, dtype: Any, size: Any, stride: Any, offset: Any, layout: Any, _device: Any, requires_grad: Any
) -> torch.Tensor:
    is_subclass = (
        isinstance(cls, type) and issubclass(cls, torch.Tensor) and cls not in (torch.Tensor, torch.nn.Parameter)
    )
    _require(is_subclass and isinstance(dtype, torch.dtype), "a tensor of an unknown class")
    sizes, strides, _ = _geometry(size, stride, dtype.itemsize)
    _require(type(offset) is int and type(requires_grad) is bool, "a tensor outside of its storage")
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
        cls,
        sizes,
        strides=strides,
        storage_offset=offset,
        dtype=dtype,
        layout=layout,
        device=torch.device("cpu"),
        requires_grad=requires_grad,
    )


def _device(*given: Any) -> torch.device:
    is_named = 1 <= len(given) <= 2 and type(given[0]) is str and all(type(n) is int for n in given[1:])
    _require(is_named, "a device without a name")
    return torch.device(*given)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_device_tensor_from_numpy": _device_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
}
_QSCHEMES = [scheme for scheme in vars(torch).values() if isinstance(scheme, torch.qscheme)]
VALUES: Mapping[str, Any] = {
    **{name: CheckedFunction(name, make) for name, make in _FUNCTIONS.items()},
    "torch._tensor._rebuild_from_type_v2": CheckedFunction("torch._tensor._rebuild_from_type_v2", _typed),
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.device": torch.device,
    **{str(scheme): scheme for scheme in _QSCHEMES},
    **STORAGE_KINDS,
}
CALLS: Mapping[type, Callable[..., Any]] = {torch.device: _device}
