"""Search for derived tensors: new rows of a save whose bytes are a function of stored rows (``docs/design/codecs.md``).

A search guesses a function and its inputs, tries the function on a sample of elements, and proves it by the digest of
every chunk. A wrong guess costs time and never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise, permutations
from typing import Any, NamedTuple, Protocol

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest, digest_all
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.sketch import LIKELY_BITS, N_WORDS, SURE_BITS, chance_of, evidence_of, positions, words_of
from tensorcas_mlflow.base.tensors import distinct, offsets_of
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.chunk_io import Catalog
from tensorcas_mlflow.codecs import BLOCK_BYTES, BLOCK_ELEMENTS, Q8_0, Bounds, Kind, bounds, check, evaluate
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout.manifests import Derivation, Manifest, Row
from tensorcas_mlflow.layout.packs import Mask
from tensorcas_mlflow.store._sketches import Sketched, SketchedStore, Sketches, read_manifest, sketches_of
from tensorcas_mlflow.store._sources import Source, TensorSource

LEAST_DERIVED_BYTES = 64 << 10
"""A smaller row is not worth the search."""
MOST_DERIVED_BYTES = 256 << 20
"""A larger row is not derived: a save evaluates a function in memory, whole."""
_MOST_INPUT_BYTES = 512 << 20
_MOST_FETCHED = 3.5
"""Bytes of inputs that an object store may have to deliver for each byte of a derived row (``docs/design/codecs.md``,
Bases in an object store)."""
_N_SHAPES = 8
"""Number of tensors, the largest ones of different shapes, that a search compares with all sketches."""
_N_MANIFESTS = 4
"""Number of earlier checkpoints whose tensors are tried."""
_N_TRIED = 3
"""Number of guesses tried for one tensor and one earlier checkpoint."""
_MOST_FAILED = 8
"""Number of failed tries after which a search gives a function of an earlier checkpoint up."""
_N_SAMPLED = 512
"""Number of elements on which a guess is tried."""
_MOST_STEPS = 40
"""Words of a mean and of its inputs differ by at most this: about a quarter of a number."""
_FEW_WORDS = 4
"""With fewer known words, a sketch tells nothing."""
_WORD_STEP = np.float32(2**-7)
"""A word has the first eight bits of a number's mantissa."""
_PARTS = (2, 3, 4, 8)
"""Numbers of equal parts in which a search expects tensors to be cut."""

_AXES: Mapping[int, Sequence[tuple[int, ...]]] = {
    2: [(1, 0)],
    3: [axes for axes in permutations(range(3)) if axes != (0, 1, 2)],
    # Between OIHW, HWIO and OHWI; of transposed and depthwise convolutions; and Fortran's order.
    4: [
        *((2, 3, 1, 0), (3, 2, 0, 1), (0, 2, 3, 1), (0, 3, 1, 2), (3, 0, 1, 2), (1, 2, 3, 0)),
        *((1, 0, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0)),
    ],
    5: [(2, 3, 4, 1, 0), (4, 3, 0, 1, 2), (0, 2, 3, 4, 1), (0, 4, 1, 2, 3), (1, 0, 2, 3, 4), (4, 3, 2, 1, 0)],
}
"""Orders of axes that a search tries, by the number of axes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Derived:
    """A row of a save as a function of stored rows: proven for all of its chunks at hand."""

    function: str
    """Its name (``docs/format.md``, Functions)."""
    params: Mapping[str, Any]
    inputs: Sequence[Row]
    """The stored rows."""
    row: Row
    """The row, with the digests of all chunks of the result; a stream may have brought the first ones only."""
    made: Callable[[], memoryview] = field(repr=False)
    """Evaluates the function again, and returns the bytes of the result."""

    @property
    def input_digests(self) -> Digests:
        """The digests of the chunks of all inputs."""
        return np.concatenate([row.digests for row in self.inputs])


class Guess(NamedTuple):
    """A function of one input."""

    function: str
    params: Mapping[str, Any]

    def places(self, shape: tuple[int, ...], output: tuple[int, ...], at: Any) -> tuple[Any, Any]:
        """Return the places of an input's elements in the result, counted in C order, and whether they are in it.

        Args:
            shape: Shape of the input.
            output: Shape of the result.
            at: Places in the input.
        """
        is_in = np.ones(at.shape, dtype=bool)
        if self.function == "permute":
            found = np.unravel_index(at, shape)
            return np.ravel_multi_index([found[axis] for axis in self.params["axes"]], output), is_in
        if self.function == "slice":
            axis = self.params["axis"]
            sides = list(np.unravel_index(at, shape))
            sides[axis] = sides[axis] - self.params["start"]
            is_in = (sides[axis] >= 0) & (sides[axis] < output[axis])
            return np.ravel_multi_index([np.where(is_in, each, 0) for each in sides], output), is_in
        return at, is_in


_CAST = Guess("cast", {})
_BLOCKS = Guess(Q8_0, {})
_MEAN = Guess("mean", {})


def guesses(wanted: Row, dtype: str | None, shape: tuple[int, ...]) -> list[Guess]:
    """Return functions that may give a row from an input of some dtype and shape, the likeliest first."""
    made, spec, is_near = Kind(wanted.spec.dtype, wanted.spec.shape), wanted.spec, Kind(dtype, shape)
    found: list[Guess] = [_BLOCKS] if spec.dtype is None else []
    if spec.dtype is not None and is_near.n_elements == made.n_elements:
        if dtype != spec.dtype:
            found.append(_CAST)
        found += [
            Guess("permute", {"axes": list(axes)})
            for axes in (_AXES.get(len(shape), ()) if len(shape) == len(spec.shape) else ())
            if tuple(shape[axis] for axis in axes) == spec.shape
        ]
    elif spec.dtype is not None and len(shape) == len(spec.shape):
        differ = [axis for axis, (one, other) in enumerate(zip(shape, spec.shape, strict=True)) if one != other]
        if len(differ) == 1 and 0 < spec.shape[differ[0]] < shape[differ[0]]:
            [axis] = differ
            side, n = spec.shape[axis], shape[axis]
            starts = {*range(0, n - side + 1, side), n - side}
            found += [Guess("slice", {"axis": axis, "start": start}) for start in sorted(starts)]
    return [guess for guess in found if _fits(guess, [is_near], made)]


def _fits(guess: Guess, inputs: Sequence[Kind], output: Kind) -> bool:
    try:
        check(guess.function, guess.params, inputs, output)
    except FormatError:
        return False
    return True


def _largest(rows: Mapping[int, Row]) -> list[int]:
    """Return the numbers of the largest rows of different shapes."""
    by_kind: dict[Kind, int] = {}
    for number in sorted(rows, key=lambda number: -rows[number].spec.n_bytes):
        by_kind.setdefault(_kind(rows[number]), number)
    return list(by_kind.values())[:_N_SHAPES]


def _kind(row: Row) -> Kind:
    return Kind(row.spec.dtype, row.spec.shape)


class Elements:
    """Elements of one row of a save, as far as its bytes are at hand."""

    def __init__(self, source: Source, number: int, row: Row) -> None:
        self.row = row
        self._source = source
        self._number = number
        self.dtype = np.dtype(np.uint8) if row.spec.dtype is None else parse_dtype(row.spec.dtype)
        begin, end = source.columns.chunk_at[number : number + 2].tolist()
        self._chunks = np.arange(begin, end)
        self._ends = np.cumsum(source.sizes[begin:end])
        self._held: dict[int, Any] = {}
        self._words: dict[Any, Any] = {}
        self._sampled: dict[Any, _Codes] = {}

    def take(self, at: Any) -> tuple[Any, Any]:
        """Return elements by their places in C order, and whether they are at hand; others are zero."""
        if isinstance(self._source, TensorSource):
            [taken] = self._source.elements(np.array([self._number]), at[None], self.dtype)
            return taken, np.ones(len(at), dtype=bool)
        size = self.dtype.itemsize
        begins = at * size
        chunks = self._ends.searchsorted(begins, side="right")
        raw, is_here = np.zeros((len(at), size), np.uint8), np.zeros(len(at), dtype=bool)
        for chunk in distinct(chunks[chunks < len(self._ends)]).tolist():
            data = self._piece(chunk)
            if data is None:
                continue
            mine = (chunks == chunk).nonzero()[0]
            first = begins[mine] - (int(self._ends[chunk]) - len(data))
            mine, first = mine[first + size <= len(data)], first[first + size <= len(data)]
            raw[mine] = data[first[:, None] + np.arange(size)]
            is_here[mine] = True
        return raw.view(self.dtype)[:, 0], is_here

    def _piece(self, chunk: int) -> Any:
        if chunk not in self._held:
            number = self._chunks[chunk : chunk + 1]
            is_held = bool(self._source.holds(number)[0])
            data = next(self._source.pieces(number)).data[0] if is_held else None
            self._held[chunk] = None if data is None else np.frombuffer(data, np.uint8)
        return self._held[chunk]

    def words(self, guess: Guess, shape: tuple[int, ...]) -> Any:
        """Return the words that a sketch of an input of some shape has if a guess is right; 0 for those unknown."""
        key = (guess.function, repr(guess.params), shape)
        if key not in self._words:
            places, is_in = guess.places(shape, self.row.spec.shape, positions(Kind("uint8", shape).n_elements))
            values, is_here = self.take(places)
            self._words[key] = np.where(is_here & is_in, words_of(values), 0).astype(np.uint16)
        return self._words[key]

    def evidence(self, guess: Guess, shape: tuple[int, ...], others: Any) -> Any:
        """Return the evidence in bits that a guess is right, for inputs of some shape with known sketches.

        Args:
            guess: The function.
            shape: Shape of the inputs.
            others: Their sketches, one column each.
        """
        if guess.function == Q8_0:
            return self._codes(shape).evidence(others)
        return evidence_of(self.words(guess, shape), others, self.chance)

    def tells_little(self, guess: Guess, shape: tuple[int, ...]) -> bool:
        """Tell whether a sketch cannot show if a guess is right."""
        if guess.function == Q8_0:
            return bool(self._codes(shape).bits.sum() < LIKELY_BITS)
        return bool(np.count_nonzero(self.words(guess, shape)) < _FEW_WORDS)

    @Lazy
    def chance(self) -> float:
        """The chance that a word of another tensor is near one of these."""
        return chance_of(self.words(_CAST, self.row.spec.shape))

    def _codes(self, shape: tuple[int, ...]) -> _Codes:
        """Return the blocks with the elements that the sketch of an input of some shape has."""
        if shape not in self._sampled:
            block, element = np.divmod(positions(Kind("uint8", shape).n_elements), BLOCK_ELEMENTS)
            at = block[:, None] * BLOCK_BYTES + np.arange(BLOCK_BYTES)
            raw, is_here = self.take(at.reshape(-1))
            stood_for = bounds(raw.reshape(at.shape))
            self._sampled[shape] = _Codes.of(stood_for, element, is_here.reshape(at.shape).all(axis=1))
        return self._sampled[shape]


class _Codes(NamedTuple):
    """The codes of quantized elements at the places of a sketch."""

    bounds: Bounds
    """The numbers that they stand for."""
    bits: Any
    """For each the evidence if the word of an input is among them; 0 for codes that are not at hand."""

    @classmethod
    def of(cls, blocks: Bounds, element: Any, is_here: Any) -> _Codes:
        """Take one element of each block: the others show how common its code is."""
        low, high = (np.take_along_axis(each, element[:, None], axis=1) for each in blocks)
        middle = (blocks.low + blocks.high)[is_here].reshape(-1) / 2
        shares = [float(((middle >= least) & (middle <= most)).mean()) for least, most in zip(low, high, strict=True)]
        bits = np.where(is_here, -np.log2(np.maximum(shares, 1 / max(1, len(middle)))), 0)
        return cls(Bounds(low, high), bits)

    def evidence(self, others: Any) -> Any:
        """Return the evidence for some sketches, one column each: none if a single word is not among the numbers."""
        values = (others.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(all="ignore"):
            slack = np.abs(values) * _WORD_STEP
            fits = (values + slack >= self.bounds.low) & (values - slack <= self.bounds.high)
        bits = np.where(others == 0, 0, self.bits[:, None])  # of a zero, or an unknown word
        return np.where((fits | (bits == 0)).all(axis=0), bits.sum(axis=0), 0)


class _Candidate(NamedTuple):
    """A guess and its input, a row of an earlier checkpoint."""

    guess: Guess
    row: int
    evidence: float


class _Group(NamedTuple):
    """Rows of one dtype and shape that may be inputs."""

    numbers: frozenset[int]
    known: Any
    """The stored ones among them with a sketch, ascending."""
    words: Any
    """Their sketches, one column each."""


class Earlier:
    """An earlier checkpoint or file with possible inputs."""

    def __init__(self, manifest: Manifest, sketched: Sketched | None) -> None:
        self.manifest = manifest
        self._sketched = sketched
        self._derived = {each.row for each in manifest.derived}
        self.n_failed: dict[str, int] = {}
        """For each function the number of tries that failed, if none succeeded."""

    @Lazy
    def _words(self) -> dict[int, Any]:
        """The sketches by row."""
        found = Sketched.stored("", self.manifest) if self._sketched is None else self._sketched
        return {} if found is None else dict(zip(found.rows.tolist(), found.words, strict=True))

    def stored(self, number: int) -> Row | None:
        """Return a row, unless it is derived itself: an input is stored."""
        return None if number in self._derived else self.manifest.columns.row(number)

    def named(self, name: str) -> int | None:
        """Return the number of the row with a name."""
        if name == "":
            return None
        try:
            return self.manifest.by_name.number(name)
        except (KeyError, FormatError):
            return None

    def has_other_kind(self, row: Row) -> bool:
        """Tell whether the row of the same name has another dtype or shape; sketches find those of the same kind."""
        number = self.named(row.spec.name)
        if number is None or not self.manifest.sketches:
            return number is not None
        columns, spec = self.manifest.columns, row.spec
        return (columns.dtypes[columns.dtype[number]], columns.shape(number)) != (spec.dtype, spec.shape)

    def again(self, row: Row) -> tuple[Any, list[Row]] | None:
        """Return the derivation of a row with the same content, and its inputs."""
        each = self._known.get(_content(row))
        return None if each is None else (each, [self.manifest.table.row(number) for number in each.inputs])

    @Lazy
    def _known(self) -> dict[Any, Any]:
        """The derivations, by the content of their rows."""
        columns = self.manifest.columns
        return {_content(columns.row(each.row)): each for each in self.manifest.derived}

    def candidates(self, elements: Elements) -> list[_Candidate]:
        """Return possible inputs of a row with their functions, the likeliest first."""
        row, found = elements.row, []
        own = self.named(row.spec.name)
        for (dtype, shape), group in self._groups.items():
            for guess in guesses(row, dtype, shape):
                bits = elements.evidence(guess, shape, group.words)
                found += [
                    _Candidate(guess, int(group.known[at]), float(bits[at]))
                    for at in (bits >= LIKELY_BITS).nonzero()[0].tolist()
                ]
                if own in group.numbers and (own not in self._words or elements.tells_little(guess, shape)):
                    found.append(_Candidate(guess, own, 0.0))
        return sorted(found, key=lambda each: (-each.evidence, each.row != own))

    def related(self, elements: Elements) -> int | None:
        """Return the row with as many elements that is nearest element by element; that of one name wins a tie.

        A mean of fine-tunes is farther from each of them than tensors that `compare` takes for related ones.
        """
        words, own = elements.words(_CAST, elements.row.spec.shape), self.named(elements.row.spec.name)
        best, most = None, (N_WORDS // 2, False)
        for (dtype, shape), group in self._groups.items():
            if Kind(dtype, shape).n_elements == _kind(elements.row).n_elements:
                steps = group.words - words[:, None]
                n_near = (np.abs(steps.view(np.int16).astype(np.int32)) <= _MOST_STEPS).sum(axis=0)
                for number, n in zip(group.known.tolist(), n_near.tolist(), strict=True):
                    if (n, number == own) >= most:
                        best, most = number, (n, number == own)
        return best

    def is_base(self, elements: Elements) -> bool:
        """Tell whether the row of the same name is near a row element by element, as far as sketches show it."""
        if elements.row.spec.dtype is None:
            return False
        own = self.named(elements.row.spec.name)
        if own is None or own not in self._words:
            return True
        words = elements.words(_CAST, elements.row.spec.shape)
        return bool(evidence_of(words, self._words[own][:, None], elements.chance)[0] >= LIKELY_BITS)

    @Lazy
    def _groups(self) -> dict[tuple[str | None, tuple[int, ...]], _Group]:
        """The rows that may be inputs, by dtype and shape."""
        columns = self.manifest.columns
        large = (columns.is_tensor & (columns.n_bytes >= LEAST_DERIVED_BYTES // 2)).nonzero()[0]
        numbers: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        shapes = columns.shapes(large)
        for number, shape, code in zip(large.tolist(), shapes, columns.dtype[large].tolist(), strict=True):
            numbers.setdefault((columns.dtypes[code], shape), []).append(number)
        return {kind: self._group(of_kind) for kind, of_kind in numbers.items()}

    def _group(self, numbers: Sequence[int]) -> _Group:
        known = [number for number in numbers if number in self._words and number not in self._derived]
        words = np.zeros((N_WORDS, len(known)), dtype=np.uint16)
        for at, number in enumerate(known):
            words[:, at] = self._words[number]
        return _Group(frozenset(numbers), np.array(known, dtype=np.int64), words)


def places_of_inputs(manifest: Manifest, source: Source) -> Any:
    """Return the numbers of a manifest's chunks of inputs in the source of its save; -1 for those stored before."""
    columns = source.columns
    mine = {_content(columns.row(number)): number for number in source.inputs}
    places = [np.empty(0, dtype=np.int64)]
    for row in manifest.inputs:
        number = mine.get(_content(row))
        if number is None:
            places.append(np.full(len(row.digests), -1, dtype=np.int64))
        else:
            places.append(np.arange(columns.chunk_at[number], columns.chunk_at[number + 1]))
    return np.concatenate(places)


def with_derived(manifest: Manifest, derived: Mapping[int, Derived]) -> Manifest:
    """Return the manifest of a save with derived rows.

    Args:
        manifest: A manifest without any.
        derived: The rows by number.
    """
    if not derived:
        return manifest
    n_rows = len(manifest.rows)
    numbers = {_content(row): number for number, row in enumerate(manifest.columns.each_row()) if number not in derived}
    inputs: list[Row] = []
    made: list[Derivation] = []
    for number, each in sorted(derived.items()):
        for row in each.inputs:
            if numbers.setdefault(_content(row), n_rows + len(inputs)) == n_rows + len(inputs):
                inputs.append(row)
        mine = tuple(numbers[_content(row)] for row in each.inputs)
        made.append(Derivation(number, each.function, each.params, mine))
    return replace(manifest, inputs=inputs, derived=tuple(made), sketches=b"", hints=b"")


def with_equal_rows(source: Source, found: Mapping[int, Derived]) -> dict[int, Derived]:
    """Add the rows of a save that are equal to derived rows: a row stored in full would keep the chunks of all of them.

    Args:
        source: The rows of the save.
        found: The derived rows by number.
    """
    columns = source.columns
    derived = {_content(each.row): each for each in found.values()}
    sizes = list({each.row.spec.n_bytes for each in found.values()})
    equal: dict[int, Derived] = {}
    for number in np.isin(columns.n_bytes, sizes).nonzero()[0].tolist():
        row = columns.row(number)
        if number not in found and number not in source.inputs and _content(row) in derived:
            equal[number] = replace(derived[_content(row)], row=row)
    return {**found, **equal}


def _content(row: Row) -> tuple[str | None, tuple[int, ...], bytes]:
    return row.spec.dtype, row.spec.shape, row.digests.tobytes()


class DerivingStore(SketchedStore, Protocol):
    """The parts of an open store that a search needs."""

    catalog: Catalog
    chunk_bytes: int


class Derivations:
    """Search for the derived rows of one save, of all batches of one stream, or of one stored checkpoint."""

    def __init__(
        self,
        store: DerivingStore,
        *,
        known: Sketches | None = None,
        without: str | None = None,
        are_made: Callable[[Digests], Mask] | None = None,
        most: int = _N_MANIFESTS,
    ) -> None:
        """Begin a search.

        Args:
            store: The store.
            known: Sketches of possible inputs; by default those of the store that this process knows.
            without: Digest of a manifest that has no input.
            are_made: Tells for each chunk whether it is derived, so that it is no input.
            most: Number of earlier checkpoints that are tried.
        """
        self._store = store
        self._most = most
        self._are_made = are_made
        self._known = known
        self._without = without
        self._useful: dict[str, Earlier] = {}
        """Earlier checkpoints with inputs of rows so far, by digest."""
        self._averaged: Sequence[Earlier] | None = None
        """The checkpoints whose means rows of this save may be; None before `look_for_means`."""
        self._at_hand: dict[str, Manifest] = {}
        """Manifests that need no read, by digest."""
        self._read: tuple[bytes, Any] = (b"", None)
        """The input read last."""

    def find(self, source: Source, rows: Mapping[int, Row], candidates: Sequence[Manifest]) -> dict[int, Derived]:
        """Find functions for rows.

        Args:
            source: The rows of the save, and their bytes.
            rows: The rows to derive, by number: with all of their chunks or, if a stream has not brought all, the
                first ones.
            candidates: Earlier checkpoints and files, the likeliest first.
        """
        self._at_hand = {each.digest: each for each in candidates}
        left = {number: Elements(source, number, rows[number]) for number in _largest(rows)}
        found: dict[int, Derived] = {}
        for earlier in self._earlier(list(left.values()), candidates):
            # Most saves have no relative, and come not so far.
            for number in rows.keys() - left.keys() - found.keys():
                left[number] = Elements(source, number, rows[number])
            for number, elements in sorted(left.items()):
                derived = self._derive(elements, earlier)
                if derived is not None:
                    found[number] = derived
                    del left[number]
                    self._useful.setdefault(earlier.manifest.digest, earlier)
            if not left:
                break
        self._read = b"", None
        return found

    def with_bases(self, source: Source, rows: Mapping[int, Row], parent: Manifest) -> set[int]:
        """Return the numbers of rows that are near the rows of the same names, as far as sketches show it.

        One of the rows of a shape speaks for all of them.

        Args:
            source: See `find`.
            rows: See there.
            parent: The checkpoint or file of their bases.
        """
        earlier = Earlier(parent, None)
        far = {
            _kind(rows[number])
            for number in _largest(rows)
            if not earlier.is_base(Elements(source, number, rows[number]))
        }
        return {number for number, row in rows.items() if _kind(row) not in far}

    @property
    def has_looked_for_means(self) -> bool:
        """True after `look_for_means`."""
        return self._averaged is not None

    def look_for_means(self, source: Source, rows: Mapping[int, Row], names: Sequence[str]) -> None:
        """Find two checkpoints whose mean the largest of some rows is.

        Args:
            source: See `find`.
            rows: See there.
            names: Related manifests.
        """
        self._averaged = ()
        if len(names) > 1 and rows:
            largest = max(rows, key=lambda number: rows[number].spec.n_bytes)
            self._averaged = self._means(Elements(source, largest, rows[largest]), names)

    def find_means(self, source: Source, rows: Mapping[int, Row]) -> dict[int, Derived]:
        """Find means like `find`, of the checkpoints that `look_for_means` has found."""
        found: dict[int, Derived] = {}
        inputs = self._averaged
        if not inputs:
            return found
        left = {number: Elements(source, number, row) for number, row in rows.items()}
        for number, elements in left.items():
            numbers = [each.related(elements) for each in inputs]
            stored = [None if at is None else each.stored(at) for each, at in zip(inputs, numbers, strict=True)]
            whole = [each for each in stored if each is not None]
            if len(whole) == len(inputs):
                derived = self._tried(elements, _MEAN, whole)
                if derived is not None:
                    found[number] = derived
        self._read = b"", None
        return found

    # --- earlier checkpoints

    def _earlier(self, largest: Sequence[Elements], candidates: Sequence[Manifest]) -> Iterator[Earlier]:
        """Yield earlier checkpoints to try: those known to be useful, of the same names, and found by sketches.

        Args:
            largest: The largest rows of different shapes.
            candidates: See `find`.
        """
        yield from list(self._useful.values())
        seen = {*self._useful, *([] if self._without is None else [self._without])}
        for manifest in candidates:
            if len(seen) >= self._most:
                break
            if manifest.digest not in seen and manifest.chunk_bytes == self._store.chunk_bytes:
                earlier = Earlier(manifest, None)
                if manifest.derived or any(earlier.has_other_kind(each.row) for each in largest):
                    seen.add(manifest.digest)
                    if manifest.derived or any(earlier.candidates(each) for each in largest):
                        yield earlier
        for sketched in self._sketched(largest):
            digest = sketched.manifest.partition(".")[0]
            with suppress(NotFoundError, FormatError, BackendError):
                if digest not in seen:
                    seen.add(digest)
                    manifest = self._manifest(sketched.manifest)
                    if manifest.chunk_bytes == self._store.chunk_bytes:
                        yield Earlier(manifest, sketched)

    def _sketched(self, largest: Sequence[Elements]) -> list[Sketched]:
        """Return the checkpoints with possible inputs of some rows by their sketches, the likeliest first."""
        known = sketches_of(self._store.id) if self._known is None else self._known
        shares: dict[str, float] = {}
        parts: dict[str, Sketched] = {}
        for elements in largest:
            kind = _kind(elements.row)
            for guess, shape in _shapes_of_inputs(kind):
                n_elements = Kind("uint8", shape).n_elements
                if not known.has_any(n_elements):
                    continue
                without_bytes = kind.n_bytes if guess.function == "cast" else None
                # A wrong function fits all words of a sketch less often than its evidence says.
                least = LIKELY_BITS if guess.function == Q8_0 else SURE_BITS
                evidence = partial(elements.evidence, guess, shape)
                for part in known.like(evidence, n_elements, least, without_bytes):
                    parts[part.manifest] = part
                    shares[part.manifest] = shares.pop(part.manifest, 0.0) + kind.n_bytes
        latest_first = [*shares][::-1]
        ranked = sorted(latest_first, key=lambda name: -shares[name])
        others = [name for name in ranked if name.partition(".")[0] != self._without]
        return [parts[name] for name in others[: self._most]]

    def _manifest(self, name: str) -> Manifest:
        """Return a manifest by its name, or by its digest if it is at hand."""
        return self._at_hand.get(name.partition(".")[0]) or read_manifest(self._store, name)

    # --- tries

    def _derive(self, elements: Elements, earlier: Earlier) -> Derived | None:
        known = earlier.again(elements.row)
        if known is not None and self._are_stored(known[1]):
            each, inputs = known
            guess = Guess(each.function, each.params)
            if self._is_proven(elements.row, guess, inputs):
                return self._derived(elements, guess, inputs, elements.row.digests)
        for candidate in earlier.candidates(elements)[:_N_TRIED]:
            function, row = candidate.guess.function, earlier.stored(candidate.row)
            if row is not None and earlier.n_failed.get(function, 0) < _MOST_FAILED:
                derived = self._tried(elements, candidate.guess, [row])
                if derived is not None:
                    earlier.n_failed[function] = -(1 << 62)
                    return derived
                earlier.n_failed[function] = earlier.n_failed.get(function, 0) + 1
        return None

    def _tried(self, elements: Elements, guess: Guess, inputs: Sequence[Row]) -> Derived | None:
        """Try a function on a sample, and prove it for the chunks at hand; None if it is another one."""
        row = elements.row
        if not self._may_read(row, inputs) or not _fits(guess, list(map(_kind, inputs)), _kind(row)):
            return None
        with suppress(NotFoundError, FormatError, BackendError):
            if self._agrees(elements, guess, inputs):
                digests = self._digests(row, guess, inputs)
                n = len(row.digests)
                if 0 < n <= len(digests) and np.array_equal(digests[:n], row.digests):
                    _note_proven(_claim(replace(row, digests=digests), guess, inputs))
                    return self._derived(elements, guess, inputs, digests)
        return None

    def _is_proven(self, row: Row, guess: Guess, inputs: Sequence[Row]) -> bool:
        """Tell whether a function gives a row; a manifest that says so may come from another release, or be forged."""
        claim = _claim(row, guess, inputs)
        if claim not in _proven and self._may_read(row, inputs):
            with suppress(NotFoundError, FormatError, BackendError):
                if np.array_equal(self._digests(row, guess, inputs), row.digests):
                    _note_proven(claim)
        return claim in _proven

    def _derived(self, elements: Elements, guess: Guess, inputs: Sequence[Row], digests: Digests) -> Derived:
        row = replace(elements.row, digests=digests)
        inputs = [replace(each, spec=replace(each.spec, name="")) for each in inputs]
        made = partial(self._made, row, guess, inputs)
        return Derived(function=guess.function, params=guess.params, inputs=inputs, row=row, made=made)

    def _agrees(self, elements: Elements, guess: Guess, inputs: Sequence[Row]) -> bool:
        """Tell whether a function gives the elements of a row, as far as the first chunks of its inputs show it."""
        output = _kind(elements.row)
        first, heads = self._heads(guess, inputs)
        n = min(map(len, heads))
        if guess.function == Q8_0:
            blocks = _spread(n // BLOCK_ELEMENTS, _N_SAMPLED // BLOCK_ELEMENTS)
            values = heads[0][: n // BLOCK_ELEMENTS * BLOCK_ELEMENTS].reshape(-1, BLOCK_ELEMENTS)[blocks]
            exact = evaluate(Q8_0, {}, [values], Kind(output.dtype, (len(values) * BLOCK_BYTES,)))
            at = (blocks[:, None] * BLOCK_BYTES + np.arange(BLOCK_BYTES)).reshape(-1)
            mine, is_here = elements.take(at)
        else:
            at = _spread(n, _N_SAMPLED)
            places, is_in = guess.places(inputs[0].spec.shape, output.shape, first + at)
            at, places = at[is_in], places[is_in]
            mine, is_here = elements.take(places)
            function = "mean" if guess == _MEAN else "cast"
            exact = evaluate(function, {}, [head[at] for head in heads], Kind(output.dtype, at.shape))
        mine, exact = np.ascontiguousarray(mine)[is_here], np.ascontiguousarray(exact)[is_here]
        return len(mine) > 0 and mine.tobytes() == exact.tobytes()

    def _digests(self, row: Row, guess: Guess, inputs: Sequence[Row]) -> Digests:
        raw = self._made(row, guess, inputs)
        ends = row.ends(self._store.chunk_bytes).tolist()
        return digest_all([raw[begin:end] for begin, end in pairwise([0, *ends])])

    def _made(self, row: Row, guess: Guess, inputs: Sequence[Row]) -> memoryview:
        """Return the bytes of a function's result."""
        made = evaluate(guess.function, guess.params, [self._array(each) for each in inputs], _kind(row))
        return made.reshape(-1).view(np.uint8).data

    # --- inputs

    def _may_read(self, row: Row, inputs: Sequence[Row]) -> bool:
        """Tell whether inputs are stored, and small and near enough."""
        n_bytes = sum(each.spec.n_bytes for each in inputs)
        if row.spec.n_bytes > MOST_DERIVED_BYTES or n_bytes > _MOST_INPUT_BYTES or not self._are_stored(inputs):
            return False
        reader = self._store.chunks
        if not reader.is_remote:
            return True
        places = self._store.catalog.find_sound(np.concatenate([each.digests for each in inputs]), ())
        return reader.n_far_bytes(places) <= _MOST_FETCHED * row.spec.n_bytes

    def _are_stored(self, inputs: Sequence[Row]) -> bool:
        digests = np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(each.digests for each in inputs)])
        if self._are_made is not None and self._are_made(digests).any():
            return False
        if self._store.catalog.find_sound(digests, ()).found.all():
            return True
        self._store.catalog.refresh()
        return bool(self._store.catalog.find_sound(digests, ()).found.all())

    def _heads(self, guess: Guess, inputs: Sequence[Row]) -> tuple[int, list[Any]]:
        """Read the first elements of inputs, or those where a slice begins; return also the place of the first."""
        first = 0
        if guess.function == "slice":
            axis, [row] = guess.params["axis"], inputs
            first = guess.params["start"] * math.prod(row.spec.shape[axis + 1 :])
        found = [self._piece(row, first) for row in inputs]
        return found[0][0], [elements for _, elements in found]

    def _piece(self, row: Row, place: int) -> tuple[int, Any]:
        """Read the chunk of a row with one of its elements; return the place of its first element, and its elements."""
        dtype = parse_dtype(row.spec.dtype or "uint8")
        ends = row.ends(self._store.chunk_bytes)
        chunk = int(ends.searchsorted(place * dtype.itemsize, side="right"))
        begin = int(ends[chunk - 1]) if chunk else 0
        n_skipped = -begin % dtype.itemsize
        block = np.empty(int(ends[chunk]) - begin, np.uint8)
        self._store.chunks.read(row.digests[chunk : chunk + 1], [block.data], verify=True)
        n = (len(block) - n_skipped) // dtype.itemsize
        whole = block[n_skipped : n_skipped + n * dtype.itemsize]
        return (begin + n_skipped) // dtype.itemsize, whole.view(dtype)

    def _array(self, row: Row) -> Any:
        """Read a row."""
        key = row.digests.tobytes()
        if self._read[0] != key:
            block = np.empty(row.spec.n_bytes, np.uint8)
            ends = row.ends(self._store.chunk_bytes)
            at = offsets_of(np.diff(ends, prepend=0)).tolist()
            outs = [block.data[begin:end] for begin, end in pairwise(at)]
            self._store.chunks.read(row.digests, outs, verify=True)
            self._read = key, block
        dtype = parse_dtype(row.spec.dtype or "uint8")
        return self._read[1].view(dtype).reshape(row.spec.shape)

    # --- means

    def _means(self, elements: Elements, names: Sequence[str]) -> Sequence[Earlier]:
        """Find two checkpoints whose mean a row is; empty if there are none."""
        some: list[tuple[Earlier, Row, Any]] = []
        for name in names:
            with suppress(NotFoundError, FormatError, BackendError):
                earlier = Earlier(self._manifest(name), None if self._known is None else self._known.get(name))
                number = earlier.related(elements)
                row = None if number is None else earlier.stored(number)
                if row is not None and self._may_read(elements.row, [row]):
                    some.append((earlier, row, self._piece(row, 0)[1]))
        n = min((len(head) for _, _, head in some), default=0)
        at = _spread(n, _N_SAMPLED)
        mine, is_here = elements.take(at)
        at, mine = at[is_here], np.ascontiguousarray(mine[is_here])
        if len(at) < _N_SAMPLED // 4 or elements.dtype.kind in "iu" or elements.row.spec.dtype is None:
            return ()
        kind = Kind(elements.row.spec.dtype, at.shape)
        samples = [np.ascontiguousarray(head[at]) for _, _, head in some]
        for one, other in combinations(range(len(some)), 2):
            if samples[one].tobytes() == samples[other].tobytes():
                continue
            made = evaluate("mean", {}, [samples[one], samples[other]], kind)
            if made.tobytes() == mine.tobytes():
                return some[one][0], some[other][0]
        return ()


_MOST_PROVEN = 1 << 18
_proven: set[bytes] = set()
"""Digests of the claims that this process has proven, so that the steps of a training need no more evaluations."""


def _claim(row: Row, guess: Guess, inputs: Sequence[Row]) -> bytes:
    """Return the digest of the claim that a function of some inputs gives a row."""
    return digest(repr((_content(row), guess.function, sorted(guess.params.items()), *map(_content, inputs))).encode())


def _note_proven(claim: bytes) -> None:
    if len(_proven) >= _MOST_PROVEN:
        _proven.clear()
    _proven.add(claim)


def _spread(n: int, most: int) -> Any:
    """Return evenly spread places among so many."""
    return distinct(np.linspace(0, n - 1, most).astype(np.int64)) if n else np.empty(0, np.int64)


def _shapes_of_inputs(made: Kind) -> Iterator[tuple[Guess, tuple[int, ...]]]:
    """Yield the functions that may give a row, each with the shape of its input; for a cast any of its size."""
    if made.dtype is None:
        if made.n_elements % BLOCK_BYTES == 0:
            yield _BLOCKS, (made.n_elements // BLOCK_BYTES, BLOCK_ELEMENTS)
        return
    shape = made.shape
    yield _CAST, shape
    for axes in _AXES.get(len(shape), ()):
        inverse = [axes.index(axis) for axis in range(len(axes))]
        yield Guess("permute", {"axes": list(axes)}), tuple(shape[axis] for axis in inverse)
    if len(shape) > 1:
        axis = len(shape) - 1
        for n in _PARTS:
            whole = (*shape[:-1], n * shape[-1])
            for part in range(n):
                yield Guess("slice", {"axis": axis, "start": part * shape[-1]}), whole
