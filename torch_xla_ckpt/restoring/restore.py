"""restore: models that have no data yet and optimizers that never took a step are loaded as if they were built."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torch_xla_ckpt import api
from torch_xla_ckpt.errors import ReplacedCheckpointError
from torch_xla_ckpt.planner import Dtype, Missing, Place, Policy, Rename, Shape, Unexpected
from torch_xla_ckpt.reports import LoadReport
from torch_xla_ckpt.restoring.arguments import require_kinds
from torch_xla_ckpt.restoring.job import Job
from torch_xla_ckpt.restoring.materialize import Sharding
from torch_xla_ckpt.restoring.named import require_restorable
from torch_xla_ckpt.serialization import AllowedType
from torch_xla_ckpt.storage import ShardReader, open_reader

logger = logging.getLogger(__name__)


def restore(
    path: str | os.PathLike[str] | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, Any] | None = None,
    sharding: Sharding | None = None,
    mesh: Any = None,
    placement: Place | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    missing: Missing = "error",
    unexpected: Unexpected = "restore",
    dtype: Dtype = "cast",
    shape: Shape = "error",
    rename: Rename | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow_types: Sequence[AllowedType] = (),
    trust_pickle: bool = False,
    verify: bool = True,
    cooperative: bool | None = None,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    storage_reader: ShardReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **named: Any,
) -> LoadReport:
    """Load models and their optimizers, in whatever state of being built they are.

    Parameters and buffers on the meta device are made on their devices, already sharded, and filled from the
    checkpoint. The optimizer's state is made like the parameters it belongs to and handed to ``load_state_dict``. No
    step runs.

    Keys, shapes, dtypes, groups and specs are compared first. If they do not fit, nothing is changed. Two failures show
    only later: damaged bytes, and code of the model or the optimizer that raises when it is handed its values. Then
    tensors that were already loaded in place hold new values, as the error says. The optimizer's groups and
    hyperparameters are the old ones, and parameters that were moved are back where they were. Restore again, from
    another checkpoint if this one is damaged.

    Args:
        path: folder, file or fsspec URL of the checkpoint, in any format that ``load`` reads; not needed with
            ``storage_reader``.
        model: a module whose parameters are on the meta device, in host memory or on devices. They stay the same
            objects, so that an optimizer may hold them already.
        optimizer: the optimizer of the model's parameters. The checkpoint has its ``state_dict()``.
        state: everything else to load, by top-level key, as for ``load``: nested dicts, ``Stateful``s, numbers. New
            values of immutable ones are put into this dict. A module or an optimizer in it is restored as ``model``
            and ``optimizer`` are.
        sharding: partition specs by patterns of parameter and buffer names, or a function. Patterns are globs; the
            first that fits counts, and names that no pattern fits are replicated. A function is called with each
            module, once its tensors are on the XLA device, and marks their shardings. A tensor that is on devices
            already keeps its sharding. Default: tensors stay where they are. Those of a model with parameters on the
            meta device are made, unsharded, on the XLA device, or in host memory where there is no torch_xla.
        mesh: the mesh for the specs. A pattern may also have a pair of its own, (mesh, spec).
        placement: a function of key, shape and dtype that returns where a tensor of the optimizer's state goes, as for
            ``load``. Where it returns None: like the parameter if that has the same shape, else replicated; a step
            count in host memory, where torch keeps it.
        model_key: the model's key in the checkpoint. Default: "model"; or the whole of a checkpoint that is nothing
            but a model; or the only key that has names of the model below it.
        optimizer_key: the optimizer's key in the checkpoint. Default: the key that has "param_groups".
        missing, unexpected, dtype, rename, only, exclude, allow_types, trust_pickle: see ``load``. What a module or an
            optimizer has for keys that are left out stays. A parameter on the meta device that is left out, or missing
            under another policy than "error", is initialized by its module.
        shape: "error" (default), or "keep": a parameter with another shape than the saved one keeps its value. If it is
            on the meta device, its module initializes it: ``_init_weights`` as in transformers, or
            ``reset_parameters``. Its optimizer state is not loaded either. The report names the keys.
        verify, progress, storage_options: see ``ShardReader``.
        cooperative: see ``load``.
        storage_reader: a reader to use; it has options of its own instead of the three above.
        process_group, no_dist: see ``load``.
        named: more to load, by top-level key, like ``state``: ``net=net, optim=optim, scheduler=scheduler``.

    Returns:
        What became of every key, what was read, and how long it took.

    Raises:
        MismatchError: target and checkpoint do not fit each other.
        CheckpointError: the optimizer's groups or the specs do not fit, or tensors cannot be made; and as for ``load``.
        TypeError: a value in ``named`` cannot be filled in place, an option is misspelt, or an argument is of another
            kind.
        ValueError: an option has a wrong value, or ``path`` is not the path of ``storage_reader``.
    """
    for name, value in named.items():
        remedy = f"state = {{{name!r}: ...}}; restore(..., state=state), and read state[{name!r}]"
        require_restorable(name, value, call="restore", remedy=remedy, options=OPTIONS)
    require_kinds(model=model, optimizer=optimizer, state=state, sharding=sharding, placement=placement)
    if mesh is not None and sharding is None:
        logger.warning("restore() was given a mesh and no sharding, so it shards nothing. Pass sharding=, too")
    if twice := sorted(named.keys() & (state or {}).keys()):
        raise TypeError(f"{', '.join(map(repr, twice))}: passed by name and in state=. Pass each key once")
    policy = Policy(missing, unexpected, dtype, rename, _patterns(only), _patterns(exclude), shape)
    reader = open_reader(path, storage_reader, storage_options, verify=verify, progress=progress)
    rest = {**(state or {}), **named}
    job = Job(
        model=model,
        optimizer=optimizer,
        modules={key: value for key, value in rest.items() if isinstance(value, torch.nn.Module)},
        optimizers={key: value for key, value in rest.items() if isinstance(value, torch.optim.Optimizer)},
        state={key: value for key, value in rest.items() if not isinstance(value, _WITH_TENSORS)},
        sharding=sharding,
        mesh=mesh,
        placement=placement,
        model_key=model_key,
        optimizer_key=optimizer_key,
        policy=policy,
    )
    options: dict[str, Any] = {
        "allow_types": allow_types,
        "trust_pickle": trust_pickle,
        "cooperative": cooperative,
        "storage_reader": reader,
        "process_group": process_group,
        "no_dist": no_dist,
    }
    report = _restarted(lambda: job.run(reader, options))
    if state is not None:
        state.update({key: value for key, value in job.state.items() if key in state})
    return report


OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(restore).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
"""Names of the options of ``restore``."""

_WITH_TENSORS = (torch.nn.Module, torch.optim.Optimizer)


def _patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _restarted(attempt: Callable[[], LoadReport]) -> LoadReport:
    """Restore, again if another save replaces the checkpoint meanwhile. All processes do this alike."""
    for restarts in range(api.RESTARTS):
        try:
            return replace(attempt(), restarts=restarts)
        except ReplacedCheckpointError as error:
            logger.warning("%s", error)
    return replace(attempt(), restarts=api.RESTARTS)
