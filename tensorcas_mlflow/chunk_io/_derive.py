"""Evaluation of derived rows: the function of their inputs, compared with the digests of their chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.digest import digest_all, hex_of
from tensorcas_mlflow.base.tensors import bytes_of, empty_array, pieces_of
from tensorcas_mlflow.codecs import evaluate
from tensorcas_mlflow.errors import DerivedTensorError
from tensorcas_mlflow.layout.manifests import Derivation, Manifest, kind_of

ReadInput = Callable[[int], Array]
"""Returns a stored row, given its number in the table."""


class DerivedRows:
    """Evaluation of some derived rows of a manifest, one after the other.

    An input that the next row needs too is kept; so a checkpoint split into shards of stored tensors reads each once.
    """

    def __init__(
        self, manifest: Manifest, derivations: Sequence[Derivation], read: ReadInput, known: Mapping[int, Array]
    ) -> None:
        """Prepare to evaluate.

        Args:
            manifest: A manifest.
            derivations: Its derived rows to evaluate, in any order.
            read: Reader of inputs.
            known: Stored rows that are in memory anyway, by number.
        """
        self._manifest = manifest
        self._left = sorted(derivations, key=lambda each: (each.inputs, each.row))
        self._read = read
        self._known = known
        self._inputs: dict[int, Array] = {}

    def evaluate(self, make_room: Callable[[Derivation], Array], use: Callable[[Derivation, Array], None]) -> None:
        """Evaluate all rows.

        Args:
            make_room: Returns a C-contiguous array for a row, of the row's dtype and shape.
            use: Called with each row's array; its bytes have the digests in the manifest.

        Raises:
            DerivedTensorError: A function gives other bytes.
        """
        for at, each in enumerate(self._left):
            room = make_room(each)
            self._evaluate(each, room)
            use(each, room)
            needed = self._left[at + 1].inputs if at + 1 < len(self._left) else ()
            self._inputs = {row: array for row, array in self._inputs.items() if row in needed}

    def _evaluate(self, each: Derivation, room: Array) -> None:
        manifest = self._manifest
        name = manifest.columns.name(each.row)
        for number in each.inputs:
            if number not in self._inputs:
                known = self._known.get(number)
                self._inputs[number] = self._read(number) if known is None else known
        inputs = [self._inputs[number] for number in each.inputs]
        evaluate(each.function, each.params, inputs, kind_of(manifest.table, each.row), out=room)
        row = manifest.rows[each.row]
        found = digest_all(pieces_of(bytes_of(room), row.ends(manifest.chunk_bytes))) if room.nbytes else row.digests
        wrong = np.flatnonzero((found != row.digests).any(axis=1))
        if len(wrong):
            said, actual = hex_of(row.digests[wrong[0]]), hex_of(found[wrong[0]])
            of = f"the {'input' if len(each.inputs) == 1 else 'inputs'} {', '.join(map(str, each.inputs[:8]))}"
            reason = f"function {each.function} of {of} makes chunk {actual} in the place of {said}"
            raise DerivedTensorError(
                said, f"manifests/{manifest.digest}", reason, manifest.label, (name,) if name else ()
            )


class LastRow:
    """The derived row that a reader evaluated last, for the reads of its other chunks."""

    def __init__(self) -> None:
        self._last = (-1, memoryview(b""))

    def get(self, row: int) -> memoryview | None:
        """Return the bytes of a row, if it was the last one."""
        last, data = self._last
        return data if row == last else None

    def keep(self, row: int, data: memoryview) -> None:
        """Keep the bytes of a row in the place of the last one."""
        self._last = row, data

    def clear(self) -> None:
        """Free the memory of the row."""
        self._last = -1, memoryview(b"")


def room_for(manifest: Manifest, derivation: Derivation) -> Any:
    """Allocate an array for a derived row."""
    return empty_array(manifest.rows[derivation.row].spec)
