"""One tensor, of which parts are read by indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorcas_mlflow.tensor import Spec


class TensorSlice:
    """One tensor of a checkpoint, which reads what it is indexed for."""

    def __init__(self, spec: Spec, read: Callable[[Any], Any]) -> None:
        """Stand for a tensor.

        Args:
            spec: Describes it.
            read: Reads what an index chooses.
        """
        self.spec = spec
        self._read = read

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    @property
    def dtype(self) -> str | None:
        """The name of its dtype."""
        return self.spec.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Read what an index chooses: whole numbers, slices, ``...``, ``None``, and one list of numbers or bools.

        Raises:
            IndexError: It is out of bounds, or of another kind.
            TensorCasError: See `CheckpointReader.tensor`.
        """
        return self._read(index)
