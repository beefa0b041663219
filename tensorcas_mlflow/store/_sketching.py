"""Sketches of the tensors of a save, made while their bytes are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.sketch import LEAST_SKETCHED_BYTES, N_WORDS, positions, words_of
from tensorcas_mlflow.layout import Columns, Manifest, sketch_bytes, sketched_rows
from tensorcas_mlflow.store._sources import Source, TensorSource

_STEP_BYTES = 256 << 10
"""Least number of new bytes for each sketched tensor with which a step of a series gets sketches."""
_FIRST_BYTES = 8 << 10
"""The same for any other save."""

Words = Mapping[int, Any]
"""Sketches by the number of their row."""


def is_worth_sketching(n_sketched: int, n_new_bytes: int, *, is_step: bool) -> bool:
    """Tell whether a save gets sketches: small steps do not, since their series finds its bases by itself.

    Args:
        n_sketched: Number of tensors to sketch.
        n_new_bytes: Number of bytes the save adds, before encoding.
        is_step: Whether it continues a series.
    """
    return 0 < n_sketched * (_STEP_BYTES if is_step else _FIRST_BYTES) <= n_new_bytes


def sketch_rows(source: Source, rows: Any) -> Words:
    """Sketch tensors of a source; those without their first bytes at hand are left out.

    Args:
        source: The rows of a save, and their bytes.
        rows: Numbers of rows that `sketched_rows` returns, or some of them.
    """
    columns = source.columns
    if isinstance(source, TensorSource):
        return {row: words_of(source.elements(row, positions(_n_elements(columns, row)))) for row in rows.tolist()}
    return words_in(columns, rows, source.sizes, lambda chunks: _held_pieces(source, chunks))


def _n_elements(columns: Columns, row: int) -> int:
    return int(columns.n_bytes[row] // columns.itemsizes[row])


def _held_pieces(source: Source, chunks: Any) -> dict[int, Any]:
    held = chunks[source.holds(chunks)]
    return {
        chunk: data for some in source.pieces(held) for chunk, data in zip(some.chunks.tolist(), some.data, strict=True)
    }


def words_in(columns: Columns, rows: Any, sizes: Any, read: Any) -> Words:
    """Return the sketches of rows from their chunks.

    Args:
        columns: All rows.
        rows: Numbers of the rows to sketch.
        sizes: Sizes of the chunks of all rows.
        read: Returns the bytes of some chunks, by their numbers; not of all of them, if some are not at hand.
    """
    if not len(rows):
        return {}
    ends = np.cumsum(sizes)
    begins = np.concatenate([[0], ends])
    itemsizes = columns.itemsizes[rows]
    at = positions(columns.n_bytes[rows] // itemsizes) * itemsizes[:, None] + begins[columns.chunk_at[rows]][:, None]
    chunks = ends.searchsorted(at, side="right")
    # A stream may not have brought all chunks of its last row yet.
    wanted = np.unique(chunks)
    data = read(wanted[wanted < len(sizes)])
    found: dict[int, Any] = {}
    for number, (row, dtype) in enumerate(zip(rows.tolist(), columns.dtype[rows].tolist(), strict=True)):
        mine = chunks[number]
        parts = np.zeros(N_WORDS, dtype=np.uint16)
        for chunk in {*mine.tolist()} & data.keys():
            here = mine == chunk
            parts[here] = _taken(data[chunk], at[number][here] - begins[chunk], parse_dtype(columns.dtypes[dtype]))
        if parts.any():
            found[row] = parts
    return found


def _taken(piece: Any, at: Any, dtype: Any) -> Any:
    """Return the words of elements of a chunk, given by their first bytes; 0 for one that ends in another chunk."""
    size = dtype.itemsize
    raw = np.frombuffer(piece, np.uint8)
    if len(raw) % size == 0 and not (at % size).any():
        return words_of(raw.view(dtype)[at // size])
    is_whole = at + size <= len(raw)
    words = np.zeros(len(at), dtype=np.uint16)
    words[is_whole] = words_of(np.ascontiguousarray(raw[at[is_whole][:, None] + np.arange(size)]).view(dtype)[:, 0])
    return words


def words_matrix(found: Words, rows: Any) -> Any:
    """Return sketches as an array with a line for each of some rows, zeros for those that are not known."""
    matrix = np.zeros((len(rows), N_WORDS), dtype=np.uint16)
    for line, row in enumerate(rows.tolist()):
        if row in found:
            matrix[line] = found[row]
    return matrix


def sketched(manifest: Manifest, source: Source, n_new_bytes: int, *, is_step: bool) -> Manifest:
    """Return the manifest of a save with sketches, if they are worth their bytes.

    Args:
        manifest: The manifest.
        source: Its rows, and bytes of them.
        n_new_bytes: See `is_worth_sketching`.
        is_step: See there.
    """
    is_stream = bool(source.known_words)  # of a long stream, most bytes are stored already
    if n_new_bytes < LEAST_SKETCHED_BYTES // 2 and not is_stream:
        return manifest
    rows = sketched_rows(manifest.columns)
    if not (is_stream or is_worth_sketching(len(rows), n_new_bytes, is_step=is_step)):
        return manifest
    words = words_matrix(merged(source.known_words, sketch_rows(source, rows)), rows)
    return manifest.sketched(sketch_bytes(words))


def merged(one: Words, other: Words) -> Words:
    """Return the sketches of two sources of words; a tensor may have some of its words in each."""
    both = {row: np.where(one[row] != 0, one[row], other[row]) for row in one.keys() & other.keys()}
    return {**one, **other, **both}
