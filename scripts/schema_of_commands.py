"""Write docs/xc.schema.json: the JSON Schema of what each command prints with ``--json``.

    PYTHONPATH=$PWD "$(scripts/env)" scripts/schema_of_commands.py

The schema is made from the dataclasses that the commands return. A test fails if it is out of date, so that no field
changes unnoticed. A change that breaks readers needs a new ``VERSION`` in torch_xla_ckpt/cli/output.py.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import types
import typing
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.output import ANSWERS, VERSION
from torch_xla_ckpt.reports import ExportReport

SCHEMA = Path(__file__).parents[1] / "docs" / "xc.schema.json"
RESULTS: dict[str, tuple[type, ...]] = {
    "ls": (inspecting.Contents, inspecting.RunContents),
    "show": (inspecting.TensorView, inspecting.ObjectView),
    "verify": (inspecting.Checks,),
    "diff": (inspecting.Difference,),
    "explain": (inspecting.Explanation,),
    "convert": (inspecting.Conversion,),
    "export": (ExportReport,),
    "prune": (inspecting.Pruning,),
    "report": (inspecting.Report,),
}
"""The types of the results of each command."""
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    type(None): {"type": "null"},
    float: {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
    torch.dtype: {"type": "string"},
    datetime: {"type": "string", "format": "date-time"},
    Any: {},
}


def schema() -> dict[str, Any]:
    """Return the schema."""
    known: dict[str, Any] = {}
    commands = []
    for command, results in RESULTS.items():
        for result in results:
            made = _object(result, known)
            made["properties"] = {"command": {"const": command}, "version": {"const": VERSION}, **made["properties"]}
            made["required"] = ["command", "version", *made["required"]]
            commands.append(made)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What xc prints with --json",
        "anyOf": commands,
        "$defs": dict(sorted(known.items())),
    }


def _object(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass or a named tuple, and add those of its parts to ``known``."""
    hints = typing.get_type_hints(kind)
    is_dataclass = dataclasses.is_dataclass(kind)
    names = [field.name for field in dataclasses.fields(kind)] if is_dataclass else list(kind._fields)
    answers = [name for name in ANSWERS if is_dataclass and hasattr(kind, name)]
    properties = {name: dict(_PLAIN[bool]) for name in answers}
    properties |= {name: _schema(hints[name], known) for name in names}
    return {
        "title": kind.__name__,
        "type": "object",
        "properties": properties,
        "required": [*answers, *names],
        "additionalProperties": False,
    }


def _schema(hint: Any, known: dict[str, Any]) -> dict[str, Any]:
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(one, known) for one in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is collections.abc.Mapping:
        return {"type": "object", "additionalProperties": _schema(arguments[1], known)}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _schema(arguments[0], known)}
    if origin is tuple:
        items = [_schema(one, known) for one in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        if hint.__name__ not in known:
            known[hint.__name__] = {}  # of a type that contains itself
            known[hint.__name__] = _object(hint, known)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    raise TypeError(f"no JSON is defined for {hint}")


def text() -> str:
    """Return the text of the file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), "utf-8")
