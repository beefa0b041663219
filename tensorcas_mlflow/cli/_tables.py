"""Tables: aligned columns of plain text, or, on a terminal, rows that fit its width."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorcas_mlflow.base import config
from tensorcas_mlflow.cli._output import say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_GAP = "  "
_LEAST_WIDTH = 20
_LEAST_TEXT = 8
"""Least width of a column of text that folds."""


def say_table(rows: Sequence[Sequence[str]], *, right: frozenset[int] | set[int]) -> None:
    """Print a table; its first row is the heading."""
    say_sections([("", rows[1:])], heading=rows[0], right=right)


def say_sections(
    sections: Sequence[tuple[str, Sequence[Sequence[str]]]],
    *,
    heading: Sequence[str] = (),
    right: frozenset[int] | set[int] = frozenset(),
    indent: int = 0,
) -> None:
    """Print rows under titles; the columns of all sections are aligned with each other.

    Args:
        sections: A title and rows each; "" for no title. The cells must be safe for a terminal.
        heading: Titles of the columns, if they have any.
        right: Columns of numbers. They are aligned to the right, and never folded.
        indent: Spaces before each row.
    """
    width = terminal_width()
    lines = plain_lines if width is None else folded_lines
    for line in lines(sections, heading=heading, right=right, indent=indent, width=width or 0):
        say(line)


def terminal_width() -> int | None:
    """Return the width of the terminal of standard output; None if it is none, or only prints characters."""
    if not sys.stdout.isatty() or not config.moves_cursor():
        return None
    return max(shutil.get_terminal_size().columns, _LEAST_WIDTH)


def plain_lines(
    sections: Sequence[tuple[str, Sequence[Sequence[str]]]],
    *,
    heading: Sequence[str] = (),
    right: frozenset[int] | set[int] = frozenset(),
    indent: int = 0,
    width: int = 0,
) -> list[str]:
    """Align rows under titles as plain text of any width, for programs and files."""
    every = [*([heading] if heading else []), *(row for _, rows in sections for row in rows)]
    widths = _widths(every)

    def line_of(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(n) if at in right else cell.ljust(n)
            for at, (cell, n) in enumerate(zip(row, widths, strict=True))
        )
        return (" " * indent + _GAP.join(cells)).rstrip()

    lines = [line_of(heading)] if heading else []
    for title, rows in sections:
        lines += [title] if title else []
        lines += map(line_of, rows)
    return lines


def folded_lines(
    sections: Sequence[tuple[str, Sequence[Sequence[str]]]],
    *,
    heading: Sequence[str] = (),
    right: frozenset[int] | set[int] = frozenset(),
    indent: int = 0,
    width: int,
) -> list[str]:
    """Align rows under titles for a terminal: texts fold to fit its width, and numbers never do.

    Titles are bold and headings are dim, unless NO_COLOR is set.
    """
    # Rich takes some 50 ms to import, which only a terminal waits for.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    every = [*([heading] if heading else []), *(row for _, rows in sections for row in rows)]
    widths = _widths(every)
    gaps = len(_GAP) * (len(widths) - 1)
    fits = indent + sum(widths) + gaps <= width
    # A terminal too narrow for the numbers breaks the lines itself, and shows all of them.
    width = max(width, indent + gaps + sum(n if at in right else min(n, _LEAST_TEXT) for at, n in enumerate(widths)))
    stream = io.StringIO()
    has_styles = config.has_colors()
    console = Console(
        file=stream,
        width=width - indent,
        force_terminal=has_styles,
        color_system="standard" if has_styles else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    lines: list[str] = []
    for at_section, (title, rows) in enumerate(sections):
        if title:
            lines += _printed(console, stream, Text(title, style="bold"))
        table = Table(
            box=None,
            show_header=bool(heading) and at_section == 0,
            header_style="dim",
            pad_edge=False,
            padding=(0, len(_GAP), 0, 0),
        )
        for at, n in enumerate(widths):
            table.add_column(
                Text(heading[at]) if heading else "",
                justify="right" if at in right else "left",
                no_wrap=at in right,
                overflow="crop" if at in right else "fold",
                # Sections keep their columns in line where there is room.
                min_width=n if fits or at in right else None,
            )
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        if rows or table.show_header:
            lines += [f"{' ' * indent}{line}" for line in _printed(console, stream, table)]
    return lines


def _printed(console: Console, stream: io.StringIO, thing: RenderableType) -> list[str]:
    """Return the lines of one thing as the console prints it."""
    stream.seek(0)
    stream.truncate()
    console.print(thing)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
