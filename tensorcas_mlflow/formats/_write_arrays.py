"""Arrays in memory as tensors to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.tensor import Spec, bytes_of

_PIECE_BYTES = 16 << 20


class ArrayTensors:
    """Arrays by name, as a `Tensors` that `write` takes; views, so they must not change meanwhile."""

    def __init__(self, arrays: Mapping[str, Array], *, metadata: Mapping[str, Any] | None = None) -> None:
        """Describe arrays.

        Args:
            arrays: By name, in the order in which they are to be told.
            metadata: Plain JSON values that go with them.

        Raises:
            ValueError: A name or dtype is none that a manifest could have.
        """
        if SKELETON in arrays:
            raise ValueError(f"{SKELETON!r} is no tensor: leave it out")
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.left_out: Mapping[str, str] = {}
        self._arrays = dict(arrays)
        self._specs = [Spec.of(name, array) for name, array in self._arrays.items()]

    def specs(self) -> Sequence[Spec]:
        """Describe the tensors, in order."""
        return self._specs

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Give the arrays' bytes; see `Tensors.stream`. One that is not in C order is copied while it is written."""
        for name in names:
            data = bytes_of(self._arrays[name])
            for start in range(0, len(data), _PIECE_BYTES):
                yield name, data[start : start + _PIECE_BYTES]
