"""The small files beside the weights: configuration, tokenizer and generation settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.storage import Location, PathLike, is_file, open_folder

CONFIG = "config.json"
_GENERATION = "generation_config.json"
# Files of configurations, tokenizers and processors, as transformers names them.
_COPIED = re.compile(
    r"config\.json|generation_config\.json|.*tokenizer.*\.(json|model|txt)|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt|bpe)|merges\.txt|.*\.(spm|tiktoken|jinja)|spiece\.model|chat_template\.json"
    r"|(pre|video_pre)?processor_config\.json|sentencepiece.*\.model"
)
_WRAPPED = ("_orig_module", "_orig_mod", "module")  # the only submodule of a wrapper
_DTYPES = ("dtype", "torch_dtype")  # where transformers notes the dtype, in newer and older versions


def companions_of(
    config_from: Any, dtype: torch.dtype | None, storage_options: Mapping[str, Any] | None
) -> dict[str, bytes]:
    """Return the bytes of the files to write beside the weights, by name.

    Args:
        config_from: a folder with ``config.json``, a ``PreTrainedModel``, or None.
        dtype: the dtype to note in the configuration; None to leave it as it is.
        storage_options: options of fsspec's filesystem, if ``config_from`` is a URL.

    Raises:
        CheckpointError: the folder has no ``config.json``, or the object is no model with a configuration.
    """
    if config_from is None:
        return {}
    if isinstance(config_from, (str, os.PathLike)):
        found = _of_folder(config_from, storage_options)
    else:
        found = _of_model(config_from)
    if dtype is not None:
        found[CONFIG] = _with_dtype(found[CONFIG], dtype)
    return found


def ties_by_config(companions: Mapping[str, bytes]) -> bool:
    """Whether a model's configuration may tie weights; True if it does not say."""
    if CONFIG not in companions:
        return True
    try:
        config = json.loads(companions[CONFIG])
    except ValueError:
        return True
    return not isinstance(config, dict) or config.get("tie_word_embeddings") is not False


def _of_folder(path: PathLike, storage_options: Mapping[str, Any] | None) -> dict[str, bytes]:
    location = Location.of(path, storage_options)
    if is_file(location):
        raise CheckpointError(
            f"config_from={os.fspath(path)!r} is a file. Nothing was written. Pass the folder that holds {CONFIG}"
        )
    folder = open_folder(location)
    names = folder.names()
    if CONFIG not in names:
        raise CheckpointError(
            f"config_from={os.fspath(path)!r} has no {CONFIG}. Nothing was written. Pass a model's folder, or a model"
        )
    return {name: folder.read(name) for name in sorted(names) if _COPIED.fullmatch(name)}


def _of_model(model: Any) -> dict[str, bytes]:
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        raise CheckpointError(
            f"config_from= got a {type(model).__name__} without a configuration. Nothing was written. Pass a folder "
            "with config.json, or a PreTrainedModel"
        )
    content = json.loads(config.to_json_string(use_diff=True))
    content.setdefault("architectures", None)
    content["architectures"] = content["architectures"] or [type(_unwrapped(model)).__name__]
    found = {CONFIG: _json(content)}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        found[_GENERATION] = generation.to_json_string(use_diff=True).encode()
    return found


def _unwrapped(model: Any) -> Any:
    """Return the model inside of FSDPv2's, ``torch.compile``'s and DDP's wrappers."""
    modules = getattr(model, "_modules", {})
    inner = next((modules[name] for name in _WRAPPED if len(modules) == 1 and name in modules), None)
    return model if inner is None else _unwrapped(inner)


def _with_dtype(raw: bytes, dtype: torch.dtype) -> bytes:
    """Return a configuration that notes the dtype where it noted one before."""
    try:
        config = json.loads(raw)
    except ValueError:
        return raw
    noted = [name for name in _DTYPES if isinstance(config, dict) and name in config]
    if not noted:
        return raw
    return _json({**config, **dict.fromkeys(noted, str(dtype).removeprefix("torch."))})


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
