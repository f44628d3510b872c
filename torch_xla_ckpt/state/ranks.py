"""State that each rank has of its own, under keys that have the rank in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

logger = logging.getLogger(__name__)

Resize = Literal["error", "warn"]
_RANK = re.compile(r"rank(\d+)")


class RankState(dict[str, Any]):
    """One rank's state in a state dict: ``{"rank3": state}``. At load, the other ranks' state is not requested.

    Args:
        state: this rank's.
        rank: its number.
        ranks: how many there are now.
        resize: what to do if the checkpoint was saved by another number of ranks.

    Attributes:
        lacking: set by a load: whether the checkpoint had nothing for this rank.
    """

    def __init__(self, state: Any, rank: int, ranks: int, resize: Resize):
        super().__init__({f"rank{rank}": state})
        self.rank = rank
        self.ranks = ranks
        self.resize = resize
        self.lacking = False

    @property
    def own(self) -> str:
        """The key of this rank's state."""
        return f"rank{self.rank}"

    def of_others(self, below: str) -> bool:
        """Whether the first element of a key below this state names another rank."""
        return bool(_RANK.fullmatch(below)) and below != self.own

    def misfit(self, key: str, saved: Iterable[str]) -> tuple[str, str] | None:
        """Compare the ranks with those of a checkpoint; None if they fit, or ``resize`` is "warn".

        Args:
            key: of this state.
            saved: the checkpoint's elements below the key.

        Returns:
            What the target and the checkpoint have.
        """
        found = list(saved)
        ranks = sorted({int(match[1]) for element in found if (match := _RANK.fullmatch(element))})
        self.lacking = self.rank not in ranks
        if not self.lacking and ranks[-1] < self.ranks:
            return None
        has = f"the state of {len(ranks)} ranks ({_shown(ranks)})" if ranks else "no state of single ranks"
        if found and not ranks:
            has = "one state for all ranks: load it without PerRank"
        if self.resize == "error":
            return f"the state of rank {self.rank} of {self.ranks}", has
        logger.warning(
            "%s: the checkpoint has %s, and there are %s ranks now. Rank %s %s",
            key,
            has,
            self.ranks,
            self.rank,
            "keeps what it has" if self.lacking else "takes its own; what belongs to the others is not loaded",
        )
        return None


def misfits(
    state_dict: Mapping[Any, Any], saved: Iterable[str], asked: Callable[[str], bool]
) -> dict[str, tuple[str, str]]:
    """States of single ranks that a checkpoint was saved for another number of ranks; by key.

    Args:
        state_dict: the target.
        saved: keys of the checkpoint, by the names that they have in the target.
        asked: whether a key is to be loaded.
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
