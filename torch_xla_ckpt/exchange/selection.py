"""Which tensors an export writes, and under which names."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import METADATA, is_text
from torch_xla_ckpt.state import Path

logger = logging.getLogger(__name__)

Rename = Mapping[str, str] | Callable[[str], str | None]

# Elements that wrappers add anywhere in a name: FSDPv2, torch.compile and activation checkpointing.
_WRAPPERS = frozenset({"_orig_module", "_orig_mod", "_checkpoint_wrapped_module"})
_PARALLEL = "module."  # what DataParallel and DistributedDataParallel put in front of every name
_MODEL_KEYS = ("model", "state_dict")  # where programs keep the model that they train, ours and Lightning's
_EXTRA = "_extra_state"  # the end of the keys of a module's own objects, which belong to the model
_SHOWN = 10  # keys that an error names


@dataclass(frozen=True)
class Entry:
    """A value of the source.

    Args:
        path: the elements of its key.
        is_tensor: whether it is a tensor.
    """

    path: Path
    is_tensor: bool


@dataclass(frozen=True)
class Selection:
    """The values that an export selects.

    Args:
        tensors: the key in the source of each tensor, by its new name, in the source's order.
        objects: keys of selected values that are no tensors.
        unselected: keys of the tensors that are not selected, in the source's order.
        found: the key of the model, if it was found without ``key=``. None if the caller passed the key.
        beside: number of tensors beside the model that was found, by the first element of their keys. Tensors of
            optimizers do not count, nor do tensors that ``only=`` and ``exclude=`` leave out.
    """

    tensors: Mapping[str, str]
    objects: tuple[str, ...]
    unselected: tuple[str, ...]
    found: str | None
    beside: Mapping[str, int]

    def warn_of_rest(self) -> None:
        """Log a warning if there are tensors beside the model that was found."""
        if self.beside:
            logger.warning(
                "no key= was passed, and the export has taken %r for the model. Tensors beside it are not written: %s. "
                'To write them, pass key= with their key, or key="" for the whole source',
                self.found,
                _counted(self.beside),
            )


def _counted(numbers: Mapping[str, int]) -> str:
    """Return keys with their numbers of tensors as text, the first ten of them."""
    shown = [f"{key} ({number:,} {'tensor' if number == 1 else 'tensors'})" for key, number in numbers.items()]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def select(
    entries: Mapping[str, Entry], key: str | None, rename: Rename | None, only: Sequence[str], exclude: Sequence[str]
) -> Selection:
    """Select the tensors of one model, and name them as the model does.

    Args:
        entries: all values of the source, by key.
        key: the key of the model in the source; "" for the whole source; None to find it.
        rename: new names for names of the model.
        only, exclude: globs of the source's keys.

    Raises:
        CheckpointError: the key cannot be told, or is not in the source; a pattern or a name of ``rename`` fits
            nothing; two tensors get one name; or there is no tensor.
    """
    model = _find_model(entries) if key is None else _Model(_required(key, entries))
    start = f"{model.key}." if model.key else ""
    below = [one for one in entries if one.startswith(start)]
    _require_use(only, exclude, below)
    chosen = [one for one in below if _is_asked(one, only, exclude)]
    tensors = [one for one in chosen if entries[one].is_tensor]
    if not tensors:
        raise CheckpointError(
            f"there is no tensor to export under {model.key!r}. The source has: {_tops(entries)}. Nothing was written. "
            "Pass key= with the key that holds the model"
        )
    names = _without_wrappers([one[len(start) :] for one in tensors])
    taken = set(tensors)
    beside = [one.path for name, one in entries.items() if one.is_tensor and not name.startswith(start)]
    return Selection(
        tensors=_unique(_renamed(names, rename), tensors),
        objects=tuple(one for one in chosen if not entries[one].is_tensor),
        unselected=tuple(name for name, one in entries.items() if one.is_tensor and name not in taken),
        found=model.key if key is None else None,
        beside=Counter(str(path[0]) for path in beside if not model.is_of_optimizer(path)) if key is None else {},
    )


@dataclass(frozen=True)
class _Model:
    """Where the model of a source lies.

    Args:
        key: its key; "" if the whole source is the model.
        optimizers: the paths of optimizers' states beside it. Default: none.
    """

    key: str
    optimizers: frozenset[Path] = frozenset()

    def is_of_optimizer(self, path: Path) -> bool:
        """Whether a path lies in an optimizer's state beside the model."""
        return any(path[:length] in self.optimizers for length in range(1, len(path) + 1))


def _find_model(entries: Mapping[str, Entry]) -> _Model:
    """Return where the only model of the source lies.

    Raises:
        CheckpointError: the source may have several models.
    """
    inside = [(entry.path, entry.is_tensor) for entry in entries.values()]
    found: Path = ()
    optimizers: set[Path] = set()
    while any(is_tensor and len(path) > 1 for path, is_tensor in inside):
        tops = list(dict.fromkeys(path[0] for path, is_tensor in inside if is_tensor and len(path) > 1))
        below = {top: [(path[1:], is_tensor) for path, is_tensor in inside if path[:1] == (top,)] for top in tops}
        models = [top for top in tops if not _is_optimizer([path for path, _ in below[top]])]
        optimizers.update((*found, top) for top in tops if top not in models)
        is_training = any(_is_of_optimizer(element) for path, _ in inside for element in path)
        named = [top for top in models if top in _MODEL_KEYS]
        plain = [path[0] for path, is_tensor in inside if is_tensor and len(path) == 1]
        if len(named) != 1 and plain and not is_training:
            # A model whose state dict is nested, such as {"encoder": {...}, "head": tensor}. Objects of its modules
            # belong to it. Others, such as a step, leave it open whether the tensors beside the dict are the model's.
            if any(len(path) == 1 and not is_tensor and not _is_extra(path[0]) for path, is_tensor in inside):
                raise _undecided([*tops, *plain])
            break
        likely = models if len(models) == 1 else named
        if len(likely) != 1:
            raise _undecided(models or tops)
        found = (*found, likely[0])
        inside = below[likely[0]]
        if not any(_is_of_optimizer(element) for path, _ in inside for element in path):
            break  # otherwise a container of model and optimizer, such as "app" in DCP's tutorial
    return _Model(".".join(map(str, found)), frozenset(optimizers))


def _undecided(candidates: Sequence[object]) -> CheckpointError:
    return CheckpointError(
        f"cannot tell which key holds the model. Candidates: {_listed(candidates)}. Nothing was written. Pass one of "
        'them as key=, or key="" to export everything'
    )


def _is_extra(element: object) -> bool:
    return str(element).rpartition(".")[2] == _EXTRA


def _is_optimizer(paths: Iterable[Path]) -> bool:
    """Whether values below one key are an optimizer's state, or a list of such states."""
    return any(
        _is_of_optimizer(path[1] if type(path[0]) is int and len(path) > 1 else path[0]) for path in paths if path
    )


def _is_of_optimizer(element: object) -> bool:
    return str(element).partition(".")[0] == "param_groups"


def _required(key: str, entries: Mapping[str, Entry]) -> str:
    if key and not any(one.startswith(f"{key}.") for one in entries):
        raise CheckpointError(
            f"the source has nothing under key={key!r}. It has: {_tops(entries)}. Nothing was written"
        )
    return key


def _tops(entries: Mapping[str, Entry]) -> str:
    return _listed(list(dict.fromkeys(str(entry.path[0]) for entry in entries.values()))) or "nothing"


def _listed(keys: Sequence[object]) -> str:
    return ", ".join(repr(str(key)) for key in keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")


def _is_asked(key: str, only: Sequence[str], exclude: Sequence[str]) -> bool:
    is_chosen = not only or any(fnmatchcase(key, pattern) for pattern in only)
    return is_chosen and not any(fnmatchcase(key, pattern) for pattern in exclude)


def _require_use(only: Sequence[str], exclude: Sequence[str], keys: Iterable[str]) -> None:
    keys = list(keys)
    unused = [pattern for pattern in (*only, *exclude) if not any(fnmatchcase(key, pattern) for key in keys)]
    if unused:
        raise CheckpointError(
            f"no key of the source matches {', '.join(map(repr, unused))}. Nothing was written. Patterns of only= and "
            "exclude= are globs of whole keys, such as 'model.*.weight'"
        )


def _without_wrappers(names: Sequence[str]) -> list[str]:
    plain = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    while plain and all(name.startswith(_PARALLEL) and len(name) > len(_PARALLEL) for name in plain):
        plain = [name[len(_PARALLEL) :] for name in plain]
    return plain


def _renamed(names: Sequence[str], rename: Rename | None) -> list[str]:
    if rename is None:
        return list(names)
    if isinstance(rename, Mapping):
        if absent := sorted(set(rename) - set(names)):
            raise CheckpointError(
                f"rename= names tensors that the model lacks: {', '.join(absent[:_SHOWN])}. Nothing was written. Map "
                "names of the model, without key= and wrappers, to new names"
            )
        return [rename.get(name, name) for name in names]
    new = [(name, rename(name)) for name in names]
    return [name if other is None else other for name, other in new]


def _unique(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, key in zip(names, keys):
        if type(name) is not str or not name or name == METADATA or not is_text(name):
            raise CheckpointError(f"{key!r} cannot get the name {name!r}. Nothing was written. Correct rename=")
        if name in found:
            raise CheckpointError(
                f"{found[name]!r} and {key!r} would both get the name {name!r}. Nothing was written. Pass rename=, or "
                "exclude= one of them"
            )
        found[name] = key
    return found
