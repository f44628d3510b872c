"""Reports of what a save or a load did: plain values, which import no other room."""

from torch_xla_ckpt.reports.export import ExportReport
from torch_xla_ckpt.reports.load import STATUSES, LoadReport, Outcome
from torch_xla_ckpt.reports.requests import RequestCounts
from torch_xla_ckpt.reports.save import (
    BEGIN,
    CHECKSUM,
    COMMIT,
    END,
    FETCH,
    LOCK,
    PACK,
    RECORDS,
    SERIALIZE,
    STORAGE,
    WRITE,
    SaveReport,
)
from torch_xla_ckpt.reports.sizes import format_bytes
from torch_xla_ckpt.reports.timeline import Span, Tally, Timeline, seconds_of

__all__ = [
    "BEGIN",
    "CHECKSUM",
    "COMMIT",
    "END",
    "FETCH",
    "LOCK",
    "PACK",
    "RECORDS",
    "SERIALIZE",
    "STATUSES",
    "STORAGE",
    "WRITE",
    "ExportReport",
    "LoadReport",
    "Outcome",
    "RequestCounts",
    "SaveReport",
    "Span",
    "Tally",
    "Timeline",
    "format_bytes",
    "seconds_of",
]
