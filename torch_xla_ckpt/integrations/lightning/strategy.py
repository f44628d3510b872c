"""SPMDStrategy: what a Lightning Trainer calls to train on sharded XLA devices."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.nn.modules.module import register_module_module_registration_hook

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.integrations.lightning.accelerator import SPMDAccelerator
from torch_xla_ckpt.integrations.lightning.checkpoint import MODEL, OPTIMIZERS, take_own, with_own
from torch_xla_ckpt.integrations.lightning.loaders import ResumableLoader
from torch_xla_ckpt.integrations.lightning.precision import for_xla
from torch_xla_ckpt.integrations.lightning.processes import OneProgram
from torch_xla_ckpt.integrations.lightning.reading import SavedFolder, load_optimizers_from_file, read_file
from torch_xla_ckpt.integrations.lightning.saves import Saves
from torch_xla_ckpt.integrations.lightning.sharding import InputSharding, ModuleSharding, move_metrics, new_mesh
from torch_xla_ckpt.integrations.lightning.steps import LazySteps, leave_inference_mode
from torch_xla_ckpt.restoring import Sharding, fill
from torch_xla_ckpt.state import random_state, set_random_state
from torch_xla_ckpt.storage import Location, PathLike, is_file

logger = logging.getLogger(__name__)


class SPMDStrategy(OneProgram, LazySteps):
    """Trains on all XLA devices of a program, with a module that SPMD shards, and saves sharded checkpoints.

    It brings its accelerator: ``Trainer(strategy=SPMDStrategy())`` needs nothing else, on TPUs and on virtual devices.

    Args:
        mesh: sizes by axis name, or a ``Mesh`` of torch_xla. Default: one axis "fsdp" over all devices.
        sharding: partition specs by patterns of parameter and buffer names, or a function that marks a module, as for
            ``torch_xla_ckpt.restore``. Default: each parameter over the axis "fsdp", along its largest dimension that
            divides evenly. Tensors that are sharded already stay as they are.
        input_sharding: partition spec of a batch's tensors, or specs by patterns of the keys of a batch that is a dict.
            Default: the first dimension over the mesh's first axis.
        state_dict_type: "sharded" saves folders to which all processes write. "full" saves single files that stock
            Lightning opens. Either way, every kind of checkpoint can be loaded. Default: "sharded".
        background: whether ``fit`` goes on while checkpoints are written. Default: True. ``fit`` returns when all are
            committed. Saves outside of ``fit`` are committed on return.
        check: whether to read and check all of a checkpoint before any of it is loaded. Default: True. It costs a
            second pass over the files. Without it, damage is found when a part may have been loaded.
        storage_options: options of fsspec's filesystem for URLs. Default: none.
        precision_plugin: a precision plugin of Lightning. Default: the one that ``Trainer(precision=...)`` names.

    Raises:
        MisconfigurationException: an option has an impossible value.
    """

    strategy_name = "spmd"
    model: Any

    def __init__(
        self,
        mesh: Mapping[str, int] | Any | None = None,
        sharding: Sharding | None = None,
        input_sharding: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        background: bool = True,
        *,
        check: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        precision_plugin: Precision | None = None,
    ):
        if state_dict_type not in ("sharded", "full"):
            raise MisconfigurationException(f'state_dict_type must be "sharded" or "full", not {state_dict_type!r}')
        lazy.xla.use_spmd()
        super().__init__(accelerator=SPMDAccelerator(), precision_plugin=precision_plugin)
        self._mesh = new_mesh(mesh)
        self._sharding = ModuleSharding(self._mesh, sharding)
        self.inputs = InputSharding(self._mesh, input_sharding)
        self._background = background
        self._check = check
        self._storage_options = storage_options
        self._saves = Saves(full=state_dict_type == "full")
        self._is_fitting = False
        self._is_interrupted = False
        self._converted: weakref.ref[torch.nn.Module] | None = None  # the module that has its precision
        self._saved: SavedFolder | None = None  # the checkpoint whose optimizers are still to be loaded
        self._source = ""  # the checkpoint that is being loaded, for errors
        self._random_state: dict[str, Any] | None = None  # of the checkpoint, until training begins
        rank_zero_only.rank = self.global_rank

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self._mesh

    # What Lightning may plug in.

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = for_xla(precision_plugin)

    @property
    def checkpoint_io(self) -> None:
        """None: checkpoints are saved by all processes, and a ``CheckpointIO`` is called on the first one only."""

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise MisconfigurationException(
            f"SPMDStrategy cannot use the plugin {type(io).__name__}: it saves checkpoints by all processes, and a "
            "CheckpointIO gets them on the first process only. Leave the plugin out"
        )

    # Modules: where their tensors are.

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors in host memory, from where ``setup`` shards them; on the meta device with ``empty_init``."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Shard each layer as soon as ``configure_model`` attaches it to the module, so that host memory is freed."""
        root = self.lightning_module
        if root is None or self._sharding.is_function:
            yield
            return
        prefixes = {id(module): f"{name}." if name else "" for name, module in root.named_modules()}

        def place(parent: torch.nn.Module, name: str, layer: torch.nn.Module | None) -> None:
            if layer is None or id(parent) not in prefixes or _is_on_meta(layer):
                return
            prefix = f"{prefixes[id(parent)]}{name}."
            for inner, module in layer.named_modules():
                prefixes[id(module)] = f"{prefix}{inner}." if inner else prefix
            self._place(layer, prefix)

        hook = register_module_module_registration_hook(place)
        try:
            yield
        finally:
            hook.remove()

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, and make the optimizers."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        leave_inference_mode(trainer)
        self._is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._is_interrupted = False
        self._convert()
        self._place(self.model)
        self._sharding.mark(self.model)
        self._sharding.require_used(self.model)
        if self._is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Do nothing: ``setup`` has sharded the module."""

    def on_exception(self, exception: BaseException) -> None:
        """Remember that the run failed, so that an error of a save does not hide the reason."""
        self._is_interrupted = True

    def teardown(self) -> None:
        """Wait until all checkpoints are committed. The module stays on the devices.

        Raises:
            CheckpointError: a save in the background failed.
        """
        self._is_fitting = False
        self._saved, self._random_state = None, None
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        try:
            self._saves.close(together=not self._is_interrupted)
        except CheckpointError as error:
            if not self._is_interrupted:
                raise
            logger.error("a save in the background failed, too: %s", error)

    def _convert(self) -> None:
        """Give the module its precision, once."""
        assert self.model is not None
        if self._converted is None or self._converted() is not self.model:
            self.model = self.precision_plugin.convert_module(self.model)
            self._converted = weakref.ref(self.model)

    def _place(self, module: torch.nn.Module, prefix: str = "") -> None:
        move_metrics(module, self.root_device)
        self._sharding.placement(module, prefix).run()

    # Loaders.

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a training loader that can resume; other loaders as they are."""
        module = self.lightning_module
        if module is None or not module.trainer.training or isinstance(dataloader, ResumableLoader):
            return dataloader
        loop = module.trainer.fit_loop

        def unused() -> int:
            progress = loop.epoch_loop.batch_progress.current
            return len(getattr(loop._data_fetcher, "batches", ())) + progress.ready - progress.processed

        is_over = loop.epoch_loop._num_ready_batches_reached
        return ResumableLoader(dataloader, is_over, unused, self._beginning_of_epoch)

    @contextmanager
    def _beginning_of_epoch(self) -> Iterator[None]:
        self._may_be_pending = True
        if self._random_state is None:
            yield
            return
        # A loader without a length reads its first batch before training starts.
        set_random_state(self._random_state)
        yield
        self._random_state = random_state()

    def on_train_start(self) -> None:
        """Set the random generators to where the checkpoint had them."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise the error of a save in the background, if one has failed."""
        self._saves.raise_failed()

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: ``load_checkpoint`` itself shards the module, so that nothing is initialised to be overwritten."""
        return False

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, with tensors on the devices."""
        raw = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return dict(raw.state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        """Save a checkpoint; in the background during ``fit``.

        A checkpoint at the path stays until the new one is committed. SLURM's checkpoints are committed on return,
        because Lightning then requeues the job.

        Raises:
            CheckpointError: this save failed, or an earlier one in the background.
        """
        where = Location.of(self.broadcast(filepath), storage_options or self._storage_options)
        background = self._background and self._is_fitting and not where.name.startswith("hpc_ckpt_")
        self._saves.save(with_own(checkpoint), where, background=background)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes. ``ModelCheckpoint`` calls this after it has made a link to a checkpoint."""
        self._saves.hold_links()
        super().barrier(name)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Remove a checkpoint, once the saves before are committed."""
        self._saves.remove(Location.of(filepath, self._storage_options))

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of this strategy, of Lightning's own sharded strategies, or a plain file.

        A sharded checkpoint is loaded into the module here; its tensors are placed on the devices first. Tensors of a
        file are loaded by ``load_model_state_dict``, so that hooks may change them before.

        Raises:
            CheckpointError: the checkpoint is damaged or not one of Lightning, or it does not fit the module. Nothing
                was loaded.
        """
        assert self.lightning_module is not None
        self._saves.wait()
        where = Location.of(self.broadcast(checkpoint_path), self._storage_options)
        self._source = str(where)
        self._convert()
        if is_file(where):
            checkpoint = read_file(where, check=self._check, weights_only=weights_only)
        else:
            saved = SavedFolder(where, check=self._check, trust_pickle=weights_only is False)
            move_metrics(self.lightning_module, self.root_device)
            saved.load_model(self.lightning_module, self._sharding)
            checkpoint = saved.checkpoint(self.lightning_module)
            self._saved = saved
        self._random_state = take_own(checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, unless ``load_checkpoint`` has done so."""
        assert self.lightning_module is not None
        module = self.lightning_module
        placement = self._sharding.placement(module)
        placement.run(set(checkpoint[MODEL]), can_undo=True)
        try:
            fill(module, checkpoint[MODEL], strict=strict, source=self._source)
        except BaseException:
            placement.undo()
            raise
        self._sharding.mark(module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers, sharded like their parameters.

        Raises:
            CheckpointError: the checkpoint has other optimizers.
        """
        states = checkpoint[OPTIMIZERS]
        if self._saved is not None:
            self._saved.load_optimizers(self.optimizers)
            self._saved = None
        else:
            load_optimizers_from_file(self.optimizers, states, self._source)


def _is_on_meta(module: torch.nn.Module) -> bool:
    return any(tensor.device.type == "meta" for tensor in (*module.parameters(), *module.buffers()))
