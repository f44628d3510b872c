"""A sharded checkpoint as one file, which stock Lightning opens without this package."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.integrations.lightning.checkpoint import (
    MODEL,
    OPTIMIZERS,
    TENSORS,
    Rest,
    optimizer_key,
)
from torch_xla_ckpt.integrations.lightning.reading import SavedFolder
from torch_xla_ckpt.integrations.lightning.windows import SavedTensor, read_in_order, read_structure
from torch_xla_ckpt.planner import paths_of
from torch_xla_ckpt.protocols import Sink
from torch_xla_ckpt.serialization import ArchiveWriter, StreamedTensor
from torch_xla_ckpt.storage import Location, PathLike, ShardReader, followed, open_folder

_BUDGET = 256 << 20


def consolidate(
    folder: PathLike,
    file: PathLike,
    *,
    memory_budget: int = _BUDGET,
    weights_only: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a sharded checkpoint as one file, as a plain ``Trainer`` saves it.

    The checkpoint is one of ``SPMDStrategy``, or of Lightning's own sharded strategies. Stock Lightning opens the file:
    ``trainer.fit(ckpt_path=file)``, ``Module.load_from_checkpoint(file)``, and so does
    ``torch.load(file, weights_only=True)``. No device is needed. A file that is there already is replaced when the new
    one is complete. If ``file`` is a link, the file that it leads to is replaced.

    Args:
        folder: the checkpoint's folder, a local path or an fsspec URL.
        file: the file to write, a local path or an fsspec URL.
        memory_budget: bytes of tensors that are in host memory at a time. Default: 256 MiB.
        weights_only: False runs code that the checkpoint names. Default: None, as True.
        storage_options: options of fsspec's filesystems for URLs. Default: none.

    Raises:
        CheckpointError: there is no whole checkpoint in the folder, it is damaged, or the file cannot be written. A
            file that was there before is as it was.
    """
    source, target = Location.of(folder, storage_options), followed(Location.of(file, storage_options))
    saved = SavedFolder(source, check=False, trust_pickle=weights_only is False)
    write_file(source, target, saved.rest, memory_budget=memory_budget, model_key=saved.model_key)


def write_file(
    source: Location, target: Location, rest: Rest, *, memory_budget: int = _BUDGET, model_key: str = MODEL
) -> None:
    """Write a sharded checkpoint as one file; see ``consolidate``.

    Args:
        source: the checkpoint's folder.
        target: the file.
        rest: what the checkpoint has beside the module and the optimizers.
        memory_budget: bytes of tensors that are in host memory at a time.
        model_key: the key of the module in the checkpoint.
    """
    if memory_budget <= 0:
        raise ValueError("memory_budget must be positive")
    reader = ShardReader(source, memory_budget=memory_budget)
    metadata = reader.read_metadata()
    with reader.pinned():
        optimizers = [optimizer_key(number) for number in range(rest.optimizers or 0)]
        found = read_structure(reader, [model_key, *optimizers, TENSORS])
        saved = _saved_tensors(found, metadata)
        streamed: dict[StreamedTensor, SavedTensor] = {}
        value = rest.with_tensors(found[TENSORS])
        value[MODEL] = found[model_key]
        if rest.optimizers is not None:
            value[OPTIMIZERS] = [_by_number(found[key]) for key in optimizers]
        writer = ArchiveWriter(_streamed(value, saved, streamed))
        pieces = read_in_order(reader, [streamed[one] for one in writer.streamed], memory_budget)
        with _opened(target) as file:
            writer.write(file, pieces)


def _by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers for parameters, where Lightning's own strategies save their names."""
    groups = optimizer.get("param_groups", [])
    names = [name for group in groups for name in group["params"]]
    if not any(isinstance(name, str) for name in names):
        return optimizer
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **optimizer,
        "state": {numbers[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def _saved_tensors(found: Mapping[str, Any], metadata: Metadata) -> dict[int, SavedTensor]:
    """Return the saved tensor for each tensor of the structure, by the ``id`` of the latter."""
    saved: dict[int, SavedTensor] = {}
    for key, path in paths_of(metadata).items():
        stored = metadata.state_dict_metadata.get(key)
        if isinstance(stored, TensorStorageMetadata) and path[0] in found:
            here: Any = found
            for element in path:
                # Keys of the metadata are text where the state dict had integers.
                here = here[element] if isinstance(here, dict) and element in here else here[int(element)]
            saved[id(here)] = SavedTensor(key, tuple(stored.size), stored.properties.dtype)
    return saved


def _streamed(value: Any, saved: Mapping[int, SavedTensor], streamed: dict[StreamedTensor, SavedTensor]) -> Any:
    """Return a value with a ``StreamedTensor`` for each saved tensor, and note which stands for which."""
    if id(value) in saved:
        one = saved[id(value)]
        new = StreamedTensor(one.shape, one.dtype)
        streamed[new] = one
        return new
    if isinstance(value, dict):
        changed = {key: _streamed(inner, saved, streamed) for key, inner in value.items()}
        return changed if any(changed[key] is not value[key] for key in value) else value
    if isinstance(value, (list, tuple)):
        items = [_streamed(inner, saved, streamed) for inner in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@contextmanager
def _opened(target: Location) -> Iterator[IO[bytes]]:
    """Open a file for writing. It takes its name, and replaces the file that has it, when the block has succeeded.

    Raises:
        CheckpointError: a folder has the name.
    """
    if target.filesystem is None:
        if os.path.isdir(target.path):
            raise CheckpointError(f"{target} is a folder. Nothing was written. Choose a name for the file")
        os.makedirs(target.parent.path, exist_ok=True)
        temporary = os.path.join(target.parent.path, f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target.path)
            open_folder(target.parent).flush()
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        return
    folder = open_folder(target.parent)
    folder.make()
    sink = folder.create(target.name)
    try:
        yield _SinkFile(sink)  # type: ignore[misc]
        sink.close()
    except BaseException:
        sink.abandon()
        raise


class _SinkFile:
    """A ``Sink`` as a file that cannot seek, for ``zipfile``."""

    def __init__(self, sink: Sink):
        self._sink = sink

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes to the file."""
        self._sink.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the sink has a buffer of its own."""
