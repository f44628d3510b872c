"""State of single ranks, saved under keys with the rank in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

logger = logging.getLogger(__name__)

Resize = Literal["error", "warn"]
_RANK = re.compile(r"rank(\d+)")


class RankState(dict[str, Any]):
    """The state of one rank in a state dict: ``{"rank3": state}``. A load does not request the other ranks' state.

    Args:
        state: the state of this rank.
        rank: the number of this rank.
        ranks: the world size.
        resize: what to do if the checkpoint was saved with another world size; see ``PerRank``.

    Attributes:
        lacking: whether the checkpoint has no state for this rank. Set by a load.
    """

    def __init__(self, state: Any, rank: int, ranks: int, resize: Resize):
        super().__init__({f"rank{rank}": state})
        self.rank = rank
        self.ranks = ranks
        self.resize = resize
        self.lacking = False

    @property
    def own(self) -> str:
        """The key of this rank's state: "rank3", for example."""
        return f"rank{self.rank}"

    def of_others(self, below: str) -> bool:
        """Whether the first element of a key below this state names another rank."""
        return bool(_RANK.fullmatch(below)) and below != self.own

    def misfit(self, key: str, saved: Iterable[str]) -> tuple[str, str] | None:
        """Compare the world size with that of a checkpoint.

        Args:
            key: key of this state in the state dict.
            saved: the elements that follow this key in the checkpoint's keys.

        Returns:
            Descriptions of the target and of the checkpoint; None if they fit, or if ``resize`` is "warn".
        """
        found = list(saved)
        ranks = sorted({int(match[1]) for element in found if (match := _RANK.fullmatch(element))})
        self.lacking = self.rank not in ranks
        if not self.lacking and ranks[-1] < self.ranks:
            return None
        checkpoint = f"the state of {len(ranks)} ranks ({_shown(ranks)})" if ranks else "no state of single ranks"
        if found and not ranks:
            checkpoint = "one state for all ranks: load it without PerRank"
        if self.resize == "error":
            return f"the state of rank {self.rank} of {self.ranks}", checkpoint
        logger.warning(
            "%s: the checkpoint has %s, and there are %s ranks now. Rank %s %s",
            key,
            checkpoint,
            self.ranks,
            self.rank,
            "keeps what it has" if self.lacking else "loads its own state; the state of other ranks is not loaded",
        )
        return None


def misfits(
    state_dict: Mapping[Any, Any], saved: Iterable[str], asked: Callable[[str], bool]
) -> dict[str, tuple[str, str]]:
    """Find the states of single ranks that were saved with another world size.

    Args:
        state_dict: the target.
        saved: keys of the checkpoint, under their names in the target.
        asked: returns whether a key is to be loaded.

    Returns:
        For each such key, descriptions of the target and of the checkpoint.
    """
    own = {str(key): value for key, value in state_dict.items() if isinstance(value, RankState)}
    if not own:
        return {}
    below: dict[str, list[str]] = {key: [] for key in own}
    wanted = {key: asked(key) for key in own}
    for name in saved:
        for key in own:
            if name.startswith(f"{key}."):
                below[key].append(name[len(key) + 1 :].partition(".")[0])
                wanted[key] = wanted[key] or asked(name)
            elif name == key:
                below[key].append("")
    found = {key: state.misfit(key, below[key]) for key, state in own.items() if wanted[key]}
    return {key: misfit for key, misfit in found.items() if misfit is not None}


def _shown(ranks: list[int]) -> str:
    whole = ranks == list(range(len(ranks)))
    return f"0 to {ranks[-1]}" if whole and len(ranks) > 2 else ", ".join(map(str, ranks))
