"""Derived rows of a manifest: rows whose bytes are a function of other rows (``docs/format.md``, Derived rows)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorcas_mlflow.codecs import Kind, check
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout.manifests._rows import Columns


@dataclass(frozen=True, slots=True)
class Derivation:
    """The function that makes one derived row."""

    row: int
    """Number of the derived row."""
    function: str
    params: Mapping[str, Any]
    """Parameters of the function, plain JSON values."""
    inputs: tuple[int, ...]
    """Numbers of the rows that the function takes."""


def kind_of(columns: Columns, row: int) -> Kind:
    """Return the dtype and shape of a row."""
    return Kind(columns.dtypes[columns.dtype[row]], columns.shape(row))


def to_json(derived: Sequence[Derivation]) -> list[Any]:
    """Return derivations as values of a manifest's metadata."""
    return [[each.row, each.function, dict(each.params), list(each.inputs)] for each in derived]


def of_json(said: Any) -> tuple[Derivation, ...]:
    """Return the derivations in a manifest's metadata; `check_derived` checks their values.

    Raises:
        FormatError: They are no derivations.
    """
    if not isinstance(said, list) or not said:
        raise FormatError("a manifest of format 2 has no list of derived rows")
    found: list[Derivation] = []
    for each in said:
        if not isinstance(each, list) or len(each) != 4 or not isinstance(each[3], list):
            raise FormatError(f"not a derived row: {each!r:.200}")
        row, function, params, inputs = each
        found.append(Derivation(row, function, params, tuple(inputs)))
    return tuple(found)


def check_derived(derived: Sequence[Derivation], table: Columns, n_inputs: int) -> None:
    """Check that functions make rows of other rows.

    Args:
        derived: The derived rows.
        table: All rows of the manifest, the inputs last.
        n_inputs: Number of the inputs.

    Raises:
        FormatError: A function is unknown or cannot make its row, or a number names no row or a derived one.
    """
    n_rows = len(table) - n_inputs
    before = -1
    for each in derived:
        if not _is_number(each.row, before + 1, n_rows):
            raise FormatError(f"derived rows must ascend and be rows of the content, and {each.row!r:.40} is not")
        before = each.row
    rows = {each.row for each in derived}
    for each in derived:
        if not all(_is_number(row, 0, len(table)) and row not in rows for row in each.inputs):
            raise FormatError(f"row {each.row} is derived of rows that are not stored: {list(each.inputs)!r:.80}")
        check(each.function, each.params, [kind_of(table, row) for row in each.inputs], kind_of(table, each.row))


def _is_number(value: object, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end
