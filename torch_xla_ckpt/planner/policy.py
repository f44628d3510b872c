"""Policies of a load: what to do with keys that differ between target and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch_xla_ckpt.errors import CheckpointError

Missing = Literal["error", "warn", "keep"]
Unexpected = Literal["restore", "warn", "error", "ignore"]
Dtype = Literal["cast", "error"]
Shape = Literal["error", "keep"]
NewNames = str | Sequence[str] | None
Rename = Mapping[str, str | Sequence[str]] | Callable[[str], NewNames]

# Elements that wrappers add to parameter names: FSDPv2, torch.compile, DataParallel or DistributedDataParallel, and
# activation checkpointing.
_WRAPPERS = frozenset({"_orig_module", "_orig_mod", "module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Policy:
    """What to do with keys that differ between target and checkpoint. ``SPMDLoadPlanner`` explains the options.

    Raises:
        ValueError: an option has an unknown value.
    """

    missing: Missing = "error"
    unexpected: Unexpected = "restore"
    dtype: Dtype = "cast"
    rename: Rename | None = None
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shape: Shape = "error"

    def __post_init__(self) -> None:
        options = (("missing", Missing), ("unexpected", Unexpected), ("dtype", Dtype), ("shape", Shape))
        for name, choices in options:
            value, allowed = getattr(self, name), get_args(choices)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")

    def asks_for(self, key: str) -> bool:
        """Whether ``only`` and ``exclude`` select the key."""
        if not self.only and not self.exclude:
            return True
        chosen = not self.only or any(fnmatchcase(key, pattern) for pattern in self.only)
        return chosen and not any(fnmatchcase(key, pattern) for pattern in self.exclude)

    def require_use_of_patterns(self, keys: Collection[str]) -> None:
        """Check that every pattern matches a key: a pattern that matches none is misspelt.

        Args:
            keys: all keys of the target and of the checkpoint.

        Raises:
            CheckpointError: naming the patterns that match no key.
        """
        unused = [p for p in (*self.only, *self.exclude) if not any(fnmatchcase(key, p) for key in keys)]
        if unused:
            raise CheckpointError(
                f"no key of the checkpoint or the target matches {', '.join(map(repr, unused))}. Nothing was loaded. "
                "Check the spelling. Patterns of only= and exclude= are globs of whole keys, such as 'model.*'"
            )

    def renamed(self, saved: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Apply ``rename`` to the saved keys.

        Args:
            saved: keys of the checkpoint.

        Returns:
            The saved key for each new name, and the saved keys that no longer fill a target key of their old name.

        Raises:
            CheckpointError: ``rename`` names a key that the checkpoint lacks, or gives two keys the same new name.
        """
        if self.rename is None:
            return {}, set()
        saved = list(saved)
        if isinstance(self.rename, Mapping):
            absent = sorted(set(self.rename) - set(saved))
            if absent:
                raise CheckpointError(
                    f"rename= names keys that the checkpoint lacks: {', '.join(absent)}. Nothing was loaded. "
                    "Map keys of the checkpoint to keys of the target"
                )
            new_names = [(key, self.rename[key]) for key in saved if key in self.rename]
        else:
            new_names = [(key, new) for key in saved if (new := self.rename(key)) is not None]
        sources: dict[str, str] = {}
        moved: set[str] = set()
        for key, new in new_names:
            names = (new,) if isinstance(new, str) else tuple(new)
            if key not in names:
                moved.add(key)
            for name in names:
                if name in sources:
                    raise CheckpointError(
                        f"rename= gives {name!r} to both {sources[name]!r} and {key!r}. Nothing was loaded. Give every "
                        "key of the checkpoint a name of its own"
                    )
                sources[name] = key
        return sources, moved


def pair_wrapped_keys(target: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Match keys that differ only in the prefixes of wrappers, such as ``module`` or ``_orig_mod``.

    Args:
        target: keys of the target.
        saved: keys of the checkpoint.

    Returns:
        For each matched target key, the saved key. A name that several keys of one side share is left out.
    """
    targets, sources = by_plain_name(target), by_plain_name(saved)
    return {
        keys[0]: sources[name][0]
        for name, keys in targets.items()
        if len(keys) == 1 and len(sources.get(name, ())) == 1
    }


def by_plain_name(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return keys by their names without the elements that wrappers add."""
    named: dict[str, list[str]] = {}
    for key in keys:
        named.setdefault(without_wrappers(key), []).append(key)
    return named


def without_wrappers(key: str) -> str:
    """Return a key without the elements that wrappers add."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)
