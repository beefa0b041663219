"""Rows of a manifest as columns: names, dtypes, shapes and digests of very many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.base.dtypes import dtype_name, itemsize_of
from tensorcas_mlflow.base.tensors import (
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_TENSOR_BYTES,
    NOT_IN_NAMES,
    Offsets,
    RowCuts,
    Spec,
    blocks_of,
    check_cuts,
    chunk_counts,
    chunk_ends,
    chunk_sizes,
    offsets_of,
    ranges,
)
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import FormatError

_NOT_IN_NAMES = np.frombuffer(NOT_IN_NAMES.encode(), dtype=np.uint8)


def check_names(names: Texts) -> None:
    """Check that texts are names of tensors, by the rules of `tensor.Spec`; empty ones are allowed.

    Args:
        names: The names.

    Raises:
        FormatError: One is no such name.
    """
    offsets, data = names.at, names.data
    if step_range(offsets)[1] > MAX_NAME_BYTES:
        raise FormatError(f"a manifest has a name of more than {MAX_NAME_BYTES} bytes")
    # Hardly any name contains a control character, and one pass finds the least byte of all names.
    if len(data) and data.min() <= _NOT_IN_NAMES.max() and np.isin(data, _NOT_IN_NAMES).any():
        raise FormatError("a manifest has a name with a zero byte or a line break")


def step_range(offsets: Any) -> tuple[int, int]:
    """Return the least and the greatest difference between neighbours of ascending offsets; zeros if there is none."""
    least, greatest = [], []
    for block in blocks_of(len(offsets) - 1):
        steps = offsets[block.start + 1 : block.stop + 1] - offsets[block]
        least.append(int(steps.min()))
        greatest.append(int(steps.max()))
    return min(least, default=0), max(greatest, default=0)


def check_shapes(shape_at: Any, sides: Offsets, itemsizes: Offsets) -> None:
    """Check that shapes are possible.

    Args:
        shape_at: Start of each row's sides, and, last, the end of the last row's.
        sides: The sides of all rows, one after the other.
        itemsizes: For each row the size of an element in bytes.

    Raises:
        FormatError: A row has a negative side, too many sides, or an impossible number of bytes. Empty rows must not
            have impossible sides either: numpy refuses to build them.
    """
    _, most = step_range(shape_at)
    if most > MAX_DIMENSIONS:
        raise FormatError(f"a manifest has a tensor of {most} dimensions, more than {MAX_DIMENSIONS}")
    if sides.min(initial=0) < 0:
        raise FormatError("a manifest has a tensor of a negative shape")
    n_bits = most * int(sides.max(initial=1)).bit_length() + int(itemsizes.max(initial=1)).bit_length()
    if n_bits < MAX_TENSOR_BYTES.bit_length():
        return  # no product of so many such numbers overflows
    factors = np.maximum(sides, 1)
    # A product beyond 64 bits wraps around, and would look small.
    about = row_sizes(shape_at, factors.astype(np.float64), itemsizes.astype(np.float64))
    if about.max() > 2 * MAX_TENSOR_BYTES or row_sizes(shape_at, factors, itemsizes).max() > MAX_TENSOR_BYTES:
        raise FormatError("a manifest has a tensor of an impossible shape")


def row_sizes(shape_at: Any, sides: Any, itemsizes: Any) -> Any:
    """Return the size of each row in bytes, for arguments checked by `check_shapes`.

    The first of ``shape_at`` need not be 0, so the function serves some consecutive rows too.
    """
    least, most = step_range(shape_at)
    sizes = itemsizes.copy()
    if least == most:
        for dimension in range(most):
            sizes *= sides[int(shape_at[0]) + dimension : int(shape_at[-1]) : most]
        return sizes
    n_dimensions = np.diff(shape_at)
    rows = np.arange(len(sizes))
    for dimension in range(most):
        rows = rows[n_dimensions[rows] > dimension]
        sizes[rows] *= sides[shape_at[rows] + dimension]
    return sizes


def row_cuts(cuts: Sequence[Any]) -> RowCuts | None:
    """Combine the cuts of rows, each an int64 array or None; None if no row has any."""
    given = np.array([each is not None for each in cuts], dtype=bool)
    if not given.any():
        return None
    values = [np.asarray(each, dtype=np.int64) for each in cuts if each is not None]
    counts = np.zeros(len(cuts), dtype=np.int64)
    counts[given] = [len(each) for each in values]
    return RowCuts(given=given, at=offsets_of(counts), values=np.concatenate(values))


class SpecFacts(NamedTuple):
    """Name, dtype and shape of one of many rows: a `Spec` that is checked already."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Specs:
    """Names, dtypes and shapes of many rows: `Spec` for many. Checked once, here, like there.

    Raises:
        FormatError: A name, a dtype or a shape is invalid.
    """

    names: Texts
    dtypes: tuple[str | None, ...]
    """The distinct dtypes, by their names in manifests."""
    dtype: Any
    """For each row the position of its dtype in ``dtypes``."""
    shape_offsets: Any
    """The values of ``shape_at``, in integers of any size: int32 without a copy, if they come from an Arrow stream."""
    sides: Offsets

    def __post_init__(self) -> None:
        check_names(self.names)
        check_shapes(self.shape_offsets, self.sides, self.itemsizes)
        if None in self.dtypes:
            is_plain = self.dtype == self.dtypes.index(None)
            if (np.diff(self.shape_offsets)[is_plain] != 1).any():
                raise FormatError("plain bytes must have one dimension")

    def __len__(self) -> int:
        return len(self.dtype)

    @classmethod
    def of(cls, specs: Sequence[Spec]) -> Specs:
        """Combine descriptions of rows."""
        return cls.described(
            [spec.name for spec in specs], [spec.dtype for spec in specs], [spec.shape for spec in specs]
        )

    @classmethod
    def described(cls, names: Sequence[str], dtypes: Sequence[str | None], shapes: Sequence[tuple[int, ...]]) -> Specs:
        """Describe rows by their names, the names of their dtypes, and their shapes."""
        different: dict[str | None, int] = {}
        codes = [different.setdefault(dtype, len(different)) for dtype in dtypes]
        return Specs(
            names=Texts.of(names), dtypes=tuple(different), dtype=np.array(codes, dtype=np.intp), **_shapes(shapes)
        )

    @classmethod
    def of_arrays(cls, names: Sequence[str], arrays: Sequence[Array]) -> Specs:
        """Describe arrays; raise like `Spec.of` for the first invalid one."""
        try:
            return cls._of_arrays(names, arrays)
        except (FormatError, ValueError, TypeError):
            for name, array in zip(names, arrays, strict=True):
                Spec.of(name, array)
            raise

    @classmethod
    def _of_arrays(cls, names: Sequence[str], arrays: Sequence[Array]) -> Specs:
        # Hardly more than a look at each array: describing 100,000 small ones takes as long as reading one.
        dtypes = [array.dtype for array in arrays]
        code_of: dict[Any, int] = {}
        different: dict[str | None, int] = {}
        for dtype in dict.fromkeys(dtypes):
            code_of[dtype] = different.setdefault(dtype_name(dtype), len(different))
        codes = np.array(list(map(code_of.__getitem__, dtypes)), dtype=np.intp)
        if SKELETON in names:
            at = names.index(SKELETON)
            codes[at] = different.setdefault(Spec.of(SKELETON, arrays[at]).dtype, len(different))
        specs = Specs(
            names=Texts.of(names),
            dtypes=tuple(different),
            dtype=codes,
            **_shapes([array.shape for array in arrays]),
        )
        if (np.diff(specs.names.at) == 0).any():
            raise ValueError("a tensor has no name")
        return specs

    def some(self, rows: Any) -> Specs:
        """Return the descriptions of some rows, in the given order."""
        begins = self.shape_at[rows]
        counts = self.shape_at[np.asarray(rows) + 1] - begins
        return Specs(
            names=self.names.take(rows),
            dtypes=self.dtypes,
            dtype=self.dtype[rows],
            shape_offsets=offsets_of(counts),
            sides=self.sides[ranges(begins, counts)],
        )

    @Lazy
    def shape_at(self) -> Offsets:
        """Start of each row's sides among ``sides``, and, last, the end of the last row's."""
        return np.asarray(self.shape_offsets, dtype=np.int64)

    @Lazy
    def n_bytes(self) -> Offsets:
        """Size of each row in bytes."""
        return self.n_bytes_of(slice(0, len(self)))

    def n_bytes_of(self, block: slice) -> Offsets:
        """Return the sizes of consecutive rows, in bytes."""
        at = self.shape_offsets[block.start : block.stop + 1]
        sizes: Offsets = row_sizes(at, self.sides, self.itemsizes[block])
        return sizes

    @Lazy
    def itemsizes(self) -> Offsets:
        """Size of an element of each row in bytes; 1 for plain bytes."""
        return self._of_dtypes([1 if name is None else itemsize_of(name) for name in self.dtypes])

    @Lazy
    def codec_itemsizes(self) -> Offsets:
        """Size of an element of each row for its codec: 1 for text, and half a complex number."""
        sizes = [1 if name is None or name[0] in "SU" else itemsize_of(name) for name in self.dtypes]
        is_complex = [name is not None and name.lstrip("<>").startswith("complex") for name in self.dtypes]
        return self._of_dtypes(np.where(is_complex, np.array(sizes) // 2, sizes))

    @Lazy
    def have_names_of_their_own(self) -> bool:
        """True if no two rows have one name."""
        return len(set(self.names.to_list())) == len(self)

    @Lazy
    def is_tensor(self) -> Any:
        """For each row whether it is a tensor, not plain bytes."""
        return np.array([name is not None for name in self.dtypes], dtype=bool)[self.dtype]

    def _of_dtypes(self, numbers: Any) -> Offsets:
        """Return for each row the value of its dtype."""
        if len(self.dtypes) == 1:
            return np.broadcast_to(np.int64(numbers[0]), len(self))
        of_rows: Offsets = np.array(numbers, dtype=np.int64)[self.dtype]
        return of_rows

    def name(self, row: int) -> str:
        """Return the name of one row."""
        return self.names[row]

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of one row."""
        return tuple(self.sides[self.shape_offsets[row] : self.shape_offsets[row + 1]].tolist())

    def shapes(self, rows: Offsets) -> list[tuple[int, ...]]:
        """Return the shapes of some rows."""
        begins = self.shape_at[rows]
        counts = self.shape_at[rows + 1] - begins
        sides, stops = self.sides[ranges(begins, counts)].tolist(), counts.cumsum()
        where = zip((stops - counts).tolist(), stops.tolist(), strict=True)
        return [tuple(sides[start:stop]) for start, stop in where]

    def facts(self) -> list[SpecFacts]:
        """Return the descriptions of all rows; they are checked already."""
        dtypes = map(self.dtypes.__getitem__, self.dtype.tolist())
        fields = zip(self.names.to_list(), dtypes, self.shapes(np.arange(len(self))), strict=True)
        return list(map(partial(tuple.__new__, SpecFacts), fields))

    def spec(self, row: int) -> Spec:
        """Return the description of one row."""
        return Spec(name=self.name(row), dtype=self.dtypes[self.dtype[row]], shape=self.shape(row))


def _shapes(shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    return {
        "shape_offsets": offsets_of(np.fromiter(map(len, shapes), dtype=np.int64, count=len(shapes))),
        "sides": np.fromiter(chain.from_iterable(shapes), dtype=np.int64),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns(Specs):
    """All rows of a manifest, column by column; `check_chunks` checks that the chunks fit them."""

    chunk_offsets: Any
    """The values of ``chunk_at``, in integers of any size, like ``shape_offsets``."""
    digests: Digests
    """The digests of all rows, one after the other."""
    cuts: RowCuts | None
    """Byte offsets of chunk ends; None if no row has any."""

    @Lazy
    def chunk_at(self) -> Offsets:
        """Number of the first chunk of each row, counted over all rows, and, last, the number of all chunks."""
        return np.asarray(self.chunk_offsets, dtype=np.int64)

    @classmethod
    def of_specs(cls, specs: Specs, *, chunk_at: Offsets, digests: Digests, cuts: RowCuts | None) -> Columns:
        """Add chunks to described rows, which nobody checks again."""
        columns = object.__new__(cls)
        vars(columns).update(vars(specs), chunk_offsets=chunk_at, chunk_at=chunk_at, digests=digests, cuts=cuts)
        return columns

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Columns:
        """Combine rows into columns."""
        return cls.of_specs(
            Specs.of([row.spec for row in rows]),
            chunk_at=offsets_of([len(row.digests) for row in rows]),
            digests=np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(row.digests for row in rows)]),
            cuts=row_cuts([row.cuts for row in rows]),
        )

    def take(self, rows: Any) -> Columns:
        """Return some rows with their chunks, in the given order."""
        counts = self.chunk_at[np.asarray(rows) + 1] - self.chunk_at[rows]
        return Columns.of_specs(
            self.some(rows),
            chunk_at=offsets_of(counts),
            digests=self.digests[self.chunks_of(rows)],
            cuts=None if self.cuts is None else self.cuts.some(rows),
        )

    def joined(self, other: Columns) -> Columns:
        """Return these rows, and behind them those of another object."""
        code_of = {name: code for code, name in enumerate(dict.fromkeys((*self.dtypes, *other.dtypes)))}
        codes = [np.array([code_of[name] for name in each.dtypes], dtype=np.intp)[each.dtype] for each in (self, other)]
        specs = Specs(
            names=Texts(
                _join_offsets(self.names.at, other.names.at), np.concatenate([self.names.data, other.names.data])
            ),
            dtypes=tuple(code_of),
            dtype=np.concatenate(codes),
            shape_offsets=_join_offsets(self.shape_at, other.shape_at),
            sides=np.concatenate([self.sides, other.sides]),
        )
        cuts = None
        if self.cuts is not None or other.cuts is not None:
            one, two = self.cuts or _no_cuts(len(self)), other.cuts or _no_cuts(len(other))
            cuts = RowCuts(
                given=np.concatenate([one.given, two.given]),
                at=_join_offsets(one.at, two.at),
                values=np.concatenate([one.values, two.values]),
            )
        return Columns.of_specs(
            specs,
            chunk_at=_join_offsets(self.chunk_at, other.chunk_at),
            digests=np.concatenate([self.digests, other.digests]),
            cuts=cuts,
        )

    def is_laid_out_like(self, other: Columns) -> bool:
        """Tell whether rows without cuts are those of another object, digests aside: both hold the same arrays."""
        return (
            self.cuts is None
            and other.cuts is None
            and self.names is other.names
            and self.dtypes is other.dtypes
            and self.dtype is other.dtype
            and self.sides is other.sides
            and self.shape_offsets is other.shape_offsets
            and self.chunk_offsets is other.chunk_offsets
        )

    def check_chunks(self, chunk_bytes: int) -> None:
        """Check that each row has the chunks of its size and its cuts.

        Raises:
            FormatError: A row has others.
        """
        if self.cuts is not None:
            check_cuts(self.n_bytes, self.cuts)
        for block in blocks_of(len(self)):
            cuts = None if self.cuts is None else self.cuts.some(np.arange(block.start, block.stop))
            # Count the chunks before allocating offsets for them: a hostile shape must not cost memory.
            counts = chunk_counts(self.n_bytes_of(block), chunk_bytes, cuts)
            wrong = np.flatnonzero(counts != np.diff(self.chunk_offsets[block.start : block.stop + 1]))
            if len(wrong):
                row = block.start + int(wrong[0])
                n_chunks = int(self.chunk_offsets[row + 1] - self.chunk_offsets[row])
                name = self.name(row)[:80]
                raise FormatError(f"row {name!r} of a manifest has {n_chunks} chunks, which do not make its size")

    def chunk_sizes(self, chunk_bytes: int, rows: Any = None) -> Offsets:
        """Return the sizes of the chunks of all rows, or of some in the given order."""
        if rows is None:
            return chunk_sizes(self.n_bytes, chunk_bytes, self.cuts)
        cuts = None if self.cuts is None else self.cuts.some(rows)
        return chunk_sizes(self.n_bytes[rows], chunk_bytes, cuts)

    def chunks_of(self, rows: Any) -> Offsets:
        """Return the numbers of the chunks of some rows, one row after the other."""
        begins = self.chunk_at[rows]
        return ranges(begins, self.chunk_at[np.asarray(rows) + 1] - begins)

    def rows_of(self, chunks: Any) -> Any:
        """Return the row of each of these chunks, given by number."""
        return self.chunk_at[1:].searchsorted(chunks, side="right")

    def equal(self, rows: Any, other: Columns, other_rows: Any) -> Any:
        """Compare rows with as many of other columns, one to one.

        Returns:
            For each pair whether both have one dtype, one shape and the same chunks, and so one identity.
        """
        codes = {name: code for code, name in enumerate(other.dtypes)}
        same_dtype = np.array([codes.get(name, -1) for name in self.dtypes], dtype=np.intp)
        is_equal = same_dtype[self.dtype[rows]] == other.dtype[other_rows]
        for mine, at, its, its_at in (
            (self.sides, self.shape_at, other.sides, other.shape_at),
            (self.digests, self.chunk_at, other.digests, other.chunk_at),
        ):
            begins, its_begins = at[rows], its_at[other_rows]
            counts = at[rows + 1] - begins
            is_equal &= counts == its_at[other_rows + 1] - its_begins
            left = np.flatnonzero(is_equal)
            differs = mine[ranges(begins[left], counts[left])] != its[ranges(its_begins[left], counts[left])]
            if differs.ndim > 1:
                differs = differs.any(axis=1)
            is_equal[np.repeat(left, counts[left])[differs]] = False
        return is_equal

    def contents(self) -> Iterator[tuple[str | None, tuple[int, ...], bytes]]:
        """Yield the input of each row's identity: dtype, shape, and digests one after the other."""
        dtype, shape_at, sides = self.dtype.tolist(), self.shape_at.tolist(), self.sides.tolist()
        digests, digest_at = self.digests.tobytes(), (self.chunk_at * DIGEST_BYTES).tolist()
        for row, code in enumerate(dtype):
            shape = tuple(sides[shape_at[row] : shape_at[row + 1]])
            yield self.dtypes[code], shape, digests[digest_at[row] : digest_at[row + 1]]

    def row(self, row: int) -> Row:
        """Return one row."""
        cuts = None if self.cuts is None else self.cuts.of(row)
        digests = self.digests[self.chunk_offsets[row] : self.chunk_offsets[row + 1]]
        return Row(spec=self.spec(row), cuts=cuts, digests=digests)

    def each_row(self) -> Iterator[Row]:
        """Yield all rows, one after the other."""
        dtype, shape_at, chunk_at = self.dtype.tolist(), self.shape_at.tolist(), self.chunk_at.tolist()
        sides = self.sides.tolist()
        for row, name in enumerate(self.names.to_list()):
            shape = tuple(sides[shape_at[row] : shape_at[row + 1]])
            yield Row(
                spec=Spec(name=name, dtype=self.dtypes[dtype[row]], shape=shape),
                cuts=None if self.cuts is None else self.cuts.of(row),
                digests=self.digests[chunk_at[row] : chunk_at[row + 1]],
            )


def _join_offsets(one: Any, other: Any) -> Offsets:
    return np.concatenate([one, np.asarray(other[1:], dtype=np.int64) + int(one[-1])]).astype(np.int64, copy=False)


def _no_cuts(n_rows: int) -> RowCuts:
    none = np.zeros(n_rows + 1, dtype=np.int64)
    return RowCuts(given=np.zeros(n_rows, dtype=bool), at=none, values=none[:0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a manifest: its name, dtype and shape, and its chunks."""

    spec: Spec
    cuts: Any
    """Byte offsets of chunk ends, an int64 array, or None."""
    digests: Digests

    def ends(self, chunk_bytes: int) -> Any:
        """Return the ends of the row's chunks, in bytes."""
        return chunk_ends(self.spec.n_bytes, chunk_bytes, self.cuts)

    @property
    def identity(self) -> str:
        """Digest of the row's content: equal for equal tensors in any store."""
        shape = np.array(self.spec.shape, dtype="<i8").tobytes()
        return digest((self.spec.dtype or "").encode() + b"\0" + shape + self.digests.tobytes()).hex()


class Rows(Sequence[Row]):
    """The rows of columns, each built on access."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns.dtype)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...

    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        numbers = range(len(self.columns))[at]
        if isinstance(numbers, int):
            return self.columns.row(numbers)
        return [self.columns.row(number) for number in numbers]

    def __iter__(self) -> Iterator[Row]:
        return self.columns.each_row()


_MAX_SEARCHES = 16
"""Number of names searched for in place; beyond it, building a table of all names is faster."""


class Numbers:
    """Positions of rows by name.

    Every method except a lookup of a few names raises `FormatError` if two rows have one name.
    """

    def __init__(self, specs: Specs, *, allows_nameless: bool = False) -> None:
        """Index rows by name.

        Args:
            specs: The rows.
            allows_nameless: Whether any number of rows may have the empty name; a lookup returns the last of them.
        """
        self._specs = specs
        self._allows_nameless = allows_nameless
        self._n_searches = 0

    def number(self, name: str) -> int:
        """Return the position of a row; raise KeyError if no row has the name."""
        if "numbers" in self.__dict__ or self._n_searches >= _MAX_SEARCHES:
            return self.numbers[name]
        self._n_searches += 1
        found = self._specs.names.find(name)
        if len(found) > 1 and not (name == "" and self._allows_nameless):
            raise FormatError("a manifest must not give two rows one name")
        if len(found) == 0:
            raise KeyError(name)
        return int(found[-1])

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.number(name) >= 0
        except KeyError:
            return False

    @Lazy
    def numbers(self) -> dict[str, int]:
        """Return the positions of all rows by name."""
        names = self._specs.names.to_list()
        numbers = dict(zip(names, range(len(names)), strict=True))
        n_nameless = names.count("") if self._allows_nameless else 0
        if len(numbers) - min(n_nameless, 1) != len(names) - n_nameless:
            raise FormatError("a manifest must not give two rows one name")
        return numbers


class ByName(Numbers, Mapping[str, Row]):
    """The rows of a manifest by name, each built on access."""

    def __init__(self, columns: Columns, *, allows_nameless: bool) -> None:
        """Index the rows of columns; see `Numbers`."""
        super().__init__(columns, allows_nameless=allows_nameless)
        self._columns = columns

    def __getitem__(self, name: str) -> Row:
        return self._columns.row(self.number(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)
