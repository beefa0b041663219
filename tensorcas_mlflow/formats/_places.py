"""Where the tensors of a file lie, gathered and checked one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.containers import TensorFact, item_bytes
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._arrays import span_of
from tensorcas_mlflow.formats._listing import Place
from tensorcas_mlflow.tensor import MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_TENSOR_BYTES, NOT_IN_NAMES, Spec

_MAX_TENSORS = 1 << 20
_MAX_SHARED_BYTES = 64 << 20
"""Of so many bytes any number may be one element's, as in an expanded tensor; of more, half."""
_MAX_INFLATION = 1040
"""Nothing that is deflated becomes more than 1032 times as long (zlib's technical details)."""


class _Row(NamedTuple):
    """A `Place` that is not made yet, but for its name."""

    dtype: str
    shape: tuple[int, ...]
    source: int
    start: int
    n_bytes: int
    strides: tuple[int, ...] | None = None
    deflated: int | None = None
    swapped: bool = False
    checksum: tuple[int, int] | None = None


class Places(Mapping[str, Place]):
    """The places of a listing's tensors, in order.

    Each is made when it is asked for: a file may have a hundred thousand, of which one is read.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        """Tensors that there is no dtype for, with what the file calls their type."""
        self._rows: dict[str, _Row | TensorFact] = {}
        self._data_at = 0
        """Where in its file begins what a `TensorFact` counts from."""

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        start: int,
        n_bytes: int,
        file_bytes: int,
        source: int = 0,
        strides: tuple[int, ...] | None = None,
        deflated: int | None = None,
        swapped: bool = False,
        checksum: tuple[int, int] | None = None,
    ) -> None:
        """Add a tensor; what is not said here is as `Place` has it.

        Args:
            name: As the file calls it.
            dtype: A name of `tensorcas_mlflow.dtypes`.
            shape: Sides.
            start: See `Place`.
            n_bytes: See `Place`.
            file_bytes: The size of the file.
            source: See `Place`.
            strides: See `Place`.
            deflated: See `Place`.
            swapped: See `Place`.
            checksum: See `Place`.

        Raises:
            FormatError: It cannot be a tensor's name, there is one of that name, or the tensor does not lie there.
        """
        self._check_name(name)
        if start < 0 or n_bytes < 0 or start + n_bytes > file_bytes:
            raise FormatError(f"tensor {name[:80]!r} lies outside of the file, which has {file_bytes} bytes")
        if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0):
            raise FormatError(f"tensor {name[:80]!r} has an impossible shape")
        size = math.prod(shape)
        wanted = own_bytes = size * item_bytes(dtype)
        if not size and math.prod(filter(None, shape)) * item_bytes(dtype) > MAX_TENSOR_BYTES:
            raise FormatError(f"tensor {name[:80]!r} has an impossible shape")
        if strides is not None:
            if len(strides) != len(shape) or min(strides, default=0) < 0:
                raise FormatError(f"tensor {name[:80]!r} has impossible strides")
            wanted = span_of(shape, strides) * item_bytes(dtype)
            if own_bytes > max(_MAX_SHARED_BYTES, 2 * wanted):
                raise FormatError(f"tensor {name[:80]!r} has {own_bytes} bytes, and {wanted} to take them from")
        if deflated is None:
            if wanted != n_bytes:
                raise FormatError(f"tensor {name[:80]!r} has {n_bytes} bytes, and its shape and dtype want {wanted}")
        elif deflated < 0 or wanted + deflated > _MAX_INFLATION * (n_bytes + 1):
            raise FormatError(f"tensor {name[:80]!r} has {wanted} bytes, which {n_bytes} cannot be inflated to")
        self._rows[name] = _Row(dtype, shape, source, start, n_bytes, strides, deflated, swapped, checksum)

    def add_table(self, facts: Sequence[TensorFact], data_at: int) -> None:
        """Add all tensors of the first file, as `in_order` gives them; raises as `add` for their names."""
        assert not self._rows
        names = [fact.name for fact in facts]
        if len(names) > _MAX_TENSORS:
            raise FormatError(f"it has more than {_MAX_TENSORS} tensors")
        if not _are_usual(names):
            for name in names:
                self._check_name(name)
        self._data_at = data_at
        self._rows = {fact.name: fact for fact in facts if fact.dtype is not None}
        self.left_out = {fact.name: fact.kind for fact in facts if fact.dtype is None}

    def unused(self, name: str) -> str:
        """Number a name that is taken."""
        number, unused = 1, name
        while unused in self._rows or unused in self.left_out:
            number += 1
            unused = f"{name} ({number})"
        return unused

    def leave_out(self, name: str, kind: str) -> None:
        """Note a tensor that there is no dtype for; raises as `add` for its name."""
        self._check_name(name)
        self.left_out[name] = kind

    def put(self, name: str, place: Place, source: int) -> None:
        """Add a tensor of another listing, whose first source is so many after this one's first; raises as `add`."""
        spec = place.spec
        assert spec.dtype is not None
        self._check_name(name)
        where = (place.start, place.n_bytes, place.strides, place.deflated, place.swapped, place.checksum)
        self._rows[name] = _Row(spec.dtype, spec.shape, source + place.source, *where)

    def join(self, other: Places, source: int, *, below: str = "") -> None:
        """Add the tensors of another listing, whose first source is so many after this one's first.

        Args:
            other: The tensors; raises as `add` for their names.
            source: What their sources are counted from here.
            below: What their names begin with here.
        """
        for name in other._rows:
            row = other._row(name)
            self._check_name(below + name)
            self._rows[below + name] = row._replace(source=source + row.source)
        for name, kind in other.left_out.items():
            self.leave_out(below + name, kind)

    def __getitem__(self, name: str) -> Place:
        dtype, shape, source, start, n_bytes, strides, deflated, swapped, checksum = self._row(name)
        return Place(
            spec=Spec(name=name, dtype=dtype, shape=shape),
            source=source,
            start=start,
            n_bytes=n_bytes,
            strides=strides,
            deflated=deflated,
            swapped=swapped,
            checksum=checksum,
        )

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, name: str) -> _Row:
        row = self._rows[name]
        if isinstance(row, TensorFact):
            assert row.dtype is not None
            return _Row(row.dtype, row.shape, 0, self._data_at + row.begin, row.end - row.begin)
        return row

    def _check_name(self, name: str) -> None:
        if name in self._rows or name in self.left_out:
            raise FormatError(f"two tensors are called {name[:80]!r}")
        if len(self._rows) >= _MAX_TENSORS or len(self.left_out) >= _MAX_TENSORS:
            raise FormatError(f"it has more than {_MAX_TENSORS} tensors")
        # A model's skeleton is nothing that a file may bring along: there may be a pickle in it.
        if not name or name == SKELETON:
            raise FormatError(f"no tensor can be called {name!r}")
        if len(name) > MAX_NAME_BYTES or not name.isascii() or not name.isprintable():
            _check_odd_name(name)


def _are_usual(names: Sequence[str]) -> bool:
    """Tell whether nothing is odd about any of many names, in less time than one after the other takes."""
    text = "".join(names)
    is_short = max(map(len, names), default=0) <= MAX_NAME_BYTES
    return is_short and text.isascii() and text.isprintable() and not {"", SKELETON}.intersection(names)


def _check_odd_name(name: str) -> None:
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise FormatError(f"a tensor's name is no text: {name[:80]!r}") from error
    if n_bytes > MAX_NAME_BYTES or any(character in name for character in NOT_IN_NAMES):
        raise FormatError(f"no tensor can be called {name[:80]!r} ({n_bytes} bytes)")
