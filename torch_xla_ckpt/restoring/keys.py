"""Keys under which a checkpoint has models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.planner import paths_of
from torch_xla_ckpt.state import Path

_OPTIMIZER_KEYS = ("optim", "optimizer")


class TopLevelKeys:
    """The top-level keys of a checkpoint.

    Args:
        metadata: the checkpoint's metadata.
    """

    def __init__(self, metadata: Metadata):
        self._metadata = metadata
        self._paths: Mapping[str, Path] = paths_of(metadata)
        self._keys = list(dict.fromkeys(str(self._paths.get(key, (key,))[0]) for key in metadata.state_dict_metadata))

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __str__(self) -> str:
        return ", ".join(map(repr, self._keys[:10])) + (", ..." if len(self._keys) > 10 else "")

    def of_model(self, model: torch.nn.Module, given: str | None) -> str:
        """Return the key of a model: "" if the checkpoint is nothing but the model's state.

        Args:
            model: the model.
            given: the key, if the caller knows it.

        Raises:
            CheckpointError: the key cannot be told, or is not in the checkpoint.
        """
        if given is not None:
            return self._require(given, "model_key")
        if isinstance(self._metadata, _dcp.FlatMetadata):
            return ""
        if "model" in self._keys:
            return "model"
        names, saved = list(model.state_dict()), self._metadata.state_dict_metadata
        if any(name in saved for name in names):
            return ""
        likely = [key for key in self._keys if any(f"{key}.{name}" in saved for name in names)]
        if len(likely) == 1:
            return likely[0]
        raise CheckpointError(
            f"cannot tell which key holds the model. The checkpoint has: {self}. Nothing was changed. Pass model_key="
        )

    def of_optimizer(self, given: str | None) -> str:
        """Return the key of the optimizer.

        Args:
            given: the key, if the caller knows it.

        Raises:
            CheckpointError: the key cannot be told, or is not in the checkpoint.
        """
        if given is not None:
            return self._require(given, "optimizer_key")
        paths = self._paths.values()
        found = list(dict.fromkeys(str(path[0]) for path in paths if len(path) > 1 and path[1] == "param_groups"))
        likely = found if len(found) == 1 else [key for key in _OPTIMIZER_KEYS if key in found]
        if len(likely) != 1:
            raise CheckpointError(
                f"cannot tell which key holds the optimizer: {len(found)} keys have param_groups. The checkpoint has: "
                f"{self}. Nothing was changed. Pass optimizer_key="
            )
        return likely[0]

    def _require(self, key: str, option: str) -> str:
        if key and key not in self._keys:
            raise CheckpointError(
                f"{option}={key!r} is not in the checkpoint. The checkpoint has: {self}. Nothing was changed"
            )
        return key
