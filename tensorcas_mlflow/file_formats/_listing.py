"""The tensors of a file: their specs, their checked locations, and their bytes, mapped, read, inflated or reordered."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.dtypes import DType
from tensorcas_mlflow.base.tensors import (
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_TENSOR_BYTES,
    NOT_IN_NAMES,
    Offsets,
    Spec,
    aligned_bytes,
    bytes_of,
    empty_array,
)
from tensorcas_mlflow.errors import CorruptError, FormatError
from tensorcas_mlflow.file_formats._headers import HeaderEntry, item_bytes, name_or_none
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, spilled
from tensorcas_mlflow.layout.manifests import Numbers, Specs

EXAMPLE_INPUT = "example input"
"""Type, in ``left_out``, of a tensor that a model was traced with."""
OTHER_FILE = "another file"
"""Type, in ``left_out``, of a file beside the files of a folder's checkpoint, under the file's name."""

PIECE_BYTES = 16 << 20
_INFLATE_BYTES = 1 << 20
_RAW_DEFLATE = -15
_MAX_TENSORS = 1 << 20
_MAX_SHARED_BYTES = 64 << 20
"""A tensor up to this size may repeat one element, as an expanded tensor does; a larger one repeats at most half."""
_MAX_INFLATION = 1040
"""DEFLATE expands no stream more than 1032 times (zlib's technical details)."""


def left_out_parts(left_out: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of the checkpoint itself that are left out, by name, with their type.

    Example inputs and other files are no part of it: a caller need not permit their absence.
    """
    return {name: kind for name, kind in left_out.items() if kind not in (EXAMPLE_INPUT, OTHER_FILE)}


class Tensors(Protocol):
    """Tensors that can be written into a file of any format, read one at a time."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Plain JSON values."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Further tensors that cannot be read, by name, with the file's own name of their type."""
        ...

    def specs(self) -> Sequence[Spec]:
        """Describe the tensors, in order; each has a dtype and a name of its own."""
        ...

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Read tensors one after the other, holding some 16 MiB at a time.

        Args:
            names: The tensors, in the order of reading.

        Yields:
            A name and bytes of that tensor, in C order of its elements. A large tensor comes in several pieces, an
            empty one in none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """One tensor of a file, and the range of its bytes."""

    spec: Spec
    source: int
    """Index of the file in `Listing.sources`."""
    start: int
    """First byte in that file."""
    n_bytes: int
    """Size of the range. With ``strides`` it may differ from the tensor's own size."""
    strides: tuple[int, ...] | None = None
    """Step of each dimension in elements; None for C order."""
    deflated: int | None = None
    """For a range that is a raw DEFLATE stream (RFC 1951): the number of inflated bytes before the elements."""
    swapped: bool = False
    """True if each number has the other byte order than this machine."""
    whole_bytes: int | None = None
    """Inflated size of a deflated range. Reading checks it, and the end of the stream: by ``checksum``, or without one
    as that of a zlib stream (RFC 1950), with its Adler-32."""
    checksum: tuple[int, int] | None = None
    """The CRC-32 of the archive member that the range is, or whose end the elements are, and the CRC-32 of the member's
    bytes before the range. Reading checks it."""

    @property
    def is_plain(self) -> bool:
        """True if the bytes lie as in a store: contiguous, in C order."""
        return self.strides is None and self.deflated is None and not self.swapped


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The tensors of one file, or of several files of one checkpoint; it is a `Tensors`, too.

    Every location has been checked: it lies in its file.
    """

    format: str
    """The format's name: ``safetensors``, ``torch``, …"""
    sources: Sequence[ByteSource]
    locations: Mapping[str, TensorLocation]
    """By the tensor's name, in the order of the file."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values that the file holds beside its tensors."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tensors without a numpy dtype, by name, with the file's own name of their type."""

    def specs(self) -> list[Spec]:
        """Describe the tensors, in order."""
        return [location.spec for location in self.locations.values()]

    def columns(self) -> Specs:
        """Describe the tensors, in order, without a `Spec` of each."""
        if isinstance(self.locations, FlatTable):
            return self.locations.specs
        if isinstance(self.locations, LocationTable):
            return Specs.described(*self.locations.described())
        return Specs.of(self.specs())

    def array(self, name: str) -> Array:
        """Return one tensor: a view of the mapped file if it lies there in C order, else a new array.

        Raises:
            KeyError: There is no tensor of that name.
            CorruptError: The tensor is damaged, and its checksum or compression shows it.
            BackendError: The storage does not give it.
        """
        location = self.locations[name]
        return read_array(self.sources[location.source], location)

    def check(self, location: TensorLocation, data: memoryview) -> None:
        """Check bytes that the caller has read of a plain location; raises `CorruptError`."""
        check_bytes(self.sources[location.source], location, data)

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Read tensors one after the other; see `Tensors.stream`.

        A large tensor that is not in C order goes through a temporary file if it is deflated or not mapped.
        """
        for name in names:
            location = self.locations[name]
            for piece in read_pieces(self.sources[location.source], location):
                yield name, piece


def span_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements from a tensor's first to its last, both included; no stride is negative."""
    if 0 in shape:
        return 0
    return 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))


def is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether the elements are contiguous, in C order."""
    n_elements = 1
    for side, stride in zip(reversed(shape), reversed(strides), strict=True):
        if side != 1 and stride != n_elements:
            return 0 in shape
        n_elements *= side
    return True


def read_array(source: ByteSource, location: TensorLocation) -> Array:
    """Return a tensor; see `Listing.array`."""
    spec = location.spec
    if not spec.n_bytes:
        return empty_array(spec)
    elements = _elements(source, location)
    if location.strides is None and not location.swapped:
        return elements.reshape(spec.shape)
    array = _in_shape(elements, location)
    out = empty_array(spec)
    np.copyto(out, array)
    return _in_native_order(out) if location.swapped else out


def read_pieces(source: ByteSource, location: TensorLocation) -> Iterator[memoryview]:
    """Read a tensor in C order, some `PIECE_BYTES` at a time; see `Listing.stream`. Raises as `Listing.array`."""
    if not location.spec.n_bytes:
        return
    if location.strides is None and not location.swapped:
        yield from _plain_pieces(source, location) if location.deflated is None else _inflated(source, location)
        return
    for block in _blocks(_in_shape(_mapped_elements(source, location), location)):
        contiguous = np.ascontiguousarray(block)
        if location.swapped:
            contiguous = _in_native_order(contiguous.copy() if contiguous is block else contiguous)
        yield bytes_of(contiguous)


def _plain_pieces(source: ByteSource, location: TensorLocation) -> Iterator[memoryview]:
    stop = location.start + location.n_bytes
    crc = location.checksum[1] if location.checksum else 0
    for start in range(location.start, stop, PIECE_BYTES):
        piece = source.read(start, min(PIECE_BYTES, stop - start))
        if location.checksum:
            crc = zlib.crc32(piece, crc)
        yield piece
    _check_crc(source, location, crc)


def _elements(source: ByteSource, location: TensorLocation) -> Array:
    """Return the elements in the order of the file."""
    dtype = location.spec.numpy_dtype
    if location.deflated is not None:
        elements = aligned_bytes(_inflated_bytes(location))
        at = 0
        for piece in _inflated(source, location):
            elements[at : at + len(piece)] = piece
            at += len(piece)
        return elements.view(dtype)
    view = source.view(location.start, location.n_bytes)
    if view is None:
        read = aligned_bytes(location.n_bytes)
        source.read_into(location.start, read.data)
        view = read.data
    if location.checksum:
        _check_crc(source, location, zlib.crc32(view, location.checksum[1]))
    return np.frombuffer(view, dtype)


def _mapped_elements(source: ByteSource, location: TensorLocation) -> Array:
    """Return the elements in the order of the file; many that are not mapped come from a nameless temporary file."""
    n_bytes = _inflated_bytes(location)
    if n_bytes <= PIECE_BYTES or (
        location.deflated is None and source.view(location.start, location.n_bytes) is not None
    ):
        return _elements(source, location)
    pieces = _plain_pieces(source, location) if location.deflated is None else _inflated(source, location)
    return np.frombuffer(spilled(pieces), location.spec.numpy_dtype)


def _inflated_bytes(location: TensorLocation) -> int:
    """Return the size of the elements, inflated."""
    spec = location.spec
    if location.strides is None:
        return spec.n_bytes
    return span_of(spec.shape, location.strides) * spec.numpy_dtype.itemsize


def _inflated(source: ByteSource, location: TensorLocation) -> Iterator[memoryview]:
    """Inflate the elements of a deflated range, never more than the location promises."""
    assert location.deflated is not None
    first, last = location.deflated, location.deflated + _inflated_bytes(location)
    at, stop = location.start, location.start + location.n_bytes
    whole = location.whole_bytes
    engine = zlib.decompressobj(_RAW_DEFLATE if whole is None or location.checksum else zlib.MAX_WBITS)
    crc = n_done = 0
    tail: bytes | memoryview = b""
    try:
        while not engine.eof and (whole is not None or n_done < last):
            if not tail and at < stop:
                tail = source.read(at, min(_INFLATE_BYTES, stop - at))
                at += len(tail)
            piece = engine.decompress(tail, PIECE_BYTES)
            tail = engine.unconsumed_tail
            if not piece and not tail and at == stop and not engine.eof:
                raise CorruptError(source.name, f"the bytes of {location.spec.name!r} end too early")
            if location.checksum:
                crc = zlib.crc32(piece, crc)
            begin, n_done = n_done, n_done + len(piece)
            if whole is not None and n_done > whole:
                break
            wanted = memoryview(piece)[max(0, first - begin) : max(0, last - begin)]
            if wanted:
                yield wanted
    except zlib.error as error:
        raise CorruptError(source.name, f"the bytes of {location.spec.name!r} cannot be inflated: {error}") from error
    is_over = engine.eof and not engine.unused_data and at == stop
    if n_done < last or (whole is not None and (n_done != whole or not is_over)):
        raise CorruptError(source.name, f"the bytes of {location.spec.name!r} are not as many as its file says")
    _check_crc(source, location, crc)


def check_bytes(source: ByteSource, location: TensorLocation, data: memoryview) -> None:
    """Compare the bytes of a plain location with its checksum, if it has one.

    Raises:
        CorruptError: They differ.
    """
    if location.checksum:
        _check_crc(source, location, zlib.crc32(data, location.checksum[1]))


def _check_crc(source: ByteSource, location: TensorLocation, crc: int) -> None:
    if location.checksum and location.checksum[0] != crc:
        raise CorruptError(source.name, f"the bytes of {location.spec.name!r} do not have their CRC-32")


def _in_shape(elements: Array, location: TensorLocation) -> Array:
    """View elements in the tensor's shape; the constructor's checks guarantee that its strides span no more."""
    spec, item_bytes = location.spec, elements.itemsize
    if location.strides is None:
        return elements.reshape(spec.shape)
    assert span_of(spec.shape, location.strides) <= elements.size
    strides = [stride * item_bytes for stride in location.strides]
    return np.lib.stride_tricks.as_strided(elements, spec.shape, strides, writeable=False)


def _in_native_order(array: Array) -> Array:
    """Reverse the bytes of each number, in location."""
    part_bytes = array.itemsize // (2 if array.dtype.kind == "c" else 1)
    if part_bytes > 1:
        # As plain numbers: the dtypes of ml_dtypes have one byte order only.
        array.reshape(-1).view(f"u{part_bytes}").byteswap(inplace=True)
    return array


def _blocks(array: Array) -> Iterator[Array]:
    """Cut an array along its first dimensions into blocks of at most `PIECE_BYTES`, in C order."""
    n_bytes = math.prod(array.shape) * array.itemsize
    if n_bytes <= PIECE_BYTES or not array.ndim:
        yield array
        return
    n_rows = PIECE_BYTES * len(array) // n_bytes
    if n_rows:
        yield from (array[start : start + n_rows] for start in range(0, len(array), n_rows))
    else:
        for row in array:
            yield from _blocks(row)


class RecordField(NamedTuple):
    """One field of an array of records: an array with strides."""

    name: str
    dtype: str
    offset: int
    """Bytes before it in a record."""
    step: int
    """Elements of the field's own size from one record to the next."""


def record_fields(dtype: DType) -> tuple[RecordField, ...]:
    """Return the fields of records; none if a field cannot be read as an array, or the dtype has no fields.

    Nobody writes the bytes between fields: they differ from save to save.
    """
    found: list[RecordField] = []
    for name in dtype.names or ():
        assert dtype.fields is not None
        field, offset = dtype.fields[name][:2]
        word = name_or_none(field)
        if word is None:
            return ()
        if not field.itemsize or field.fields or offset % field.itemsize or dtype.itemsize % field.itemsize:
            return ()
        found.append(RecordField(name, word, offset, dtype.itemsize // field.itemsize))
    return tuple(found)


def fortran_strides(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of an array in Fortran order; None if that is C order, too."""
    if sum(side != 1 for side in shape) < 2 or 0 in shape:
        return None
    return tuple(accumulate(shape[:-1], mul, initial=1))


class _Row(NamedTuple):
    """The fields of a `TensorLocation`, without its name."""

    dtype: str
    shape: tuple[int, ...]
    source: int
    start: int
    n_bytes: int
    strides: tuple[int, ...] | None = None
    deflated: int | None = None
    swapped: bool = False
    whole_bytes: int | None = None
    checksum: tuple[int, int] | None = None


class LocationTable(Mapping[str, TensorLocation]):
    """The locations of a listing's tensors, in order, each checked when it is added.

    A `TensorLocation` is built on access: a file may have a hundred thousand tensors, of which one is read.
    """

    def __init__(self, *sources: ByteSource) -> None:
        """Begin without tensors.

        Args:
            sources: The files, as far as they are known.
        """
        self.sources: list[ByteSource] = [*sources]
        self.left_out: dict[str, str] = {}
        """Tensors without a numpy dtype, with the file's own name of their type."""
        self._rows: dict[str, _Row] = {}
        self._last_numbers: dict[str, int] = {}
        """Last numbers behind names that were taken."""

    def listing(self, format: str, metadata: Mapping[str, Any] | None = None) -> Listing:
        """Return the listing of all tensors."""
        return Listing(
            format=format, sources=self.sources, locations=self, metadata=metadata or {}, left_out=self.left_out
        )

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        start: int,
        n_bytes: int,
        source: int = 0,
        strides: tuple[int, ...] | None = None,
        deflated: int | None = None,
        swapped: bool = False,
        whole_bytes: int | None = None,
        checksum: tuple[int, int] | None = None,
    ) -> None:
        """Add a tensor; `TensorLocation` describes the other arguments.

        Args:
            name: The tensor's name in the file.
            dtype: A name of `tensorcas_mlflow.base.dtypes`.
            shape: Sides.

        Raises:
            FormatError: The name is invalid or taken, or the range does not fit the file, the dtype and the shape.
        """
        self._check_name(name)
        file_bytes = self.sources[source].size
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
        row = _Row(dtype, shape, source, start, n_bytes, strides, deflated, swapped, whole_bytes, checksum)
        self._rows[name] = row

    def add_view(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        *,
        offset: int,
        storage: FileRange,
        swapped: bool = False,
    ) -> None:
        """Add a tensor that views a storage.

        Args:
            name: The tensor's name in the file.
            dtype: A name of `tensorcas_mlflow.base.dtypes`.
            shape: Sides.
            strides: Step of each dimension in elements.
            offset: First element of the tensor in the storage.
            storage: Range of the first file, perhaps deflated.
            swapped: See `TensorLocation`.

        Raises:
            FormatError: As `add`, or the tensor exceeds its storage.
        """
        n_item_bytes = item_bytes(dtype)
        begin, n_bytes = offset * n_item_bytes, span_of(shape, strides) * n_item_bytes
        if n_bytes and begin + n_bytes > storage.raw_bytes:
            raise FormatError(f"tensor {name[:80]!r} reaches beyond its storage")
        if not n_bytes:
            begin = 0
        self.add(
            name,
            dtype,
            shape,
            start=storage.start if storage.is_deflated else storage.start + begin,
            n_bytes=storage.n_bytes if storage.is_deflated else n_bytes,
            strides=None if is_c_order(shape, strides) else strides,
            deflated=begin if storage.is_deflated else None,
            swapped=swapped and n_item_bytes > 1,
        )

    def add_array(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        *,
        start: int,
        source: int = 0,
        strides: tuple[int, ...] | None = None,
        fields: Sequence[RecordField] = (),
        member: FileRange | None = None,
        checksum: tuple[int, int] | None = None,
    ) -> None:
        """Add an array of numpy; an array of records is added field by field, as ``<name>.<field>``.

        Args:
            name: The array's name.
            dtype: Its dtype, unless it has ``fields``.
            shape: Sides.
            start: First byte, in the source or in the inflated ``member``.
            source: See `TensorLocation`.
            strides: See `TensorLocation`; None for records.
            fields: The fields of records, from `record_fields`.
            member: Deflated range that holds the array.
            checksum: See `TensorLocation`; a field that is not in a deflated member cannot check it.

        Raises:
            FormatError: As `add`.
        """
        arrays = [(name, dtype, start, strides)]
        if fields:
            rows = [*accumulate(shape[:0:-1], mul, initial=1)][::-1] if shape else []
            arrays = [
                (f"{name}.{each.name}", each.dtype, start + each.offset, tuple(row * each.step for row in rows))
                for each in fields
            ]
            checksum = checksum if member is not None else None
        for own_name, own_dtype, begin, steps in arrays:
            n_elements = math.prod(shape) if steps is None else span_of(shape, steps)
            n_bytes = n_elements * item_bytes(own_dtype)
            if fields and not n_bytes:
                begin, steps = 0, None
            self.add(
                own_name,
                own_dtype,
                shape,
                start=begin if member is None else member.start,
                n_bytes=n_bytes if member is None else member.n_bytes,
                source=source,
                strides=steps,
                deflated=None if member is None else begin,
                whole_bytes=None if member is None else member.raw_bytes,
                checksum=checksum,
            )

    def join(self, listing: Listing, named: Callable[[str], str] = str, *, numbered: bool = False) -> None:
        """Add the tensors of another listing, its sources, and the names that it leaves out.

        Args:
            listing: The other one.
            named: Returns a tensor's name here.
            numbered: Whether a name that is taken gets a number; otherwise it raises as `add` does.
        """
        others = listing.locations
        assert isinstance(others, LocationTable | FlatTable)
        is_same_file = len(listing.sources) == 1 and listing.sources[0] in self.sources[:1]
        first = 0 if is_same_file else len(self.sources)
        if not is_same_file:
            self.sources += listing.sources
        choose = (lambda name: self.unused(named(name))) if numbered else named
        for name in others:
            chosen = choose(name)
            row = others._row(name)
            self._check_name(chosen)
            self._rows[chosen] = row._replace(source=first + row.source)
        for name, kind in listing.left_out.items():
            self.leave_out(choose(name), kind)

    def unused(self, name: str) -> str:
        """Return a name, with a number if it is taken."""
        unused = name
        while unused in self._rows or unused in self.left_out:
            number = self._last_numbers[name] = self._last_numbers.get(name, 1) + 1
            unused = f"{name} ({number})"
        return unused

    def leave_out(self, name: str, kind: str) -> None:
        """Note a tensor without a numpy dtype; raises as `add` for its name."""
        self._check_name(name)
        self.left_out[name] = kind

    def described(self) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
        """Return the names, dtypes and shapes of the tensors, in order."""
        rows = self._rows.values()
        return list(self._rows), [row.dtype for row in rows], [row.shape for row in rows]

    def __getitem__(self, name: str) -> TensorLocation:
        dtype, shape, source, start, n_bytes, strides, deflated, swapped, whole_bytes, checksum = self._row(name)
        return TensorLocation(
            spec=Spec(name=name, dtype=dtype, shape=shape),
            source=source,
            start=start,
            n_bytes=n_bytes,
            strides=strides,
            deflated=deflated,
            swapped=swapped,
            whole_bytes=whole_bytes,
            checksum=checksum,
        )

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, name: str) -> _Row:
        return self._rows[name]

    def _check_name(self, name: str) -> None:
        if name in self._rows or name in self.left_out:
            raise FormatError(f"two tensors are called {name[:80]!r}")
        if len(self._rows) >= _MAX_TENSORS or len(self.left_out) >= _MAX_TENSORS:
            raise FormatError(f"it has more than {_MAX_TENSORS} tensors")
        # No foreign file may bring a skeleton along: a skeleton may be a pickle.
        if not name or name == SKELETON:
            raise FormatError(f"no tensor can be called {name!r}")
        if len(name) > MAX_NAME_BYTES or not name.isascii() or not name.isprintable():
            _check_odd_name(name)


class FlatTable(Mapping[str, TensorLocation]):
    """The locations of a file's tensors as columns. The tensors lie one after the other, each in C order."""

    def __init__(self, specs: Specs, begins: Offsets, ends: Offsets) -> None:
        """Take checked columns, in the order of the file.

        Args:
            specs: The tensors. No two have one name.
            begins: First byte of each tensor in the file.
            ends: For each tensor the position behind its last byte.
        """
        self.specs = specs
        self._numbers = Numbers(specs)
        self._begins = begins
        self._ends = ends

    def at(self, row: int) -> TensorLocation:
        """Return the location of a tensor by its number."""
        start = int(self._begins[row])
        return TensorLocation(spec=self.specs.spec(row), source=0, start=start, n_bytes=int(self._ends[row]) - start)

    def __getitem__(self, name: str) -> TensorLocation:
        return self.at(self._numbers.number(name))

    def _row(self, name: str) -> _Row:
        location = self[name]
        assert location.spec.dtype is not None
        return _Row(location.spec.dtype, location.spec.shape, 0, location.start, location.n_bytes)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs.names)

    def __len__(self) -> int:
        return len(self.specs)


def listing_of_entries(
    format: str,
    source: ByteSource,
    entries: Sequence[HeaderEntry],
    data_at: int,
    metadata: Mapping[str, Any],
) -> Listing:
    """Return the listing of tensors without gaps, from a position to the end of a file.

    Raises:
        FormatError: The tensors end elsewhere, or one has an invalid name.
    """
    end = data_at + (entries[-1].end if entries else 0)
    if end != source.size:
        raise FormatError(f"its tensors end at byte {end}, and the file at byte {source.size}")
    table = LocationTable(source)
    for entry in entries:
        if entry.dtype is None:
            table.leave_out(entry.name, entry.kind)
        else:
            start, n_bytes = data_at + entry.begin, entry.end - entry.begin
            table.add(entry.name, entry.dtype, entry.shape, start=start, n_bytes=n_bytes)
    return table.listing(format, metadata)


def _check_odd_name(name: str) -> None:
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise FormatError(f"a tensor's name is no text: {name[:80]!r}") from error
    if n_bytes > MAX_NAME_BYTES or any(character in name for character in NOT_IN_NAMES):
        raise FormatError(f"no tensor can be called {name[:80]!r} ({n_bytes} bytes)")
