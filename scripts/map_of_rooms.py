"""Write the map of rooms in docs/how-it-works.md: every module with the first line of its docstring.

    python3 scripts/map_of_rooms.py

The rooms come in the order of the layers in pyproject.toml, from the top down. A test fails if the map is out of date.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_xla_ckpt"
PAGE = ROOT / "docs" / "how-it-works.md"
BEGIN, END = "<!-- map: written by scripts/map_of_rooms.py -->\n", "<!-- end of the map -->\n"


def rooms() -> list[str]:
    """Return the names of all rooms and loose modules, from the top layer down."""
    (layers,) = re.findall(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL | re.M)
    return re.findall(r"\w+", layers)


def subject(module: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8")))
    if not docstring:
        raise SystemExit(f"{module.relative_to(ROOT)} has no docstring, so the map cannot say what the module is for.")
    return docstring.splitlines()[0]


def lines() -> Iterator[str]:
    """Yield the lines of the map."""
    for room in rooms():
        folder = PACKAGE / room
        if not folder.is_dir():
            yield f"- **`{room}.py`**: {subject(folder.with_suffix('.py'))}"
            continue
        yield f"- **`{room}/`**: {subject(folder / '__init__.py')}"
        for module in sorted(folder.rglob("*.py")):
            if module != folder / "__init__.py":
                name = module.relative_to(folder)
                shown = f"{name.parent}/" if name.name == "__init__.py" else str(name)
                yield f"  - `{shown}`: {subject(module)}"


def page() -> str:
    """Return docs/how-it-works.md with an up-to-date map."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
