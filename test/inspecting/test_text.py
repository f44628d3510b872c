"""Names from files never reach a terminal as control characters."""

import pytest

from torch_xla_ckpt.inspecting import shown
from torch_xla_ckpt.inspecting.text import table


@pytest.mark.parametrize(
    "bad", ["\x1b[2J", "a\nb", "\r", "\t", "\x07", "\u202e", "\u2028", "\x9b", "\udc80", "\0", "\u200b"]
)
def test_invisible_characters_are_written_as_escapes(bad):
    assert shown(f"x{bad}y").isprintable()
    assert shown(f"x{bad}y") != f"x{bad}y"


def test_letters_stay():
    assert shown("größe.層 weight") == "größe.層 weight"


def test_a_cell_with_a_line_break_does_not_make_a_line():
    assert len(table(("a", "b"), [("1\n2", "3"), ("4", "5\x1b[0m")]).splitlines()) == 3
