"""Reader with the methods of `safetensors.safe_open`, for code written against that interface."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from tensorcas_mlflow.file_formats import SAFETENSORS_DTYPES
from tensorcas_mlflow.reader._reader import CheckpointReader, TensorSlice


class SafeOpen:
    """A reader of any checkpoint with the methods of `safetensors.safe_open`.

    Source: https://huggingface.co/docs/safetensors/api/torch (safetensors 0.8). Errors are this package's own, and the
    order of `offset_keys` is that of the checkpoint: a store has no offsets. The names include those of
    `CheckpointReader.left_out`: reading such a tensor raises `TensorNotFoundError` with its type. After a close every
    method raises ValueError; tensors and slices taken before stay valid.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader: CheckpointReader | None = reader

    def __enter__(self) -> SafeOpen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def reader(self) -> CheckpointReader:
        """The underlying reader, with further methods.

        Raises:
            ValueError: It is closed.
        """
        if self._reader is None:
            raise ValueError("the checkpoint is closed: open it again")
        return self._reader

    def keys(self) -> list[str]:
        """List the names of the tensors, sorted."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """List the names of the tensors, in storage order, and those that cannot be read."""
        return [*self.reader, *self.reader._unread]

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata as texts; None if there is none."""
        found = self.reader.metadata
        return {
            str(name): value if isinstance(value, str) else json.dumps(value) for name, value in found.items()
        } or None

    def get_tensor(self, name: str) -> Any:
        """Read one tensor."""
        return self.reader.tensor(name)

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Read some tensors at once, or all of them, by name."""
        if names is not None:
            return self.reader.tensors(names)
        self.reader._refuse_left_out(self.reader._unread)
        return self.reader.full()

    def get_slice(self, name: str) -> SafeSlice:
        """Return a view of one tensor; an index reads only the chunks it touches."""
        return SafeSlice(self.reader.get_slice(name))


class SafeSlice:
    """A tensor with the methods of the slices of `safetensors`."""

    def __init__(self, inner: TensorSlice) -> None:
        self._inner = inner

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(self._inner.shape)

    def get_dtype(self) -> str:
        """Return the tensor's dtype by its `safetensors` name (``F32``), or else by its name in manifests."""
        dtype = self._inner.dtype or ""
        return SAFETENSORS_DTYPES.get(dtype, dtype)

    def __getitem__(self, index: Any) -> Any:
        """Read the elements of an index; see `TensorSlice`."""
        return self._inner[index]
