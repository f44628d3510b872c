"""What ``torch.save`` wrote, before it is loaded: nothing in it may claim memory that it does not bring.

torch's ``weights_only`` unpickler runs no code, but up to torch 2.9 it makes storages as large as the file says,
however few bytes the file has for them, and numpy believes the flags, offsets and sizes that a pickle
gives a dtype. Either lets a file read and write this process's memory. So the pickle is gone through with nothing but
stand-ins first.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from typing import Any

import numpy as np
import torch


def check(data: io.BytesIO) -> None:
    """Refuse an archive that ``torch.load(..., weights_only=True)`` could be harmed by; leaves ``data`` at its start.

    Raises:
        pickle.UnpicklingError: it claims more than it has.
        zipfile.BadZipFile: it is no archive that torch since 1.6 writes.
    """
    with zipfile.ZipFile(data) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        if len(sizes) != len(archive.infolist()) or any(i.compress_type for i in archive.infolist()):
            raise pickle.UnpicklingError("its archive is not of the kind that torch.save writes")
        (name,) = (name for name in sizes if name.count("/") == 1 and name.endswith("/data.pkl"))
        pickled = archive.read(name)
    data.seek(0)
    copyreg.clear_extension_cache()
    scan = _Scan(io.BytesIO(pickled))
    scan.load()
    for key, nbytes in scan.claims:
        if nbytes > sizes.get(f"{name.removesuffix('data.pkl')}data/{key}", -1):
            raise pickle.UnpicklingError(f"a tensor claims {nbytes} bytes that are not there")


class _Scan(pickle.Unpickler):
    """Goes through a pickle, makes nothing of it, and notes the storages that it asks for."""

    def __init__(self, data: io.BytesIO):
        super().__init__(data)
        self.claims: list[tuple[str, int]] = []

    def find_class(self, module: str, name: str) -> Any:
        kind = _Dtype if (module, name) == ("numpy", "dtype") else _Inert
        return type(name, (kind,), {"module": module})

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, numel = pid
        dtype = getattr(torch, str(storage.__name__), None) if kind == "storage" else None
        if storage.module == "torch.storage" and storage.__name__ == "UntypedStorage":
            itemsize = 1
        elif isinstance(dtype, type) and issubclass(dtype, torch.storage._LegacyStorage):
            itemsize = dtype().element_size()
        else:
            raise pickle.UnpicklingError("it refers to something that is no storage")
        if type(numel) is not int or numel < 0 or type(key) is not str:
            raise pickle.UnpicklingError("it refers to a storage of no size")
        self.claims.append((key, numel * itemsize))
        return _Inert()


class _Inert:
    """Stands for a class, for what it makes, and for what that makes."""

    module = ""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args

    def __call__(self, *args: Any) -> _Inert:
        return _Inert(*args)

    def _ignore(self, *args: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = update = _ignore


class _Dtype(_Inert):
    """Stands for a numpy dtype; ``real`` is what it may be."""

    def __init__(self, spec: Any, *args: Any):
        if not isinstance(spec, str) or "," in spec:
            raise pickle.UnpicklingError("a dtype that is made of something else than its name")
        self.real = np.dtype(spec)

    def __setstate__(self, state: Any) -> None:
        _, order, part, names, fields, size, _, flags, *_ = state
        if names is not None:
            formats = [fields[name][0].real for name in names]
            offsets = [fields[name][1] for name in names]
            layout: Any = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size}
            self.real = np.dtype(layout)
            if sorted(fields) != sorted(names):
                raise pickle.UnpicklingError("a dtype whose fields are not those that it names")
        elif part is not None:
            self.real = np.dtype((part[0].real, part[1]))
        else:
            self.real = self.real.newbyteorder(order) if order in "<>" else self.real
        aligned = 0x80
        if size not in (-1, self.real.itemsize) or (flags ^ self.real.flags) & ~aligned:
            raise pickle.UnpicklingError("a dtype that claims to be another one")
