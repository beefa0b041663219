"""Values in a notebook: HTML of tables, lists and folding trees; and tables of Arrow and pandas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MOST_ROWS = 200
"""Of more rows a notebook shows the first."""


class Tabular(ABC):
    """A value with rows: a class defines `to_arrow`, and pandas' table follows."""

    __slots__ = ()

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table; DuckDB, Polars and pandas read it as it is."""

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows of `to_arrow` as a DataFrame."""
        return self.to_arrow().to_pandas()


class PrintedPlan:
    """A plan: a notebook shows the lines of its text, and how to execute it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        heading = f"<b>{escaped(type(self).__name__)}</b>: nothing has changed yet, <code>execute()</code> does it"
        return heading + bullets(str(self).splitlines())


def escaped(text: object) -> str:
    """Return a value's text with the characters of HTML made harmless."""
    from html import escape

    return escape(str(text))


def html_table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = "", n_more: int = 0) -> str:
    """Return a table; the first column is left-aligned, the others are right-aligned.

    Args:
        headings: One for each column; none to omit the row of headings.
        rows: The cells; each is escaped.
        caption: A line above the table; it is escaped.
        n_more: Number of rows that the caller left out.
    """
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="caption-side: top; text-align: left">{escaped(caption)}</caption>')
    if headings:
        lines.append(f"<thead>{_row(headings, 'th')}</thead>")
    lines += ["<tbody>", *(_row(row, "td") for row in rows), "</tbody></table>"]
    if n_more:
        lines.append(f"<p>and {n_more} more: <code>to_pandas()</code> has all of them</p>")
    return "\n".join(lines)


def _row(cells: Sequence[object], tag: str) -> str:
    aligned = (
        f'<{tag} style="text-align: {"right" if at else "left"}">{escaped(cell)}</{tag}>'
        for at, cell in enumerate(cells)
    )
    return f"<tr>{''.join(aligned)}</tr>"


def bullets(lines: Iterable[str]) -> str:
    """Return a list of some lines; each is escaped."""
    return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in lines)}</ul>"


def fold(heading: str, inside: str, *, is_open: bool = False) -> str:
    """Return a part that a click opens and closes.

    Args:
        heading: The line that stays; it is escaped.
        inside: HTML.
        is_open: Whether the part is open at first.
    """
    return f"<details{' open' if is_open else ''}><summary>{escaped(heading)}</summary>{inside}</details>"


def indented(inside: str) -> str:
    """Return HTML one level deeper in a tree."""
    return f'<div style="margin-left: 1.5em">{inside}</div>'


def line(text: object) -> str:
    """Return one line of text, escaped."""
    return f"<div>{escaped(text)}</div>"


def table_of_records(records: Sequence[Any], columns: Sequence[str]) -> pa.Table:
    """Return an Arrow table of objects, one row for each, with one column for each of some attributes."""
    import pyarrow as pa

    return pa.table({column: [getattr(record, column) for record in records] for column in columns})
