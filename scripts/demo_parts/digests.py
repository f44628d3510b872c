"""Digests of a state dict, with which processes that share no code path compare their states.

This module needs only torch. The demo also runs it in an environment that has neither torch_xla nor torch_xla_ckpt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of every leaf of ``state``, by DCP's key."""
    flat, _ = flatten_state_dict(dict(state))
    return {key: digest(value) for key, value in flat.items()}


def digest(value: object) -> str:
    """Return the SHA-256 of a tensor's dtype, global shape and bytes, or of an object's ``repr``."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    # ``.cpu()`` of a sharded XLA tensor assembles the global tensor. The runtime does that, without torch_xla_ckpt.
    host = value.detach().cpu().contiguous()
    sha = hashlib.sha256(f"{host.dtype} {tuple(host.shape)} ".encode())
    sha.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
