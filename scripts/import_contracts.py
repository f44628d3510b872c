"""A contract for import-linter: a room is imported through its ``__init__`` only."""

import importlib
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output
from importlinter.domain import fields


class DoorsContract(Contract):
    """No module imports a module inside another room, unless the room's ``__all__`` lists that module.

    Options:
        root: the name of the package whose subpackages are the rooms.
    """

    root = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        broken = []
        for importer in sorted(graph.modules):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                room = ".".join(imported.split(".")[:2])
                if imported != room and not f"{importer}.".startswith(f"{room}.") and not _is_exported(room, imported):
                    broken.append((importer, imported))
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            room = ".".join(imported.split(".")[:2])
            output.print_error(f"{importer} imports {imported}. Import from {room}, and export the name there")


def _is_exported(room: str, module: str) -> bool:
    names: Any = getattr(importlib.import_module(room), "__all__", ())
    return module.removeprefix(f"{room}.") in names
