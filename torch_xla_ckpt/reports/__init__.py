"""Reports of what a save or a load did: plain values, which import no other room."""

from torch_xla_ckpt.reports.export import ExportReport
from torch_xla_ckpt.reports.load import STATUSES, LoadReport, Outcome
from torch_xla_ckpt.reports.requests import RequestCounts
from torch_xla_ckpt.reports.save import FETCH, LOCK, STORAGE, SaveReport
from torch_xla_ckpt.reports.sizes import format_bytes
from torch_xla_ckpt.reports.timeline import Span, Timeline

__all__ = [
    "FETCH",
    "LOCK",
    "STATUSES",
    "STORAGE",
    "ExportReport",
    "LoadReport",
    "Outcome",
    "RequestCounts",
    "SaveReport",
    "Span",
    "Timeline",
    "format_bytes",
]
