"""Sketches of the tensors of a save, made while their bytes are at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tensorcas_mlflow.base.dtypes import DType, parse_dtype
from tensorcas_mlflow.base.sketch import N_WORDS, positions, words_of
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.layout.manifests import Columns, Manifest, sketch_bytes, sketched_rows
from tensorcas_mlflow.store._sources import Source, TensorSource, Words

STEP_BYTES = 256 << 10
"""New bytes for each sketched tensor with which a step of a series gets sketches. Small steps get none, since their
series finds its bases by itself."""
FIRST_BYTES = 8 << 10
"""The same for any other save."""


def sketch_rows(source: Source, rows: Any) -> Any:
    """Sketch tensors of a source.

    Args:
        source: The rows of a save, and their bytes.
        rows: Numbers of rows that `sketched_rows` returns, or some of them.

    Returns:
        The words of each, shape ``(n, 32)``; 0 for each word whose bytes are not at hand.
    """
    columns = source.columns
    if not isinstance(source, TensorSource):
        return words_in(columns, rows, source.sizes, lambda chunks: _held_pieces(source, chunks))
    at = positions(_n_elements(columns, rows))
    return _words_by_dtype(columns, rows, lambda lines, dtype: source.elements(rows[lines], at[lines], dtype))


def _n_elements(columns: Columns, rows: Any) -> Any:
    return columns.n_bytes[rows] // columns.itemsizes[rows]


def _words_by_dtype(columns: Columns, rows: Any, take: Callable[[Any, DType], Any]) -> Any:
    """Return the words of rows, all rows of a dtype at once.

    Args:
        columns: All rows.
        rows: Numbers of some.
        take: Returns the sampled elements of some of these rows, given by their places, all of one dtype.
    """
    words = np.zeros((len(rows), N_WORDS), dtype=np.uint16)
    dtypes = columns.dtype[rows]
    for number in distinct(dtypes).tolist():
        lines = (dtypes == number).nonzero()[0]
        words[lines] = words_of(take(lines, parse_dtype(columns.dtypes[number])))
    return words


def _held_pieces(source: Source, chunks: Any) -> dict[int, Any]:
    held = chunks[source.holds(chunks)]
    return {
        chunk: data for some in source.pieces(held) for chunk, data in zip(some.chunks.tolist(), some.data, strict=True)
    }


def words_in(columns: Columns, rows: Any, sizes: Any, read: Callable[[Any], dict[int, Any]]) -> Any:
    """Return the sketches of rows from their chunks; see `sketch_rows`.

    Args:
        columns: All rows.
        rows: Numbers of the rows to sketch.
        sizes: Sizes of the chunks of all rows.
        read: Returns the bytes of some chunks, by their numbers; not of all of them, if some are not at hand.
    """
    # A stream may not have brought all chunks of its last row yet.
    known = np.append(sizes, 0)
    first = np.minimum(columns.chunk_at[rows], len(sizes))
    itemsizes = columns.itemsizes[rows]
    places = positions(_n_elements(columns, rows))
    at = places * itemsizes[:, None]
    is_whole = at.max(axis=1, initial=0) + itemsizes <= known[first]
    rest = (~is_whole).nonzero()[0]
    ends = np.cumsum(sizes)
    begins = np.append(0, ends)
    at = at[rest] + begins[first[rest]][:, None]
    chunks = ends.searchsorted(at, side="right")
    wanted = distinct(np.concatenate([first[is_whole], chunks.ravel()]))
    data = read(wanted[wanted < len(sizes)])

    def take(lines: Any, dtype: DType) -> Any:
        taken = np.zeros((len(lines), N_WORDS), dtype)
        for out, chunk, place in zip(taken, first[lines].tolist(), places[lines], strict=True):
            if (piece := data.get(chunk)) is not None:
                np.frombuffer(piece, dtype, len(piece) // dtype.itemsize).take(place, None, out, "clip")
        return taken

    words = np.zeros((len(rows), N_WORDS), dtype=np.uint16)
    whole = is_whole.nonzero()[0]
    words[whole] = _words_by_dtype(columns, rows[whole], lambda lines, dtype: take(whole[lines], dtype))
    for number, line in enumerate(rest.tolist()):
        dtype = parse_dtype(columns.dtypes[columns.dtype[rows[line]]])
        for chunk in {*chunks[number].tolist()} & data.keys():
            here = chunks[number] == chunk
            words[line, here] = _taken(data[chunk], at[number][here] - begins[chunk], dtype)
    return words


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


def sketched(manifest: Manifest, source: Source, most_rows: int, *, known: Words | None = None) -> Manifest:
    """Return the manifest of a save with sketches, if they are worth their bytes.

    Args:
        manifest: The manifest.
        source: Its rows, and bytes of them.
        most_rows: Most tensors for which they are: the new bytes divided by `STEP_BYTES` or `FIRST_BYTES`. A long
            stream gets sketches anyway, since most of its bytes are stored already.
        known: Sketches that the save has made already.
    """
    rows = sketched_rows(manifest.columns)
    # A file may announce a tensor, whose first bytes are sketched, and then end too early.
    if not len(rows) or (len(rows) > most_rows and not source.known_words):
        return manifest
    words = np.zeros((len(rows), N_WORDS), dtype=np.uint16)
    for some in [*source.known_words, *([] if known is None else [known])]:
        _add_words(words, rows, some)
    missing = rows[~words.all(axis=1)]
    _add_words(words, rows, Words(missing, sketch_rows(source, missing)))
    return manifest.sketched(sketch_bytes(words))


def _add_words(words: Any, rows: Any, others: Words) -> None:
    """Add the words missing from sketches; two batches of a stream may each have some of the words of a tensor."""
    lines = np.minimum(rows.searchsorted(others.rows), len(rows) - 1)
    are_mine = rows[lines] == others.rows
    mine = words[lines[are_mine]]
    words[lines[are_mine]] = np.where(mine != 0, mine, others.words[are_mine])
