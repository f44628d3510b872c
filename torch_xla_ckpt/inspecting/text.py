"""Plain text for terminals and pipes: tables, and names from files whose control characters are shown, not obeyed."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def shown(text: object) -> str:
    """Return text in which line breaks, terminal escapes and other invisible characters are written as escapes.

    A key of a checkpoint may hold any character. Printed as it is, it could move the cursor or change the title of the
    window, or look like another line of the output.
    """
    given = str(text)
    if given.isprintable():
        return given
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in given)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return a table as text. The last column is not padded, so that long keys do not widen the table.

    Args:
        head: the names of the columns.
        rows: the cells.
        right: numbers of the columns that are aligned to the right.
    """
    safe = [[shown(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*safe)]
    last = len(head) - 1
    return "\n".join(
        "  ".join(
            cell
            if number == last and number not in right
            else cell.rjust(widths[number])
            if number in right
            else cell.ljust(widths[number])
            for number, cell in enumerate(row)
        ).rstrip()
        for row in safe
    )


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 key", "2 keys"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
