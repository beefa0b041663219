"""Names, dtypes and shapes of many rows as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tensorcas_mlflow._arrow import array_of_numbers, array_of_texts, text_buffers, values_of
from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.chunking import Offsets, offsets_of, ranges
from tensorcas_mlflow.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.manifest._checks import check_names, check_shapes, row_sizes
from tensorcas_mlflow.tensor import Spec


@dataclass(frozen=True, kw_only=True, eq=False)
class Specs:
    """Names, dtypes and shapes of many rows: `Spec` for many. Checked once, here, like there.

    Raises:
        FormatError: A name, a dtype or a shape is invalid.
    """

    names: Any
    """A pyarrow array of texts without a null."""
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
        return len(self.names)

    @classmethod
    def of(cls, specs: Sequence[Spec]) -> Specs:
        """Combine descriptions of rows."""
        different: dict[str | None, int] = {}
        codes = [different.setdefault(spec.dtype, len(different)) for spec in specs]
        return Specs(
            names=array_of_texts([spec.name for spec in specs]),
            dtypes=tuple(different),
            dtype=np.array(codes, dtype=np.intp),
            **_shapes([spec.shape for spec in specs]),
        )

    @classmethod
    def of_arrays(cls, names: Sequence[str], arrays: Sequence[Array]) -> Specs:
        """Describe arrays; raise like `Spec.of` for the first invalid one."""
        try:
            return cls._of_arrays(names, arrays)
        except (FormatError, ValueError, TypeError, pa.ArrowException):
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
            names=array_of_texts(names),
            dtypes=tuple(different),
            dtype=codes,
            **_shapes([array.shape for array in arrays]),
        )
        if (np.diff(text_buffers(specs.names)[0]) == 0).any():
            raise ValueError("a tensor has no name")
        return specs

    def some(self, rows: Any) -> Specs:
        """Return the descriptions of some rows, in the given order."""
        begins = self.shape_at[rows]
        counts = self.shape_at[np.asarray(rows) + 1] - begins
        return Specs(
            names=self.names.take(array_of_numbers(rows, pa.int64())),
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
        return self._of_dtypes([1 if name is None else parse_dtype(name).itemsize for name in self.dtypes])

    @Lazy
    def codec_itemsizes(self) -> Offsets:
        """Size of an element of each row for its codec: 1 for text, and half a complex number."""
        sizes = [1 if name is None or name[0] in "SU" else parse_dtype(name).itemsize for name in self.dtypes]
        is_complex = [name is not None and name.lstrip("<>").startswith("complex") for name in self.dtypes]
        return self._of_dtypes(np.where(is_complex, np.array(sizes) // 2, sizes))

    def _of_dtypes(self, numbers: Any) -> Offsets:
        """Return for each row the value of its dtype."""
        if len(self.dtypes) == 1:
            return np.broadcast_to(np.int64(numbers[0]), len(self))
        of_rows: Offsets = np.array(numbers, dtype=np.int64)[self.dtype]
        return of_rows

    def name(self, row: int) -> str:
        """Return the name of one row."""
        name: str = self.names[row].as_py()
        return name

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of one row."""
        return tuple(self.sides[self.shape_offsets[row] : self.shape_offsets[row + 1]].tolist())

    def spec(self, row: int) -> Spec:
        """Return the description of one row."""
        return Spec(name=self.name(row), dtype=self.dtypes[self.dtype[row]], shape=self.shape(row))

    def find(self, name: str) -> Any:
        """Return the numbers of the rows with a name, ascending."""
        try:
            # Not `pyarrow.scalar`: it imports pandas (see `values_of`).
            wanted = array_of_texts([name])[0]
        except UnicodeEncodeError:
            return np.empty(0, dtype=np.intp)
        return values_of(pc.indices_nonzero(pc.equal(self.names, wanted))).astype(np.intp)


def _shapes(shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    return {
        "shape_offsets": offsets_of(np.fromiter(map(len, shapes), dtype=np.int64, count=len(shapes))),
        "sides": np.fromiter(chain.from_iterable(shapes), dtype=np.int64),
    }
