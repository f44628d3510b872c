"""Targets of a load as shapes and dtypes: the keys of a checkpoint, of a model's folder, or of a ``config.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting.opening import open_checkpoint
from torch_xla_ckpt.inspecting.reading import Values
from torch_xla_ckpt.planner import paths_of
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.state import Closed, Path
from torch_xla_ckpt.storage import Location, PathLike, holds_checkpoint, open_folder

_CONFIG = "config.json"
_OBJECT = object()  # stands for an object of the target


def target_of(path: PathLike, saved: Metadata, storage_options: Mapping[str, Any] | None) -> dict[Any, Any]:
    """Return a state dict with tensors on the meta device, to be loaded from a checkpoint.

    Args:
        path: a checkpoint; a model's folder or file; or a ``config.json`` of transformers, or the folder that has it.
            The names of a model get the prefix under which the checkpoint has most of them.
        saved: the metadata of the checkpoint.
        storage_options: options of the fsspec filesystem behind a URL.

    Raises:
        CheckpointError: there is no such thing at the path, or transformers knows no such model.
    """
    location = Location.of(path, storage_options)
    config = _config_at(location)
    if config is not None:
        return _placed(_model_of(config, location), saved)
    values = Values(open_checkpoint(path, storage_options))
    entries = values.metadata.state_dict_metadata
    paths = {} if isinstance(values.metadata, _dcp.FlatMetadata) else paths_of(values.metadata)
    if not paths:
        return _placed({key: _like(key, entry) for key, entry in entries.items()}, saved)
    return _tree((paths.get(key, (key,)), _like(key, entry)) for key, entry in entries.items())


def _like(key: str, entry: Any) -> Any:
    """Return a meta tensor for a saved tensor, and something else for an object."""
    if not isinstance(entry, TensorStorageMetadata):
        return _OBJECT
    try:
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    except RuntimeError as error:
        raise CheckpointError(f"{key!r} cannot be a target: {str(error).splitlines()[0]}") from error


def _config_at(location: Location) -> bytes | None:
    """Return the bytes of a ``config.json``; None if the path names something else."""
    folder: Folder = open_folder(location, sync=False)
    if location.name.endswith(".json"):
        folder = open_folder(location.parent, sync=False)
        if folder.is_file(location.name):
            return folder.read(location.name)
        return None
    try:
        is_config = folder.is_file(_CONFIG) and not holds_checkpoint(location)
    except (OSError, CheckpointError):
        return None
    return folder.read(_CONFIG) if is_config else None


def _model_of(config: bytes, location: Location) -> dict[str, Any]:
    """Return the state of the model that a configuration of transformers describes, on the meta device."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{location} describes a model of transformers, which is not installed. Install it with: pip install "
            "transformers. Or pass a folder with the model's weights"
        ) from error
    try:
        values = json.loads(config)
        kind = transformers.CONFIG_MAPPING[values["model_type"]]
        made = kind.from_dict(values)
        names = values.get("architectures") or ()
        model_type = next((getattr(transformers, str(name), None) for name in names), None)
        if not (isinstance(model_type, type) and issubclass(model_type, transformers.PreTrainedModel)):
            raise ValueError(f"transformers {transformers.__version__} has no class for its architectures {names}")
        with torch.device("meta"):
            model = model_type(made)
        dtype = getattr(made, "dtype", None)
        state = model.state_dict(keep_vars=True)
        if isinstance(dtype, torch.dtype):  # tied weights stay one tensor
            cast = {id(one): one.to(dtype) for one in state.values() if one.is_floating_point()}
            state = {name: cast.get(id(one), one) for name, one in state.items()}
    except Exception as error:
        raise CheckpointError(
            f"cannot build the model that {location} describes ({type(error).__name__}: {error}). Code of the "
            "configuration's authors is never run. Pass a folder with the model's weights"
        ) from error
    return dict(state)


def _placed(names: Mapping[str, Any], saved: Metadata) -> dict[Any, Any]:
    """Return the state dict of a model under the prefix with which the checkpoint has most of its names."""
    keys = saved.state_dict_metadata
    if isinstance(saved, _dcp.FlatMetadata) or any(name in keys for name in names):
        return dict(names)
    paths = paths_of(saved)
    prefixes: Counter[Path] = Counter()
    for key in keys:
        path = paths.get(key, (key,))
        for depth in range(1, len(path)):
            if ".".join(map(str, path[depth:])) in names:
                prefixes[path[:depth]] += 1
    if not prefixes:
        return dict(names)
    ((prefix, _),) = prefixes.most_common(1)
    state: Any = Closed(names)  # a module, which has no place for further keys
    for element in reversed(prefix):
        state = {element: state}
    return dict(state)


def _tree(values: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Return nested containers with values at their paths. Containers with positions are lists."""
    root: dict[Any, Any] = {}
    containers: list[tuple[dict[Any, Any], Any]] = []  # each container's parent, and its key there
    for path, value in values:
        here = root
        for element in path[:-1]:
            if element not in here:
                here[element] = {}
                containers.append((here, element))
            here = here[element]
            if not isinstance(here, dict):
                raise CheckpointError(f"the target has a value at {path}, and another one in a place above it")
        here[path[-1]] = value
    for parent, element in reversed(containers):  # inner containers first
        inner = parent[element]
        if set(inner) == set(range(len(inner))) and all(type(key) is int for key in inner):
            parent[element] = [inner[number] for number in range(len(inner))]
    return root
