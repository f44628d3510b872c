"""Ranks that load together and read each byte from the store once: who reads what, and how it gets to the others.

``needs`` holds the byte ranges that one rank needs. ``assignment`` chooses a reader for each range that several ranks
need, and an order in which no rank can wait for ever. ``exchange`` passes the bytes on over gloo. ``cooperation`` is
the agreement of the ranks to do so for one load.

Nothing in this room opens a file or knows a checkpoint's format.
"""

from torch_xla_ckpt.cooperation.assignment import assign
from torch_xla_ckpt.cooperation.cooperation import Cooperation, agree
from torch_xla_ckpt.cooperation.exchange import Exchange, RoundOfMessages
from torch_xla_ckpt.cooperation.needs import Needs, Parcel, Share

__all__ = ["Cooperation", "Exchange", "Needs", "Parcel", "RoundOfMessages", "Share", "agree", "assign"]
