"""Difference of two checkpoints: tensor by tensor, and number by number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.dtypes import DType
from tensorcas_mlflow.base.notebook import MOST_ROWS, Tabular, html_table
from tensorcas_mlflow.base.tensors import Offsets
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader._contents import Contents, PartContents, RowContents
from tensorcas_mlflow.reader._reader import CheckpointReader

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_ELEMENTS = 1 << 16
_BLOCK_BYTES = 1 << 20
_LEAST_SQUARES = 1e-280
"""Smaller sums of squares may have lost terms too small for a float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """The change between two versions of one tensor.

    Infinite and NaN numbers on either side count in ``n_not_finite``, and in no other figure but ``n_equal``. A figure
    beyond the range of a float64 is infinite. For elements other than numbers (texts, times, records) all figures are
    None.
    """

    n_elements: int
    n_equal: int
    """Elements with the same bytes on both sides: a NaN may be equal, and 0.0 is not equal to -0.0."""
    n_not_finite: int | None
    max_absolute: float | None
    """Largest ``|b - a|``; 0 if there are no numbers."""
    mean_absolute: float | None
    """Mean of ``|b - a|``; 0 if there are no numbers."""
    relative_norm: float | None
    """``‖b - a‖ / ‖a‖`` (Euclidean); 0 if both are 0, and infinite if ‖a‖ alone is."""

    @property
    def share_equal(self) -> float:
        """Share of equal elements; 1 if there are no elements."""
        return self.n_equal / self.n_elements if self.n_elements else 1.0


class ValueDifference:
    """Compares two versions of one tensor, piece by piece.

    Changes are computed in float64, changes of 64-bit integers in integers; changes of complex numbers are absolute
    values. Sums are pairwise within blocks of 64 Ki elements and exact over the blocks, so they do not drift. For use
    by one thread.
    """

    def __init__(self, dtype: DType) -> None:
        """Start a comparison.

        Args:
            dtype: The dtype of both, from `tensorcas_mlflow.base.dtypes.parse_dtype`.
        """
        self._dtype = dtype
        self._n_block = max(1, min(_BLOCK_ELEMENTS, _BLOCK_BYTES // dtype.itemsize))
        self._blocks = _NumberBlocks(dtype, self._n_block) if _is_number(dtype) else None
        self._n_elements = 0
        self._n_equal = 0

    def add(self, a: memoryview, b: memoryview) -> None:
        """Add the next piece to the comparison.

        Args:
            a: Bytes of the first version, whole elements.
            b: The bytes of the second one in the same place.

        Raises:
            ValueError: The pieces are not equally long, or end within an element.
        """
        size = self._dtype.itemsize
        if a.nbytes != b.nbytes or a.nbytes % size:
            raise ValueError(f"pieces of {a.nbytes} and {b.nbytes} bytes are not the same elements of {size} bytes")
        if not a.nbytes:
            return
        one, other = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
        for start in range(0, len(one), self._n_block * size):
            stop = start + self._n_block * size
            self._add_block(one[start:stop], other[start:stop])

    def result(self) -> ValueChange:
        """Return the change over all pieces so far."""
        blocks = self._blocks
        n_numbers = self._n_elements - (blocks.n_not_finite if blocks else 0)
        return ValueChange(
            n_elements=self._n_elements,
            n_equal=self._n_equal,
            n_not_finite=blocks.n_not_finite if blocks else None,
            max_absolute=blocks.largest if blocks else None,
            mean_absolute=_as_float(blocks.total / max(n_numbers, 1)) if blocks else None,
            relative_norm=_ratio_of_norms(blocks.squares, blocks.squares_before) if blocks else None,
        )

    def _add_block(self, a: Array, b: Array) -> None:
        n = len(a) // self._dtype.itemsize
        self._n_elements += n
        self._n_equal += n - _n_unequal(a, b, self._dtype.itemsize)
        if self._blocks:
            # Infinite, too large and too small values show in the results.
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                self._blocks.add(a, b)


class _NumberBlocks:
    """Sums over the blocks of one tensor's numbers."""

    def __init__(self, dtype: DType, n_block: int) -> None:
        self.n_not_finite = 0
        self.largest = 0.0
        self.total = Fraction(0)
        """Sum of ``|b - a|``."""
        self.squares = Fraction(0)
        """Sum of ``|b - a|²``."""
        self.squares_before = Fraction(0)
        """Sum of ``|a|²``."""
        self._dtype = dtype
        wide = np.complex128 if dtype.kind == "c" else np.float64
        self._a, self._b = np.empty(n_block, wide), np.empty(n_block, wide)
        self._magnitudes = np.empty(n_block, np.float64)
        self._scratch = np.empty(n_block * (2 if dtype.kind == "c" else 1), np.float64)
        self._load = _loader(dtype)

    def add(self, a: Array, b: Array) -> None:
        """Add a block, given as bytes."""
        n = len(a) // self._dtype.itemsize
        before, change, magnitudes = self._a[:n], self._b[:n], self._magnitudes[:n]
        self._load(a, before)
        if self._dtype.kind in "iu" and self._dtype.itemsize == 8:
            np.copyto(magnitudes, _distances(a.view(self._dtype), b.view(self._dtype)))
        else:
            self._load(b, change)
            np.subtract(change, before, out=change)
            np.abs(change, out=magnitudes)
        largest = float(magnitudes.max())
        if math.isfinite(largest):
            self._count(largest, magnitudes, before)
        else:
            self._add_with_care(before, b)

    def _add_with_care(self, before: Array, b: Array) -> None:
        """Add a block with a number that is not finite, or a change beyond the range of a float64."""
        after = np.empty_like(before)
        self._load(b, after)
        finite = np.isfinite(before) & np.isfinite(after)
        self.n_not_finite += len(finite) - int(np.count_nonzero(finite))
        before, after = before[finite], after[finite]
        if not len(before):
            return
        # A quarter of each change is in range; rounding of the smallest is negligible beside the largest.
        for scale in (1.0, 0.25):
            magnitudes = np.abs(after * scale - before * scale)
            largest = float(magnitudes.max())
            if math.isfinite(largest):
                self._count(largest, magnitudes, before, scale)
                return

    def _count(self, largest: float, magnitudes: Array, before: Array, scale: float = 1.0) -> None:
        self.largest = max(self.largest, largest / scale)
        self.total += _sum(magnitudes) / Fraction(scale)
        self.squares += _sum_of_squares(magnitudes, self._scratch) / Fraction(scale) ** 2
        self.squares_before += _sum_of_squares(before.view(np.float64), self._scratch)


def _is_number(dtype: DType) -> bool:
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"


def _loader(dtype: DType) -> Callable[[Array, Array], object]:
    """Return a function to read numbers, given as bytes, into an array of float64 or complex128."""
    if dtype.itemsize > 1 or dtype.kind in "iu":
        return lambda data, out: np.copyto(out, data.view(dtype))
    # A table takes a fifth of ml_dtypes' time for a float8, and any byte but 0 is true.
    every = np.arange(256, dtype=np.uint8)
    table = (every != 0 if dtype.kind == "b" else every.view(dtype)).astype(np.float64)
    return lambda data, out: np.take(table, data, out=out, mode="clip")  # "raise" would take a copy of out


def _distances(a: Array, b: Array) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return ``|b - a|`` of 64-bit integers."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    native = low.dtype.newbyteorder("=")
    # In unsigned 64 bits, the difference is right even if it does not fit the signed type.
    distances: np.ndarray[Any, np.dtype[np.uint64]] = np.subtract(
        high.astype(native, copy=False).view(np.uint64), low.astype(native, copy=False).view(np.uint64)
    )
    return distances


def _n_unequal(a: Array, b: Array, size: int) -> int:
    """Count the elements of this size with any different byte."""
    word = math.gcd(size, 8)
    differ = a.view(f"u{word}") != b.view(f"u{word}")
    if word == size:
        return int(np.count_nonzero(differ))
    return int(np.count_nonzero(np.logical_or.reduce(differ.reshape(-1, size // word), axis=1)))


def _sum(values: Array) -> Fraction:
    """Sum a block of finite float64."""
    total = float(values.sum())
    if math.isfinite(total):
        return Fraction(total)
    return Fraction(float((values / _BLOCK_ELEMENTS).sum())) * _BLOCK_ELEMENTS


def _sum_of_squares(values: Array, scratch: Array) -> Fraction:
    """Sum the squares of a block of finite float64.

    Args:
        values: The numbers.
        scratch: Memory of at least that length, overwritten.
    """
    squares = scratch[: len(values)]
    total = float(np.multiply(values, values, out=squares).sum())
    if _LEAST_SQUARES < total < math.inf:
        return Fraction(total)
    largest = float(np.abs(values, out=squares).max())
    if largest == 0:
        return Fraction(0)
    power = math.frexp(largest)[1]
    np.ldexp(values, -power, out=squares)
    total = float(np.multiply(squares, squares, out=squares).sum())
    return Fraction(total) * Fraction(4) ** power


def _ratio_of_norms(above: Fraction, below: Fraction) -> float:
    """Return the square root of a ratio, even for numbers far beyond the range of a float64."""
    if not below:
        return math.inf if above else 0.0
    ratio = above / below
    if not ratio:
        return 0.0
    power = (ratio.numerator.bit_length() - ratio.denominator.bit_length()) // 2
    root = Fraction(math.sqrt(ratio / Fraction(4) ** power))
    return _as_float(root * Fraction(2) ** power)


def _as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDiff(Tabular):
    """The result of `diff`: names of tensors by kind of change, in the order of the checkpoints.

    It is true if anything differs: ``if diff(before, after): …``.
    """

    added: tuple[str, ...]
    """Tensors only in the second checkpoint."""
    removed: tuple[str, ...]
    """Tensors only in the first checkpoint."""
    changed: tuple[str, ...]
    """Tensors in both, with different dtypes, shapes or bytes."""
    equal: tuple[str, ...]
    """Tensors in both, bit for bit equal."""
    other: tuple[str, ...]
    """Different content beside the tensors.

    ``skeleton`` (the model without its tensors), ``left_out`` (unsupported tensors), ``metadata``, ``adapter``,
    ``order`` (the order of the common tensors), and ``bytes`` (other content of a foreign file). Skeletons and files
    are compared by their bytes, so those of equal objects may differ.
    """
    added_bytes: int
    removed_bytes: int
    changed_bytes: int
    """Size of the changed tensors in the second checkpoint."""
    equal_bytes: int
    values: Mapping[str, ValueChange] = field(default_factory=dict)
    """Changes of values, for changed tensors of one dtype and shape in both checkpoints; filled on request."""
    tensor_bytes: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Size of each tensor, by name: in the second checkpoint, or in the first one if it was removed."""

    @property
    def is_equal(self) -> bool:
        """True if nothing differs: then, and only then, the checkpoints have one `CheckpointReader.digest`."""
        return not (self.added or self.removed or self.changed or self.other)

    def __bool__(self) -> bool:
        return not self.is_equal

    def by_change(self) -> list[tuple[str, str]]:
        """Return names and kinds of change of the tensors that differ, largest change first.

        The kinds are ``added``, ``removed`` and ``changed``. Tensors without a relative norm come first: those in one
        checkpoint only, and those of other dtypes or shapes. Without ``values`` no tensor has one, so the order is by
        size.
        """
        kinds = {"added": self.added, "removed": self.removed, "changed": self.changed}
        found = [(name, kind) for kind, names in kinds.items() for name in names]

        def rank(item: tuple[str, str]) -> tuple[float, int]:
            change = self.values.get(item[0])
            norm = math.inf if change is None or change.relative_norm is None else change.relative_norm
            return -norm, -self.tensor_bytes.get(item[0], 0)

        return sorted(found, key=rank)

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table with a row for each tensor: those that differ, largest change first, then equal ones.

        Returns:
            Columns ``name``, ``change`` (``added``, ``removed``, ``changed`` or ``equal``), ``n_bytes``, and the fields
            of `ValueChange`, null for a tensor that was not measured.
        """
        import pyarrow as pa

        listed = [*self.by_change(), *((name, "equal") for name in self.equal)]
        changes = [self.values.get(name) for name, _ in listed]

        def figures(figure: str, kind: pa.DataType) -> Any:
            return pa.array([None if each is None else getattr(each, figure) for each in changes], kind)

        return pa.table(
            {
                "name": pa.array([name for name, _ in listed], pa.string()),
                "change": pa.array([kind for _, kind in listed], pa.string()),
                "n_bytes": pa.array([self.tensor_bytes.get(name) for name, _ in listed], pa.int64()),
                "n_elements": figures("n_elements", pa.int64()),
                "n_equal": figures("n_equal", pa.int64()),
                "n_not_finite": figures("n_not_finite", pa.int64()),
                "max_absolute": figures("max_absolute", pa.float64()),
                "mean_absolute": figures("mean_absolute", pa.float64()),
                "relative_norm": figures("relative_norm", pa.float64()),
            }
        )

    def _repr_html_(self) -> str:
        caption = "; ".join(
            f"{count_text(len(names), 'tensor')} {kind} ({size_text(n_bytes)})"
            for kind, names, n_bytes in (
                ("changed", self.changed, self.changed_bytes),
                ("added", self.added, self.added_bytes),
                ("removed", self.removed, self.removed_bytes),
                ("equal", self.equal, self.equal_bytes),
            )
            if names
        )
        if self.other:
            caption += f"; also different: {', '.join(self.other)}"
        listed = self.by_change()
        rows = [self._row(name, kind) for name, kind in listed[:MOST_ROWS]]
        headings = ("tensor", "change", "size", *(_MEASURED if self.values else ()))
        return html_table(headings, rows, caption=caption or "no tensors", n_more=len(listed) - len(rows))

    def _row(self, name: str, kind: str) -> list[str]:
        row = [name, kind, size_text(self.tensor_bytes.get(name, 0))]
        if not self.values:
            return row
        change = self.values.get(name)
        if change is None:
            return [*row, "", "", ""]
        figures = (change.relative_norm, change.max_absolute)
        return [*row, *("" if each is None else f"{each:.3g}" for each in figures), f"{change.share_equal:.1%}"]


_MEASURED = ("relative norm", "largest change", "equal elements")


def diff(before: CheckpointReader, after: CheckpointReader, *, values: bool = False) -> CheckpointDiff:
    """Compare two checkpoints, steps, models or files, of one store or of several.

    Tensors and skeletons with equal digests (`CheckpointReader.digest`) are equal, without being read. They are read
    only if the two are cut into different chunks, or one is a foreign file. A reader of a part
    (`CheckpointReader.below`) counts all of the checkpoint's other content as the part's.

    Args:
        before: The first checkpoint.
        after: The second checkpoint.
        values: Whether to read the changed tensors and measure the changes.

    Raises:
        TensorCasError: Needed content cannot be read.
    """
    old, new = before._row_of(), after._row_of()
    common = [name for name in new if name in old]
    is_equal = _are_equal(before, after, common)
    changed = [name for name, same in zip(common, is_equal, strict=True) if not same]
    equal = [name for name, same in zip(common, is_equal, strict=True) if same]
    added = [name for name in new if name not in old]
    removed = [name for name in old if name not in new]
    others, its_others = before._other_content(), after._other_content()
    kinds = {kind for kind in others.keys() | its_others.keys() if others.get(kind) != its_others.get(kind)}
    if common != [name for name in old if name in new]:
        kinds.add("order")
    sizes = after._tensor_bytes()
    if removed:
        its_sizes = before._tensor_bytes()
        sizes.update({name: its_sizes[name] for name in removed})
    return CheckpointDiff(
        added=tuple(added),
        removed=tuple(removed),
        changed=tuple(changed),
        equal=tuple(equal),
        other=tuple(sorted(kinds)),
        added_bytes=after._n_bytes_of(added),
        removed_bytes=before._n_bytes_of(removed),
        changed_bytes=after._n_bytes_of(changed),
        equal_bytes=after._n_bytes_of(equal),
        values=_values(before, after, changed) if values else {},
        tensor_bytes=sizes,
    )


def _are_equal(before: CheckpointReader, after: CheckpointReader, names: Sequence[str]) -> list[bool]:
    old, new = before._row_of(), after._row_of()
    was, now = (np.array([numbers[name] for name in names], dtype=np.int64) for numbers in (old, new))
    one, other = before._contents, after._contents
    stored, its_stored = _rows_of(one, was), _rows_of(other, now)
    proven = np.zeros(len(names), dtype=bool)
    refuted = np.zeros(len(names), dtype=bool)
    if stored is not None and its_stored is not None:
        # Equal chunks are equal bytes, however they were cut. All of them are compared at once.
        (manifest, rows), (its_manifest, its_rows) = stored, its_stored
        proven = manifest.columns.equal(rows, its_manifest.columns, its_rows)
        if manifest.chunk_bytes == its_manifest.chunk_bytes:
            # For tensors cut alike, different chunks mean different bytes.
            refuted = ~(proven | _has_cuts(manifest, rows) | _has_cuts(its_manifest, its_rows))
    left = [at for at in np.flatnonzero(~(proven | refuted)).tolist() if _are_alike(one, was[at], other, now[at])]
    found = zip(before._identity_bytes(was[left]), after._identity_bytes(now[left]), strict=True)
    proven[left] = [digests == its_digests for digests, its_digests in found]
    return proven.tolist()


def _are_alike(one: Contents, row: int, other: Contents, its: int) -> bool:
    spec, its_spec = one.specs.spec(row), other.specs.spec(its)
    return (spec.dtype, spec.shape) == (its_spec.dtype, its_spec.shape)


def _rows_of(contents: Contents, rows: Offsets) -> tuple[Manifest, Offsets] | None:
    """Find tensors among the rows of a manifest; None if they have different ones or none."""
    if isinstance(contents, PartContents):
        return _rows_of(contents.whole, contents.row_of[rows])
    return (contents.manifest, contents.row_of[rows]) if isinstance(contents, RowContents) else None


def _has_cuts(manifest: Manifest, rows: Offsets) -> np.ndarray[Any, np.dtype[np.bool_]]:
    cuts = manifest.columns.cuts
    return np.zeros(len(rows), dtype=bool) if cuts is None else cuts.given[rows]


def _values(before: CheckpointReader, after: CheckpointReader, names: Sequence[str]) -> dict[str, ValueChange]:
    return dict(_measured(before, after, [name for name in names if _is_measurable(before, after, name)]))


def measure_some(
    before: CheckpointReader, after: CheckpointReader, names: Sequence[str], *, most_bytes: int, most_s: float
) -> dict[str, ValueChange]:
    """Measure how much some tensors changed, the smallest first, as far as bounds allow.

    Args:
        before: The first checkpoint.
        after: The second checkpoint.
        names: Tensors of both. Those of other dtypes or shapes are left out.
        most_bytes: Bound of the bytes of these tensors in one of the two.
        most_s: Bound of the time, checked after each tensor.

    Raises:
        TensorCasError: Needed content cannot be read.
    """
    end = time.monotonic() + most_s
    smallest: list[str] = []
    n_bytes = 0
    for name in sorted(names, key=lambda name: after.spec(name).n_bytes):
        n_bytes += after.spec(name).n_bytes
        if n_bytes > most_bytes:
            break
        if _is_measurable(before, after, name):
            smallest.append(name)
    found: dict[str, ValueChange] = {}
    for name, change in _measured(before, after, smallest):
        found[name] = change
        if time.monotonic() > end:
            break
    return found


def _is_measurable(before: CheckpointReader, after: CheckpointReader, name: str) -> bool:
    spec = before.spec(name)
    return spec.n_bytes > 0 and spec == after.spec(name)


def _measured(
    before: CheckpointReader, after: CheckpointReader, names: Sequence[str]
) -> Iterator[tuple[str, ValueChange]]:
    """Yield the changes of tensors of one dtype and shape in both."""
    last: tuple[str, ValueDifference] | None = None
    # The sizes of tensors alone determine their pieces, so both tensors have the same ones.
    for (name, was), (_, now) in zip(before.stream(names), after.stream(names), strict=True):
        if last is None or last[0] != name:
            if last is not None:
                yield last[0], last[1].result()
            last = name, ValueDifference(before.spec(name).numpy_dtype)
        last[1].add(was, now)
    if last is not None:
        yield last[0], last[1].result()
