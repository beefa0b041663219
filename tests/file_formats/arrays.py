"""Arrays as tensors to write, and a write of them in one call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.progress import ByteProgress
from tensorcas_mlflow.base.tensors import Spec, bytes_of
from tensorcas_mlflow.file_formats import Tensors, Written, plan_write

_PIECE_BYTES = 16 << 20


class ArrayTensors:
    """Arrays by name, in order."""

    def __init__(self, arrays: Mapping[str, Array], *, metadata: Mapping[str, Any] | None = None) -> None:
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.left_out: Mapping[str, str] = {}
        self._arrays = dict(arrays)
        self._specs = [Spec.of(name, array) for name, array in self._arrays.items()]

    def specs(self) -> Sequence[Spec]:
        return self._specs

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        for name in names:
            data = bytes_of(self._arrays[name])
            for start in range(0, len(data), _PIECE_BYTES):
                yield name, data[start : start + _PIECE_BYTES]


def write(
    tensors: Tensors, out: str | os.PathLike[str], *, progress: ByteProgress | None = None, **options: Any
) -> Written:
    """Write tensors; see `plan_write`."""
    return plan_write(tensors, out, **options).execute(progress=progress)
