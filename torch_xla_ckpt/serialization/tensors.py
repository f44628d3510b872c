"""Tensors, rebuilt from storages in the archive.

torch's own functions take a pickle's word: up to torch 2.9 they make storages as large as the file says, and views that
end behind them. Here a storage has the bytes that the archive brings, and a view that lies outside of it is refused.
Everything is made on the host, wherever it was saved.
"""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.serialization.archive import Archive
from torch_xla_ckpt.serialization.machine import MAX_EXPANDED, Maker, Refused
from torch_xla_ckpt.serialization.plain import set_attributes

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
    "QUInt8": torch.quint8,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}
_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}  # elements in a byte
_LAYOUTS = {
    str(layout): layout
    for layout in (
        *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
        *(getattr(torch, name) for name in ("jagged",) if hasattr(torch, name)),
    )
}
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_MAX_DIMENSIONS = 64


class _StorageKind:
    """What the name of a storage class stands for."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype


class Storages:
    """The storages of an archive, made when they are asked for, and shared by the tensors that name them."""

    def __init__(self, archive: Archive):
        self._archive = archive
        self._made: dict[str, Any] = {}
        self._swapped = "byteorder" in archive and bytes(archive["byteorder"]) != sys.byteorder.encode()

    def __call__(self, pid: Any) -> torch.storage.TypedStorage:
        """The storage that a persistent id names.

        Raises:
            Refused: it is none, or the archive has fewer bytes for it.
        """
        _require(type(pid) is tuple and len(pid) == 5 and pid[0] == "storage", "it refers to something unknown")
        _, kind, key, _, numel = pid
        _require(type(kind) is _StorageKind and type(key) is str, "it refers to something that is no storage")
        _require(type(numel) is int and numel >= 0, "it refers to a storage of no size")
        nbytes = numel * kind.dtype.itemsize
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._storage(key, kind.dtype, nbytes)
        _require((made.dtype, made.nbytes()) == (kind.dtype, nbytes), "it gives one storage two sizes")
        return made

    def _storage(self, key: str, dtype: torch.dtype, nbytes: int) -> torch.storage.TypedStorage:
        name = f"data/{key}"
        data = self._archive[name] if name in self._archive else memoryview(b"")
        _require(nbytes <= len(data), f"a tensor claims {nbytes} bytes that are not there")
        raw = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            raw.numpy()[:] = np.frombuffer(data[:nbytes], np.uint8)
        if dtype is torch.bool:  # kernels rely on 0 and 1
            raw = raw.ne(0).view(torch.uint8)
        untyped = raw.untyped_storage()
        if self._swapped and dtype.itemsize > 1:
            untyped.byteswap(dtype)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise Refused(what)


def _sizes(value: Any) -> tuple[int, ...]:
    fine = type(value) in (tuple, torch.Size) and len(value) <= _MAX_DIMENSIONS
    _require(fine and all(type(n) is int and 0 <= n < 1 << 62 for n in value), "a tensor has an impossible shape")
    return tuple(value)


def _geometry(size: Any, stride: Any, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A tensor's sizes and strides, and the elements from its first to its last."""
    sizes, strides = _sizes(size), _sizes(stride)
    fine = len(sizes) == len(strides) and math.prod(max(n, 1) for n in sizes) * itemsize < 1 << 62
    _require(fine, "a tensor has an impossible shape")
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides)) if all(sizes) else 0
    _require(span < 1 << 62, "a tensor has an impossible shape")
    return sizes, strides, span


def _no_hooks(hooks: Any) -> None:
    _require(hooks is None or (type(hooks) in (dict, collections.OrderedDict) and not hooks), "a tensor has hooks")


def _requiring(tensor: torch.Tensor, requires_grad: Any) -> torch.Tensor:
    _require(type(requires_grad) is bool, "a tensor has an impossible requires_grad")
    return tensor.requires_grad_() if requires_grad else tensor


def _viewed(storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> tuple[Any, ...]:
    """What ``Tensor.set_`` takes to view a part of a storage that is there."""
    _require(type(storage) is torch.storage.TypedStorage, "a tensor has no storage")
    sizes, strides, span = _geometry(size, stride, dtype.itemsize)
    there = storage.nbytes() // dtype.itemsize * _PACKED.get(dtype, 1)
    fine = type(offset) is int and offset >= 0 and offset + span <= max(there, offset if not span else 0)
    _require(fine and offset < 1 << 62, "a tensor lies outside of its storage")
    return storage.untyped(), offset, sizes, strides


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    _require(type(storage) is torch.storage.TypedStorage and len(more) in (0, 2, 3), "a tensor has no storage")
    return _made(storage, storage.dtype, offset, size, stride, *more)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> torch.Tensor:
    _require(isinstance(dtype, torch.dtype) and len(more) < 2, "a tensor has no dtype")
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
    fine = type(about) is dict and set(about) <= {"conj", "neg"} and all(type(bit) is bool for bit in about.values())
    _require(fine, "a tensor has unknown metadata")
    if about.get("conj"):
        tensor = tensor.conj()
    if about.get("neg"):
        tensor = torch._neg_view(tensor)
    return _requiring(tensor, requires_grad)


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, how: Any, grad: Any = False, hooks: Any = None
) -> torch.Tensor:
    _no_hooks(hooks)
    _require(type(storage) is torch.storage.TypedStorage and type(how) is tuple, "a quantized tensor has no scale")
    dtype = storage.dtype
    untyped, offset, sizes, strides = _viewed(storage, dtype, offset, size, stride)
    if how[0] == torch.per_tensor_affine:
        _, scale, zero = how
        _require(type(scale) is float and type(zero) is int, "a quantized tensor has no scale")
        tensor = torch._empty_affine_quantized([0], scale=scale, zero_point=zero, dtype=dtype)
    else:
        _require(how[0] in _PER_CHANNEL, "a quantized tensor is of an unknown scheme")
        _, scales, zeros, axis = how
        _require(type(axis) is int and 0 <= axis < len(sizes), "a quantized tensor has no such axis")
        # torch writes per_channel_affine for both schemes, which the dtype of the zero points tells apart.
        whole = type(zeros) is list or not getattr(zeros, "is_floating_point", bool)()
        scales = _numbers(scales, torch.float64 if whole else torch.float32, sizes[axis])
        zeros = _numbers(zeros, torch.int64 if whole else torch.float32, sizes[axis])
        tensor = torch._empty_per_channel_affine_quantized(
            list(sizes), scales=scales, zero_points=zeros, axis=axis, dtype=dtype
        )
    return _requiring(tensor.set_(untyped, offset, sizes, strides), grad)


def _numbers(values: Any, dtype: torch.dtype, count: int) -> torch.Tensor:
    _require(type(values) in (list, torch.Tensor) and len(values) == count, "a quantized tensor lacks scales")
    made = torch.as_tensor(values, dtype=dtype, device="cpu")
    _require(made.dim() == 1 and made.layout == torch.strided, "a quantized tensor lacks scales")
    return made.contiguous()


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    _require(isinstance(layout, torch.layout) and type(parts) is tuple, "a sparse tensor lacks parts")
    if layout == torch.sparse_coo:
        indices, values, size, *coalesced = parts
        _plain(indices, values)
        _require(all(type(one) in (bool, type(None)) for one in coalesced), "a sparse tensor lacks parts")
        known = {"is_coalesced": coalesced[0]} if coalesced else {}
        return torch.sparse_coo_tensor(indices, values, _sizes(size), check_invariants=True, **known)
    *pointers, values, size = parts
    _plain(*pointers, values)
    compressed, plain = pointers
    return torch.sparse_compressed_tensor(compressed, plain, values, _sizes(size), layout=layout, check_invariants=True)


def _plain(*tensors: Any) -> None:
    fine = all(
        type(one) is torch.Tensor and one.layout == torch.strided and one.device.type == "cpu" for one in tensors
    )
    _require(fine and not any(one.is_nested for one in tensors), "a tensor is made of something else than tensors")
    _require(all(map(_is_bounded, tensors)), "a tensor repeats its data too often")


def _is_bounded(tensor: torch.Tensor) -> bool:
    """Whether computing with a tensor takes time in proportion to its data: strides of 0 repeat them."""
    return tensor.numel() * tensor.itemsize <= max(tensor.untyped_storage().nbytes(), MAX_EXPANDED)


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> torch.Tensor:
    _plain(buffer, sizes, strides, offsets)
    fine = sizes.dim() == 2 and sizes.shape == strides.shape and offsets.shape == sizes.shape[:1] and buffer.dim() == 1
    fine = fine and {sizes.dtype, strides.dtype, offsets.dtype} == {torch.int64} and buffer.is_contiguous()
    _require(fine, "a nested tensor lacks parts")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist()):
        *_, span = _geometry(tuple(size), tuple(stride), buffer.itemsize)
        _require(offset >= 0 and offset + span <= buffer.numel(), "a nested tensor lies outside of its buffer")
    return torch._nested_view_from_buffer(buffer, sizes.contiguous(), strides.contiguous(), offsets.contiguous())


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    _require(isinstance(dtype, torch.dtype), "a tensor has no dtype")
    sizes, strides, _ = _geometry(size, stride, dtype.itemsize)
    return _requiring(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), requires_grad)


def _device_tensor(data: Any, dtype: Any, _device: Any, requires_grad: Any) -> torch.Tensor:
    """A tensor of a device whose tensors torch saves as host tensors or arrays."""
    data = torch.from_numpy(data) if type(data) is np.ndarray else data
    _plain(data)
    _require(isinstance(dtype, torch.dtype), "a tensor has no dtype")
    return _requiring(data.to(dtype), requires_grad)


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> torch.nn.Parameter:
    _no_hooks(hooks)
    _require(isinstance(data, torch.Tensor) and type(requires_grad) is bool, "a Parameter has no data")
    made = torch.nn.Parameter(data, requires_grad)
    set_attributes(made, state)
    return made


def _typed(make: Any, cls: Any, arguments: Any, state: Any) -> torch.Tensor:
    """A tensor with attributes, or of a class that the caller allows."""
    fine = type(make) is Maker and make.name in _MAKERS and type(arguments) is tuple
    _require(fine and isinstance(cls, type) and issubclass(cls, torch.Tensor), "a tensor is of an unknown class")
    made: torch.Tensor = make.make(*arguments)
    if cls in (torch.Tensor, torch.nn.Parameter):
        _require(isinstance(made, torch.Tensor), "a tensor is of an unknown class")
        made = made if type(made) is cls else made.as_subclass(cls)
        set_attributes(made, state)
        return made
    # Only a class that the caller allows can be on the stack here.
    return torch._tensor._rebuild_from_type_v2(lambda: made, cls, (), state)  # type: ignore[no-any-return]


def _wrapper(
    cls: Any, dtype: Any, size: Any, stride: Any, offset: Any, layout: Any, _device: Any, requires_grad: Any
) -> torch.Tensor:
    fine = isinstance(cls, type) and issubclass(cls, torch.Tensor) and cls not in (torch.Tensor, torch.nn.Parameter)
    _require(fine and isinstance(dtype, torch.dtype), "a tensor is of an unknown class")
    sizes, strides, _ = _geometry(size, stride, dtype.itemsize)
    _require(type(offset) is int and type(requires_grad) is bool, "a tensor lies outside of its storage")
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


def _size(*given: Any) -> torch.Size:
    return torch.Size(_sizes(*given))


def _device(*given: Any) -> torch.device:
    fine = 1 <= len(given) <= 2 and type(given[0]) is str and all(type(n) is int for n in given[1:])
    _require(fine, "a device has no name")
    return torch.device(*given)


def _layout(name: Any) -> torch.layout:
    _require(type(name) is str and name in _LAYOUTS, "a layout is unknown")
    return _LAYOUTS[name]


_MAKERS: Mapping[str, Callable[..., Any]] = {
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
    **{name: Maker(name, make) for name, make in _MAKERS.items()},
    "torch._tensor._rebuild_from_type_v2": Maker("torch._tensor._rebuild_from_type_v2", _typed),
    "torch.serialization._get_layout": Maker("torch.serialization._get_layout", _layout),
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{str(scheme): scheme for scheme in _QSCHEMES},
    **{
        f"{module}.{name}Storage": _StorageKind(d)
        for name, d in _STORAGES.items()
        for module in ("torch", "torch.cuda")
    },
    "torch.storage.UntypedStorage": _StorageKind(torch.uint8),
}
CALLS: Mapping[type, Callable[..., Any]] = {torch.Size: _size, torch.device: _device}
