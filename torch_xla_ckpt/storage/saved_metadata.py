"""The metadata that a save returns: DCP's ``Metadata``, printed as one line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.reports import SaveReport, format_bytes


class SavedMetadata(Metadata):
    """DCP's ``Metadata`` of a committed checkpoint, whose ``repr`` is one line.

    Pickles and copies are plain ``Metadata``, so stock PyTorch reads them without this package.

    Attributes:
        report: where the time of the save went on this process.
    """

    report: SaveReport | None = None

    def __repr__(self) -> str:
        keys = len(self.state_dict_metadata)
        nbytes = sum(entry.length for entry in (self.storage_data or {}).values())
        seconds = "" if self.report is None else f", saved in {self.report.seconds:.2f} s"
        return f"<Metadata of {keys:,} {'key' if keys == 1 else 'keys'}, {format_bytes(nbytes)}{seconds}>"

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if isinstance(other, Metadata) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return Metadata, _values(self)


def shortened(metadata: Metadata, report: SaveReport) -> Metadata:
    """Let metadata print as one line from now on, and return it.

    DCP returns the object that its planner made, and offers storage no hook to return another one. So the object gets
    another class.

    Args:
        metadata: the metadata of a committed checkpoint. Instances of a subclass of ``Metadata`` are left alone.
        report: where the time of the save went.
    """
    if type(metadata) is Metadata:
        metadata.__class__ = SavedMetadata
    if isinstance(metadata, SavedMetadata):
        metadata.report = report
    return metadata


def plain(metadata: Metadata) -> Metadata:
    """Return metadata as DCP's own class, if it was given the class that prints as one line."""
    return Metadata(*_values(metadata)) if isinstance(metadata, SavedMetadata) else metadata


def _values(metadata: Metadata) -> tuple[Any, ...]:
    return tuple(getattr(metadata, field.name) for field in fields(Metadata))
