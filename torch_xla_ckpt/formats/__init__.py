"""Formats of others: safetensors files and folders, and ``torch.save`` files.

This room finds tensors in files and lays out new files. It moves no tensor data: ``storage`` reads the bytes, and
``exchange`` writes them. Files are untrusted, and nothing in this room runs code from a file.
"""

from torch_xla_ckpt.formats.contents import Contents, TensorPlace, is_text
from torch_xla_ckpt.formats.hugging_face import (
    INDEX_LIMIT,
    index_of,
    is_weights,
    read_folder,
    read_safetensors,
    shard_names,
)
from torch_xla_ckpt.formats.safetensors import HEADER_LIMIT, METADATA, NAMES, entry_bytes, header_of, texts_bytes
from torch_xla_ckpt.formats.sparse_file import SparseFile
from torch_xla_ckpt.formats.torch_file import read_torch_file, torch_file_of

__all__ = [
    "HEADER_LIMIT",
    "INDEX_LIMIT",
    "METADATA",
    "NAMES",
    "Contents",
    "SparseFile",
    "TensorPlace",
    "entry_bytes",
    "header_of",
    "index_of",
    "is_text",
    "is_weights",
    "read_folder",
    "read_safetensors",
    "read_torch_file",
    "shard_names",
    "texts_bytes",
    "torch_file_of",
]
