"""Reading checkpoints into a module and its optimizers, whatever wrote them: the contents decide."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.device import Placement as Place
from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsafeObjectError
from torch_xla_ckpt.integrations.lightning.checkpoint import (
    MODEL,
    OPTIMIZERS,
    REST,
    TENSORS,
    Rest,
    optimizer_key,
    read_pickle,
    read_rest,
)
from torch_xla_ckpt.integrations.lightning.places import LIGHTNINGS_FILE, whole_neighbours
from torch_xla_ckpt.integrations.lightning.sharding import ModuleSharding
from torch_xla_ckpt.restoring import held_tensors, restore, sharded_state
from torch_xla_ckpt.storage import Location, ShardReader, holds_checkpoint, open_folder, verify


class SavedFolder:
    """A sharded checkpoint: one of ``SPMDStrategy``, or one of Lightning's own strategies.

    Args:
        location: the checkpoint's folder.
        check: whether to read and check all of it before anything else.
        trust_pickle: whether to run code that the checkpoint names.

    Attributes:
        rest: what the checkpoint has beside the module and the optimizers, without tensors on devices.
        model_key: the key of the module in the checkpoint.

    Raises:
        CheckpointError: there is no whole checkpoint of Lightning at the location.
    """

    def __init__(self, location: Location, *, check: bool, trust_pickle: bool):
        self._location = location
        self._trust_pickle = trust_pickle
        self._metadata = _read_metadata(location)
        keys = self._metadata.state_dict_metadata
        if check:
            _require_undamaged(location)
        self.model_key = MODEL if any(key.startswith(f"{MODEL}.") for key in keys) else "model"
        if REST in keys:
            target: dict[str, Any] = {REST: None}
            api.load(target, storage_reader=ShardReader(location), only=REST)
            self.rest = read_rest(target[REST], str(location), trust_pickle=trust_pickle)
            self._require_parts()
        else:
            self.rest = self._rest_of_lightning()

    def _require_parts(self) -> None:
        """Check, before anything is loaded, that all that ``rest`` speaks of is there."""
        keys = self._metadata.state_dict_metadata
        tops = {key.partition(".")[0] for key in keys}
        optimizers = map(optimizer_key, range(min(self.rest.optimizers or 0, len(keys) + 1)))
        lacking = [key for key in optimizers if key not in tops]
        lacking += [key for name in self.rest.places if (key := f"{TENSORS}.{name}") not in keys]
        if lacking:
            raise CorruptCheckpointError(
                f"{self._location} lacks {lacking[0]!r}, which was saved. Nothing was loaded. Load another checkpoint"
            )
        self.rest.with_tensors(dict.fromkeys(self.rest.places, torch.empty(0)))

    def load_model(self, model: torch.nn.Module, sharding: ModuleSharding) -> None:
        """Load the module's tensors, wherever they are. Those that are not on devices are placed there first.

        Raises:
            CheckpointError: the checkpoint does not fit the module, or cannot be read. Tensors that were not on devices
                are as before.
        """
        keys = self._metadata.state_dict_metadata
        names = {one.name for one in held_tensors("", model)}
        later = {name for name in names if f"{self.model_key}.{name.replace('_orig_mod.', '')}" in keys}
        strict = bool(getattr(model, "strict_loading", True))
        placement = sharding.placement(model)
        placement.run(later, can_undo=True)
        try:
            restore(
                storage_reader=ShardReader(self._location),
                model=model,
                model_key=self.model_key,
                missing="error" if strict else "warn",
                unexpected="error" if strict else "warn",
                trust_pickle=self._trust_pickle,
            )
        except BaseException:
            placement.undo()
            raise
        sharding.mark(model)

    def checkpoint(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return Lightning's checkpoint dict.

        The state of the module is that of the module itself, which must have been loaded. For each optimizer, the key
        of its state in the checkpoint stands for the state.
        """
        tensors: dict[str, Any] = {TENSORS: {}}
        if self.rest.places:
            like = {one.name: one.tensor for one in held_tensors("", model)}
            api.load(
                tensors,
                storage_reader=ShardReader(self._location),
                only=f"{TENSORS}.*",
                placement=lambda *one: _place(like, *one),
            )
        values = self.rest.with_tensors(tensors[TENSORS])
        values[MODEL] = model.state_dict()
        if self.rest.optimizers is not None:
            values[OPTIMIZERS] = [optimizer_key(number) for number in range(self.rest.optimizers)]
        return values

    def load_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Load the state of all optimizers, sharded like their parameters.

        Raises:
            CheckpointError: the checkpoint has other optimizers, or cannot be read.
        """
        require_count(self.rest.optimizers or 0, optimizers, str(self._location))
        state: dict[str, Any] = {optimizer_key(number): optimizer for number, optimizer in enumerate(optimizers)}
        if state:
            restore(storage_reader=ShardReader(self._location), state=state, trust_pickle=self._trust_pickle)

    def _rest_of_lightning(self) -> Rest:
        folder = open_folder(self._location)
        if LIGHTNINGS_FILE not in folder.names():
            raise CheckpointError(
                f"{self._location} is not a checkpoint of Lightning: it has neither the key {REST!r} nor the file "
                f"{LIGHTNINGS_FILE}. Nothing was loaded. Load it with torch_xla_ckpt.restore(path, model=...)"
            )
        values = read_pickle(folder.read(LIGHTNINGS_FILE), str(self._location), trust_pickle=self._trust_pickle)
        first = {key.partition(".")[0] for key in self._metadata.state_dict_metadata}
        numbers = [number for number in range(len(first)) if optimizer_key(number) in first]
        return Rest(values, len(numbers) if numbers else None, {})


def read_file(location: Location, *, check: bool, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint dict in a single file, with all tensors in host memory. Local files are memory-mapped.

    Args:
        location: the file.
        check: whether to check the checksums of a local file first.
        weights_only: False runs code that the file names. Default in Lightning: None, as True.

    Raises:
        CheckpointError: the file is damaged, or is no checkpoint of Lightning.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": weights_only is not False}
    try:
        if location.filesystem is None:
            is_zip = zipfile.is_zipfile(location.path)
            if is_zip and check:
                _require_checksums(location)
            loaded = torch.load(location.path, mmap=is_zip, **options)
        else:
            with location.filesystem.open(location.path, "rb") as file:
                loaded = torch.load(file, **options)
    except CheckpointError:
        raise
    except Exception as error:
        if "weights_only" in str(error):
            raise UnsafeObjectError(
                f"{location} needs types that could run code. Nothing was loaded. {error}"
            ) from error
        raise CorruptCheckpointError(
            f"{location} cannot be read ({type(error).__name__}: {error}). Nothing was loaded. Restore from another "
            "checkpoint"
        ) from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get(MODEL), Mapping):
        raise CheckpointError(
            f'{location} is not a checkpoint of Lightning: it has no "{MODEL}". Nothing was loaded. Load a file with '
            "nothing but a module's state by module.load_state_dict(torch.load(path))"
        )
    return loaded


def load_optimizers_from_file(
    optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Mapping[str, Any]], source: str
) -> None:
    """Load the states of optimizers that are in host memory, sharded like their parameters.

    Raises:
        CheckpointError: the checkpoint has other optimizers.
    """
    require_count(len(states), optimizers, source)
    for number, (optimizer, state) in enumerate(zip(optimizers, states)):
        saved = [len(group["params"]) for group in state["param_groups"]]
        own = [len(group["params"]) for group in optimizer.param_groups]
        if saved != own:
            raise CheckpointError(
                f"optimizer {number} does not fit {source}, which has groups of {saved} parameters; the optimizer has "
                f"groups of {own}. Give the optimizer the groups that it had when it was saved"
            )
        optimizer.load_state_dict(sharded_state(optimizer, dict(state)))


def require_count(saved: int, optimizers: Sequence[torch.optim.Optimizer], source: str) -> None:
    """Check that a checkpoint has as many optimizers as the module.

    Raises:
        CheckpointError: it has not.
    """
    if saved != len(optimizers):
        raise CheckpointError(
            f"{source} has the state of {saved} optimizers, and configure_optimizers() returned {len(optimizers)}. "
            "Return the optimizers that were saved"
        )


def _read_metadata(location: Location) -> Metadata:
    """Return the metadata of the checkpoint at a location.

    Raises:
        CheckpointError: there is no whole checkpoint.
    """
    if not holds_checkpoint(location):
        has_files = bool(open_folder(location).names())
        why = "its save was never committed" if has_files else "there is no such folder, or it is empty"
        remedy = whole_neighbours(location) or "Load another checkpoint"
        raise CheckpointError(f"{location} holds no checkpoint: {why}. Nothing was loaded. {remedy}")
    metadata = ShardReader(location).read_metadata()
    metadata.state_dict_metadata  # noqa: B018  raises the error of reading, if there was one
    return metadata


def _require_undamaged(location: Location) -> None:
    """Read all of a checkpoint on the first rank, and raise what is damaged on all ranks."""
    doing = f"checking {location}"

    def check() -> None:
        report = verify(location)
        if not report:
            raise CorruptCheckpointError(
                f"{report}\nNothing was loaded. Restore from another checkpoint", report.damages
            )

    Processes(None).from_first(check, doing)


def _require_checksums(location: Location) -> None:
    with zipfile.ZipFile(location.path) as file:
        damaged = file.testzip()
    if damaged is not None:
        raise CorruptCheckpointError(
            f"{location} is damaged: {damaged!r} in it has another checksum than when it was saved. Nothing was "
            "loaded. Load another checkpoint"
        )


def _place(like: Mapping[str, torch.Tensor], key: str, shape: torch.Size, dtype: torch.dtype) -> Place | None:
    """Return where a tensor of a callback goes: like the module's tensor of the same name and shape, or to the host.

    A tensor without dimensions, such as the score that ``ModelCheckpoint`` compares, goes back to the devices.
    """
    if not shape:
        return lazy.xla.root_device()
    parts = key.split(".")
    names = (".".join(parts[number:]) for number in range(len(parts)))
    found = next((like[name] for name in names if name in like), None)
    return found if found is not None and found.shape == shape else None
