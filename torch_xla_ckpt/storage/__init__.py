"""Bytes and files: DCP storage that checks what it reads and replaces checkpoints atomically.

This room knows nothing of meshes and devices, and works without torch_xla. Nothing in it runs code from a file.
``docs/format.md`` specifies the files of a checkpoint.
"""

from torch_xla_ckpt.storage import path_lock
from torch_xla_ckpt.storage.absent import steps_of_run
from torch_xla_ckpt.storage.cancellation import Cancellation, is_interrupt
from torch_xla_ckpt.storage.checkpoint_index import read_index, written_by
from torch_xla_ckpt.storage.chunk_bytes import as_bits
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.file_links import followed
from torch_xla_ckpt.storage.file_names import is_checkpoint_file
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.foreign import holds_checkpoint, is_file, read_foreign
from torch_xla_ckpt.storage.lease import Holder
from torch_xla_ckpt.storage.leftover_files import complete_saves, leftovers, mark_deleted
from torch_xla_ckpt.storage.limits import default_threads
from torch_xla_ckpt.storage.listing import ListedKey, Listing, listing_of, read_listing
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, path_mismatch
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.opening import open_reader, open_writer, path_of
from torch_xla_ckpt.storage.progress import OnProgress
from torch_xla_ckpt.storage.read_plan import planned_bytes
from torch_xla_ckpt.storage.reader import ReadStats, ShardReader
from torch_xla_ckpt.storage.stored import Stored, checksum
from torch_xla_ckpt.storage.verify import require_undamaged, verify
from torch_xla_ckpt.storage.verify_report import VerifyReport
from torch_xla_ckpt.storage.writer import ShardWriter
from torch_xla_ckpt.storage.written import Written, written_sizes

__all__ = [
    "REQUEST_TIMEOUT",
    "Cancellation",
    "FileChanged",
    "Holder",
    "ListedKey",
    "Listing",
    "Location",
    "Manifest",
    "OnProgress",
    "PathLike",
    "ReadStats",
    "ShardReader",
    "ShardWriter",
    "Stored",
    "VerifyReport",
    "Written",
    "as_bits",
    "checksum",
    "complete_saves",
    "default_threads",
    "followed",
    "holds_checkpoint",
    "is_checkpoint_file",
    "is_file",
    "is_interrupt",
    "leftovers",
    "listing_of",
    "mark_deleted",
    "open_folder",
    "open_reader",
    "open_writer",
    "path_lock",
    "path_mismatch",
    "path_of",
    "planned_bytes",
    "read_foreign",
    "read_index",
    "read_listing",
    "require_undamaged",
    "steps_of_run",
    "verify",
    "written_by",
    "written_sizes",
]
