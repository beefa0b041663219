"""An Arrow IPC file with a column a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.contenders._contender import Contender
from benchmarks.data import Case, bytes_of


class ArrowFile(Contender):
    """Each column is one binary value, the bytes of a tensor; its field has the dtype and shape. Loaded mapped."""

    name = "Arrow IPC"

    def save(self, case: Case, folder: Path) -> None:
        fields, columns = [], []
        for name, array in case.arrays.items():
            said = {"dtype": array.dtype.name, "shape": ",".join(map(str, array.shape))}
            fields.append(pa.field(name, pa.large_binary(), metadata=said))
            offsets = pa.py_buffer(np.array([0, array.nbytes], np.int64).data)
            columns.append(
                pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(bytes_of(array).data)])
            )
        schema = pa.schema(fields)
        with pa.OSFile(str(folder / "model.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))

    def load(self, folder: Path) -> Mapping[str, Any]:
        with pa.memory_map(str(folder / "model.arrow")) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        return {field.name: _view(field, batch.column(number)) for number, field in enumerate(batch.schema)}

    def read_one(self, folder: Path, name: str) -> Any:
        with pa.memory_map(str(folder / "model.arrow")) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
            number = batch.schema.get_field_index(name)
            return _view(batch.schema.field(number), batch.column(number)).copy()

    def find(self, folder: Path, name: str) -> tuple[int, ...]:
        with pa.memory_map(str(folder / "model.arrow")) as file:
            return _shape(pa.ipc.open_file(file).schema.field(name))


def _shape(field: Any) -> tuple[int, ...]:
    shape = field.metadata[b"shape"].decode()
    return tuple(int(n) for n in shape.split(",")) if shape else ()


def _view(field: Any, column: Any) -> Any:
    data = column.buffers()[2]
    return np.frombuffer(data, np.dtype(field.metadata[b"dtype"].decode())).reshape(_shape(field))
