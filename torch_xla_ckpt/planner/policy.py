"""What a load does with keys that do not simply fit."""

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

# Elements that wrappers put into the names of a module's parameters: FSDPv2, torch.compile, and DataParallel and its
# kin.
_WRAPPERS = frozenset({"_orig_module", "_orig_mod", "module"})


@dataclass(frozen=True)
class Policy:
    """What a load does with keys that do not simply fit. See ``SPMDLoadPlanner``.

    Raises:
        ValueError: an option has a value that there is not.
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
        """Whether ``only`` and ``exclude`` let the key through."""
        if not self.only and not self.exclude:
            return True
        chosen = not self.only or any(fnmatchcase(key, pattern) for pattern in self.only)
        return chosen and not any(fnmatchcase(key, pattern) for pattern in self.exclude)

    def require_use_of_patterns(self, keys: Collection[str]) -> None:
        """Refuse patterns that match no key at all: they are misspelt.

        Raises:
            CheckpointError: naming them.
        """
        idle = [p for p in (*self.only, *self.exclude) if not any(fnmatchcase(key, p) for key in keys)]
        if idle:
            raise CheckpointError(
                f"no key of the checkpoint and the target matches {', '.join(map(repr, idle))}. Nothing was loaded. "
                "Patterns of only= and exclude= are globs for whole keys, such as 'model.*'"
            )

    def renamed(self, saved: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """For each target key that ``rename`` speaks of, its saved key; and the saved keys that lost their own name.

        Raises:
            CheckpointError: a saved key is not there, or two have the same new name.
        """
        if self.rename is None:
            return {}, set()
        saved = list(saved)
        if isinstance(self.rename, Mapping):
            gone = sorted(set(self.rename) - set(saved))
            if gone:
                raise CheckpointError(
                    f"rename= names keys that the checkpoint lacks: {', '.join(gone)}. Nothing was loaded. It maps "
                    "keys of the checkpoint to keys of the target"
                )
            news = [(key, self.rename[key]) for key in saved if key in self.rename]
        else:
            news = [(key, new) for key in saved if (new := self.rename(key)) is not None]
        sources: dict[str, str] = {}
        moved: set[str] = set()
        for key, new in news:
            names = (new,) if isinstance(new, str) else tuple(new)
            if key not in names:
                moved.add(key)
            for name in names:
                if name in sources:
                    raise CheckpointError(
                        f"rename= gives {name!r} to both {sources[name]!r} and {key!r}. Nothing was loaded. Give each "
                        "key of the target one of the checkpoint's"
                    )
                sources[name] = key
        return sources, moved


def unwrapped(target: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Pairs of a target key and a saved key that differ only in what wrappers put into names.

    Only where there is one of each.
    """
    sides: list[dict[str, list[str]]] = []
    for keys in (target, saved):
        plain: dict[str, list[str]] = {}
        for key in keys:
            plain.setdefault(_plain(key), []).append(key)
        sides.append(plain)
    targets, sources = sides
    return {
        keys[0]: sources[name][0]
        for name, keys in targets.items()
        if len(keys) == 1 and len(sources.get(name, ())) == 1
    }


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)
