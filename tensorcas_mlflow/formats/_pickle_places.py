"""Where the tensors and arrays lie that a pickle makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from tensorcas_mlflow.containers import ArrayView, RecordField, TensorView, item_bytes
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._arrays import is_c_order, span_of
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, HeldSource, Latin1Source
from tensorcas_mlflow.formats._zip_directory import Member


class PicklePlaces:
    """The places of what one pickle makes, or several of one file."""

    def __init__(
        self, source: ByteSource, *, inflated: bytes | None = None, base: int = 0, is_swapped: bool = False
    ) -> None:
        """Begin without any.

        Args:
            source: The file.
            inflated: The pickle, if it is deflated in the file.
            base: Where in the file the pickle begins that bytes in it are counted from.
            is_swapped: Whether the numbers of storages lie in the other byte order than this machine's.
        """
        self.places = Places()
        self.sources = [source]
        self._base = base
        self._is_swapped = is_swapped
        self._nth = 0
        if inflated is not None:
            self._nth, self._base = 1, 0
            self.sources.append(HeldSource(source.name, inflated))
        self._held: int | None = None
        """Number of the source of arrays that are written as short texts."""

    def add(
        self, views: Iterable[TensorView | ArrayView], storage_at: Callable[[TensorView], Member], *, only: str
    ) -> None:
        """Add tensors and arrays.

        Args:
            views: What a pickle makes.
            storage_at: Finds a tensor's storage.
            only: What is called so that has no name.

        Raises:
            FormatError: They do not lie there.
        """
        for view in views:
            name = self.places.unused(view.name or only)
            if view.dtype is None:
                self.places.leave_out(name, view.kind)
            elif isinstance(view, TensorView):
                self._add_tensor(name, view, view.dtype, storage_at(view))
            else:
                self._add_array(name, view, view.dtype)

    def _add_tensor(self, name: str, view: TensorView, dtype: str, member: Member) -> None:
        n_item_bytes = item_bytes(dtype)
        begin = view.offset * n_item_bytes
        n_bytes = span_of(view.size, view.stride) * n_item_bytes
        if n_bytes and begin + n_bytes > member.raw_bytes:
            raise FormatError(f"tensor {name[:80]!r} reaches beyond its storage")
        if not n_bytes:
            begin = 0
        self.places.add(
            name,
            dtype,
            view.size,
            start=member.start if member.is_deflated else member.start + begin,
            n_bytes=member.n_bytes if member.is_deflated else n_bytes,
            file_bytes=self.sources[0].size,
            strides=None if is_c_order(view.size, view.stride) else view.stride,
            deflated=begin if member.is_deflated else None,
            swapped=self._is_swapped and n_item_bytes > 1,
        )

    def _add_array(self, name: str, view: ArrayView, dtype: str) -> None:
        n_bytes = math.prod(view.shape) * item_bytes(dtype)
        data, nth, start = view.data, self._nth, 0
        if not n_bytes:
            nth = 0
        elif isinstance(data, str):
            raw = data.encode("latin-1", "replace")
            if len(raw) != n_bytes or raw.decode("latin-1") != data:
                raise FormatError(f"array {name[:80]!r} has {n_bytes} bytes, and its text says others")
            nth, start = self._hold(raw)
        elif data is None:
            raise FormatError(f"array {name[:80]!r} lies nowhere")
        elif data.is_text:
            place = self._base + data.at
            if place + data.n_bytes > self.sources[nth].size or not n_bytes <= data.n_bytes <= 2 * n_bytes:
                raise FormatError(f"array {name[:80]!r} has {n_bytes} bytes, and its text says others")
            self.sources.append(Latin1Source(self.sources[nth], place, data.n_bytes, n_bytes, self.sources[0].name))
            nth = len(self.sources) - 1
        else:
            start = self._base + data.at
        for each in spread(name, dtype, view.shape, view.strides, view.fields, start):
            self.places.add(
                each.name,
                each.dtype,
                each.shape,
                start=each.start,
                n_bytes=each.n_bytes,
                file_bytes=self.sources[nth].size,
                source=nth,
                strides=each.strides,
            )

    def _hold(self, data: bytes) -> tuple[int, int]:
        if self._held is None:
            self._held = len(self.sources)
            self.sources.append(HeldSource(self.sources[0].name))
        held = self.sources[self._held]
        assert isinstance(held, HeldSource)
        return self._held, held.add(data)


class Spread(NamedTuple):
    """One of the arrays that an array of records is listed as, or any other array itself."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int
    strides: tuple[int, ...] | None


def spread(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    fields: Sequence[RecordField],
    start: int,
) -> Iterator[Spread]:
    """Say what an array is listed as.

    Args:
        name: What it is called.
        dtype: Its own; of records without a name that of bytes.
        shape: Sides; of such records with the bytes of one as the last.
        strides: Elements, where it is not in C order.
        fields: Of such records.
        start: Where its bytes begin.
    """
    if not fields:
        yield Spread(name, dtype, shape, start, math.prod(shape) * item_bytes(dtype), strides)
        return
    sides = shape[:-1] if 0 not in shape else shape
    rows = [*accumulate(sides[:0:-1], mul, initial=1)][::-1] if sides else []
    for field in fields:
        steps = tuple(row * field.step for row in rows)
        n_bytes = span_of(sides, steps) * item_bytes(field.dtype)
        at = start + field.offset if n_bytes else 0
        yield Spread(f"{name}.{field.name}", field.dtype, sides, at, n_bytes, steps if n_bytes else None)
