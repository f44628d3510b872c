"""Tied weights: tensors under two names, of which files of models hold one copy."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from typing import Any

from torch_xla_ckpt.exchange.layout import OutTensor

logger = logging.getLogger(__name__)

Pair = tuple[str, str]

# Names that models of transformers tie to their input embeddings, and that their files leave out. Equal values alone do
# not make a tie: experts may be copies of one layer, and norms begin as ones.
_USUAL = (
    r"(^|\.)(lm_head|embed_out|proj_out|generator_lm_head|output_projection)\.weight$",
    r"(^|\.)(lm_head|predictions)\.decoder\.weight$",
    r"(^|\.)(encoder|decoder)\.embed_tokens\.weight$",
)
_EMBEDDING = re.compile("emb|wte|shared")


class Ties:
    """The search for tied weights.

    Args:
        tensors: the tensors to write.
        patterns: patterns of the names that the model ties and leaves out of its files. None if there is no model:
            then the usual names are taken, and their twin must be an embedding by its name.
    """

    def __init__(self, tensors: Sequence[OutTensor], patterns: Sequence[str] | None):
        self._is_known = patterns is not None
        patterns = _USUAL if patterns is None else patterns
        self._candidates = [one for one in tensors if any(re.search(pattern, one.name) for pattern in patterns)]
        names = {one.name for one in self._candidates}
        self._others = [one for one in tensors if one.name not in names]

    def pairs(self) -> list[tuple[OutTensor, OutTensor]]:
        """Return the pairs of tensors whose bytes must be compared: a name that may be left out, and its twin."""
        return [
            (one, other)
            for one in self._candidates
            for other in (*self._others, *self._candidates)
            if other.name != one.name
            and (other.shape, other.saved) == (one.shape, one.saved)
            and (self._is_known or _EMBEDDING.search(other.name))
        ]

    def found(self, equal: Collection[Pair]) -> dict[str, str]:
        """Return the names to leave out, with the name of the copy that is written.

        Args:
            equal: the pairs that have the same bytes, by name.
        """
        kept = [one.name for one in self._others]
        ties: dict[str, str] = {}
        for one in self._candidates:
            twin = next((name for name in kept if (one.name, name) in equal), None)
            if twin is not None:
                ties[one.name] = twin
                continue
            if self._is_known and any(pair[0] is one for pair in self.pairs()):
                logger.warning(
                    "the model ties %s to another tensor, but no other tensor has its values and its sharding. It is "
                    "written by itself, and transformers ignores it when it ties the weights again. On XLA devices, "
                    "call model.tie_weights() after model.to(device)",
                    one.name,
                )
            kept.append(one.name)
        return ties


def patterns_of(model: Any) -> tuple[str, ...] | None:
    """Return patterns of the names that a model ties and leaves out; None if the object is no such model."""
    if not hasattr(model, "_tied_weights_keys"):
        return None
    if getattr(getattr(model, "config", None), "tie_word_embeddings", True) is False:
        return ()
    return tuple(model._tied_weights_keys or ())
