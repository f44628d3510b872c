"""Steps of training and evaluation on lazy devices: each batch ends with exactly one sync."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.integrations.lightning.sharding import InputSharding


class LazySteps(Strategy):
    """A strategy whose devices compute nothing until a sync.

    Attributes:
        inputs: puts batches on the devices.
    """

    inputs: InputSharding
    _is_step_open = False  # whether a training step has traced operations that no sync has started
    _may_be_pending = False  # whether anything but a training step has traced operations since the last training step

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Put a batch on the devices, each of which gets its part.

        This ends the previous step on the devices if the module's own ``optimizer_step`` did not run the optimizer. It
        also starts what an evaluation or the end of an epoch has left pending. Otherwise, the graph of the training
        step would be another one, and would be compiled again.
        """
        module = self.lightning_module
        if self._is_step_open:
            self._end_step()
        if module is None:
            return self.inputs.upload(batch)
        if self._may_be_pending and module.trainer.training:
            lazy.xla.compute_pending()
            self._may_be_pending = False
        owners = (module, module.trainer.datamodule)
        is_users = any(one is not None and is_overridden("transfer_batch_to_device", one) for one in owners)
        if not is_users:
            batch = self.inputs.upload(batch)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return self.inputs.upload(batch) if is_users else batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step. In manual optimization, its end is the end of the step on the devices."""
        self._is_step_open = True
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        if module is not None:
            _drop_pending_resets(module.trainer)
            if not module.automatic_optimization:
                self._end_step()
        return output

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """End the step on the devices if it only accumulates gradients."""
        module = self.lightning_module
        if module is not None and module.automatic_optimization and module.trainer.fit_loop._should_accumulate():
            self._end_step()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the optimizer's step, which ends the step on the devices."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._end_step()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        return self._evaluated(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step."""
        return self._evaluated(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step."""
        return self._evaluated(super().predict_step(*args, **kwargs))

    def _evaluated(self, output: Any) -> Any:
        self._may_be_pending = True
        lazy.xla.step()
        return output

    def _end_step(self) -> None:
        self._is_step_open = False
        lazy.xla.step()


def _drop_pending_resets(trainer: Trainer) -> None:
    """Replace values that Lightning resets in the first step of each epoch and does not use.

    ``self.log`` keeps a batch size for each mean, also for means that are logged for single steps only. As a part of
    the training step, its reset would make another graph of it.
    """
    results = trainer._results
    if results is None or trainer._logger_connector._first_loop_iter is not True:
        return
    for one in results.result_metrics:
        is_unused = one.is_tensor and one.meta.is_mean_reduction and not one.meta.on_epoch
        if is_unused and one.cumulated_batch_size.device.type == "xla":
            one.cumulated_batch_size = lazy.xla.upload(torch.tensor(0), None)


def leave_inference_mode(trainer: Trainer) -> None:
    """Let a Trainer evaluate under ``torch.no_grad()``: XLA tensors do not support torch's inference mode."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
