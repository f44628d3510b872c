"""The items that this rank was told to write in earlier saves. The coordinator need not send them again.

A rank tells the coordinator the digest of the items that it has. If the coordinator would send exactly these items, it
sends their digest alone. So a coordinator that was restarted, or that has made another plan, sends the items.
"""

from __future__ import annotations

from torch_xla_ckpt import _dcp

_MOST = 2  # items that are kept: a program may save two kinds of states in turn
_kept: list[tuple[bytes, _dcp.SentItems]] = []


def held_items(offers: bytes) -> _dcp.SentItems | None:
    """Return what this rank has written of the offers with this digest; None if that is unknown."""
    return next((items for known, items in list(_kept) if known == offers), None)


def hold_items(offers: bytes, items: _dcp.SentItems) -> None:
    """Keep the items that this rank writes of the offers with this digest. The oldest ones are dropped."""
    _kept[:] = [(offers, items), *(one for one in _kept if one[0] != offers)][:_MOST]
