"""How modules and batches are cut over the devices."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torchmetrics import Metric

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.restoring import HeldTensor, Placement, Sharding, held_tensors

_Placed = tuple[Any, tuple[Any, ...]]
_LOSSES = torch.nn.L1Loss.__module__


class ModuleSharding:
    """The rules by which a module's tensors are sharded.

    Args:
        mesh: the mesh for specs without a mesh of their own.
        sharding: as for ``restore``. Default: each parameter is cut over the axis "fsdp", along its largest dimension
            that divides evenly. Parameters of metrics and of torch's losses, buffers, and parameters without such a
            dimension are whole on each device, and so is everything if the mesh has no axis "fsdp".
    """

    def __init__(self, mesh: Any, sharding: Sharding | None):
        self._mesh = mesh
        self._mark = sharding if callable(sharding) else None
        self._patterns: dict[str, _Placed] | None = None
        if isinstance(sharding, Mapping):
            self._patterns = {pattern: self._placed(value) for pattern, value in sharding.items()}
        names = mesh.axis_names or ()
        self._parts = mesh.mesh_shape[names.index("fsdp")] if "fsdp" in names else 1

    def placement(self, model: torch.nn.Module, prefix: str = "") -> Placement:
        """Return the move of a module's tensors to the devices; see ``Placement``."""
        whole = {id(one) for module in model.modules() if _is_metric_or_loss(module) for one in module.parameters()}

        def spec_of(one: HeldTensor) -> _Placed | None:
            if self._patterns is not None:
                return next((spec for glob, spec in self._patterns.items() if fnmatchcase(one.name, glob)), None)
            return None if id(one.tensor) in whole else self._default(one.tensor)

        return Placement(model, spec_of, prefix)

    def mark(self, model: torch.nn.Module) -> None:
        """Call the user's function, if ``sharding`` is one, unless a tensor of the module is cut already."""
        if self._mark is not None and not any(lazy.xla.is_cut(one) for one in [*model.parameters(), *model.buffers()]):
            self._mark(model)

    @property
    def is_function(self) -> bool:
        """Whether ``sharding`` is a function, which sees whole models only."""
        return self._mark is not None

    def require_used(self, model: torch.nn.Module) -> None:
        """Check that each pattern fits a tensor of the model.

        Raises:
            CheckpointError: a pattern fits none.
        """
        names = [one.name for one in held_tensors("", model)]
        idle = [glob for glob in self._patterns or {} if not any(fnmatchcase(name, glob) for name in names)]
        if idle:
            raise CheckpointError(
                f"sharding= has patterns that fit no parameter or buffer: {', '.join(map(repr, idle))}. Patterns are "
                "globs for whole names, such as '*.weight'"
            )

    def _placed(self, value: Sequence[Any]) -> _Placed:
        has_own_mesh = len(value) == 2 and hasattr(value[0], "mesh_shape")
        return (value[0], tuple(value[1])) if has_own_mesh else (self._mesh, tuple(value))

    def _default(self, tensor: torch.Tensor) -> _Placed | None:
        fitting = [dim for dim, size in enumerate(tensor.shape) if size and size % self._parts == 0]
        if self._parts == 1 or not fitting or not isinstance(tensor, torch.nn.Parameter):
            return None
        cut = max(fitting, key=lambda dim: tensor.shape[dim])
        return self._mesh, tuple("fsdp" if dim == cut else None for dim in range(tensor.ndim))


class InputSharding:
    """The rule by which a batch's tensors are cut.

    Args:
        mesh: the mesh.
        spec: the partition spec of each tensor, or specs by globs for the keys of a batch that is a dict. A spec is cut
            off or filled with None to the tensor's number of dimensions. Default, also for keys that no glob fits: the
            first dimension over the mesh's first axis.
    """

    def __init__(self, mesh: Any, spec: Sequence[Any] | Mapping[str, Sequence[Any]] | None):
        self._mesh = mesh
        self._by_key = spec if isinstance(spec, Mapping) else None
        first = (mesh.axis_names or (0,))[0]
        self._spec = (first,) if spec is None or isinstance(spec, Mapping) else tuple(spec)

    def upload(self, batch: Any) -> Any:
        """Return a batch with all host tensors on the devices."""
        if self._by_key is None or not isinstance(batch, MutableMapping):
            return self._put_all(batch, self._spec)
        uploaded = copy(batch)
        for key, value in batch.items():
            fitting = [spec for glob, spec in self._by_key.items() if fnmatchcase(str(key), glob)]
            uploaded[key] = self._put_all(value, fitting[0] if fitting else self._spec)
        return uploaded

    def _put_all(self, batch: Any, spec: Sequence[Any]) -> Any:
        return apply_to_collection(batch, torch.Tensor, lambda tensor: self._put(tensor, spec))

    def _put(self, tensor: torch.Tensor, spec: Sequence[Any]) -> torch.Tensor:
        whole = (*spec, *[None] * tensor.ndim)[: tensor.ndim]
        if tensor.device.type == "cpu":
            return lazy.xla.upload(tensor, (self._mesh, whole))
        if tensor.device.type == "xla" and not lazy.xla.is_cut(tensor):
            lazy.xla.mark(tensor, self._mesh, whole)
        return tensor


def new_mesh(mesh: Mapping[str, int] | Any | None) -> Any:
    """Return the mesh that a user described by axis names and sizes, or passed; by default one axis "fsdp".

    Raises:
        MisconfigurationException: the sizes do not fit the devices.
    """
    if mesh is not None and not isinstance(mesh, Mapping):
        return mesh
    try:
        return lazy.xla.new_mesh({"fsdp": -1} if mesh is None else mesh)
    except ValueError as error:
        raise MisconfigurationException(f"SPMDStrategy(mesh={mesh!r}): {error}") from error


def move_metrics(model: torch.nn.Module, device: torch.device) -> None:
    """Move the states of metrics, which are neither parameters nor buffers, to the devices."""
    for module in model.modules():
        if isinstance(module, Metric) and module.device != device:
            module.to(device)


def _is_metric_or_loss(module: torch.nn.Module) -> bool:
    return isinstance(module, Metric) or any(kind.__module__ == _LOSSES for kind in type(module).__mro__)
