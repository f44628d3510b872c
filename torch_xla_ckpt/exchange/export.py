"""export: a checkpoint, or live tensors, as a folder of safetensors or as one file, in one pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.exchange.checkpoint_job import CheckpointJob
from torch_xla_ckpt.exchange.options import Format, Options
from torch_xla_ckpt.exchange.selection import Rename
from torch_xla_ckpt.exchange.state_job import StateJob
from torch_xla_ckpt.reports import ExportReport
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage import Location, PathLike, ShardReader


@without_collector
def export(
    source: PathLike | Mapping[str, Any],
    path: PathLike,
    *,
    key: str | None = None,
    format: Format = "safetensors",
    max_shard_bytes: int = 5 << 30,
    dtype: torch.dtype | str | None = None,
    rename: Rename | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    config_from: Any = None,
    memory_budget: int = 256 << 20,
    verify: bool = True,
    progress: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ExportReport:
    """Write a model as others read it: a Hugging Face folder of safetensors, or one ``torch.save`` file.

    Every rank writes the bytes that it holds, or its share of a checkpoint's bytes, to their final place. Nothing is
    gathered in one process. Until everything is written, nothing at the path looks like a model.

    Args:
        source: the path of a checkpoint in any format that ``load`` reads, or a state dict with live tensors. All ranks
            pass the same path, or their own state dict.
        path: the folder to make: a local path or an fsspec URL. With ``format="torch"``, or if it ends with
            ".safetensors", it is the file to make. A link to a file stays, and the file that it leads to is replaced.
        key: the key of the model in the source. Default: found if the source has one model; a warning names the tensors
            beside it that belong to no optimizer. "": the whole source.
        format: "safetensors" (default), or "torch" for one file that ``torch.load(..., weights_only=True)`` opens.
        max_shard_bytes: bytes of tensors from which the next file of a folder begins. Default: 5 GiB.
        dtype: the dtype to cast floating-point tensors to, or its name. Integers stay, and so do 8-bit floating-point
            tensors. Finite values that become infinite are counted in the report, and a warning names their tensors.
            Default: nothing is cast.
        rename: new names for names of the model, which have neither ``key`` nor wrappers' prefixes: a mapping, or a
            function that returns the new name or None.
        only: globs of the source's keys to write; default: all keys.
        exclude: globs of the source's keys to leave out.
        config_from: a folder whose configuration, tokenizer and generation files are copied, or a ``PreTrainedModel``
            whose configuration is written. Default: only weights are written.
        memory_budget: host memory in bytes for data that is being written. One tensor may exceed it. Default: 256 MiB.
        verify: check the bytes that are read against the checkpoint's checksums. A ``torch.save`` file is first
            compared with its CRC-32 as a whole. Default: True.
        progress: show a progress bar on a terminal while a checkpoint is read. Needs tqdm. Default: False.
        dry_run: write nothing, and return the report of what would be written. Only for a source that is a path.
            Tensors that may be tied are read and compared. Default: False.
        storage_options: options of fsspec's filesystem for URLs: the source, ``path`` and ``config_from``. Default:
            none.
        process_group: a group whose backend gathers Python objects. Default: the default group, or none.

    Returns:
        What was written, under which names, and what was left out.

    Raises:
        ValueError: an option has a wrong value.
        TypeError: the source or an option has a wrong type.
        CheckpointError: the path has a model already; the model's key cannot be told; a dtype is not in the format; or
            any other failure, on any rank. Nothing at the path looks like a model then.
        CorruptCheckpointError: bytes of the checkpoint are not those that were saved.
        IncompleteCheckpointError: the source does not hold every element of a tensor exactly once.
        ConcurrentSaveError: another program has written to the path meanwhile.
        ReplacedCheckpointError: another save replaced the checkpoint while it was read. Export again.
    """
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise TypeError(
            f"the source of an export is the path of a checkpoint or a state dict, not a {type(source).__name__}. "
            "Nothing was written. For a model, pass model.state_dict()"
        )
    options = Options(
        location=Location.of(path, storage_options),
        key=key,
        format=format,
        max_shard_bytes=max_shard_bytes,
        dtype=Options.dtype_of(dtype),
        rename=rename,
        only=(only,) if isinstance(only, str) else tuple(only),
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        config_from=config_from,
        memory_budget=memory_budget,
        storage_options=storage_options,
        dry_run=dry_run,
    )
    if dry_run and isinstance(source, Mapping):
        raise ValueError("dry_run=True needs the path of a checkpoint as its source")
    processes = Processes(process_group)
    if isinstance(source, Mapping):
        return StateJob(options, processes).run(source)
    reader = ShardReader(
        source, verify=verify, memory_budget=memory_budget, progress=progress, storage_options=storage_options
    )
    return CheckpointJob(options, processes, reader.location).run(reader, verify=verify)
