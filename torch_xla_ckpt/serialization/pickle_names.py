"""The names of classes and functions in a pickle, found without executing it."""

from __future__ import annotations

import _compat_pickle
import copyreg
import pickletools
import re
from collections.abc import Iterator

_GLOBAL = re.compile(rb"c([^\n]*)\n([^\n]*)\n")
_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
# Bytes of the length before an argument, by pickletools' code for the kind of length.
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def names_at_most(data: bytes) -> set[str]:
    """Return a superset of ``names_in`` for a pickle of protocol 2, in a fraction of the time."""
    return {".".join(python3_name(*map(_decoded, pair))) for pair in _GLOBAL.findall(data)}


def names_in(data: bytes) -> set[str]:
    """Return the qualified names in a pickle of any protocol, up to the first byte that is no pickle."""
    found: set[str] = set()
    strings: list[bytes] = []
    try:
        for name, argument in _opcodes(data):
            if name in ("GLOBAL", "INST"):
                found.add(".".join(python3_name(*argument.decode().split("\n")[:2])))
            elif name == "STACK_GLOBAL":
                found.add(b".".join(strings[-2:]).decode())
            elif name.startswith("EXT"):  # a number that the program has registered for a name
                code = int.from_bytes(argument, "little")
                registered = getattr(copyreg, "_inverted_registry", {})
                found.add(".".join(registered.get(code, ("copyreg", f"extension {code}"))))
            elif "UNICODE" in name:
                strings.append(argument)
    except (ValueError, IndexError):
        pass  # the pickle is damaged from here on
    return found


def python3_name(module: str, name: str) -> tuple[str, str]:
    """Return module and name as Python 3 has them. Protocol 2 uses the names of Python 2."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _decoded(name: bytes) -> str:
    return name.decode(errors="replace")


def _opcodes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield each opcode's name and the undecoded bytes of its argument."""
    at = 0
    while at < len(data):
        op = _OPCODES.get(data[at])
        if op is None:
            return
        at += 1
        size = 0 if op.arg is None else op.arg.n
        if size == pickletools.UP_TO_NEWLINE:
            lines = 2 if op.name in ("GLOBAL", "INST") else 1
            end = at
            for _ in range(lines):
                end = data.index(b"\n", end) + 1
            size = end - at
        elif size < 0:  # the argument begins with its length
            width = _LENGTH_BYTES[size]
            size = int.from_bytes(data[at : at + width], "little")
            at += width
        yield op.name, data[at : at + size]
        at += size
