"""TODO"""

from torch_xla_ckpt.reports.load import STATUSES, LoadReport, Outcome
from torch_xla_ckpt.reports.sizes import format_bytes
from torch_xla_ckpt.reports.timeline import Span, Timeline

__all__ = ["STATUSES", "LoadReport", "Outcome", "Span", "Timeline", "format_bytes"]
