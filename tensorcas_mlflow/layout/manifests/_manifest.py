"""Manifest: the rows of one checkpoint or file, and their Arrow stream (``docs/format.md``, Manifests)."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.base.tensors import MAX_CHUNK_BYTES, Offsets
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import FormatError, NewerFormatError, TensorNotFoundError
from tensorcas_mlflow.layout._records import RefKind
from tensorcas_mlflow.layout.manifests._hints import split_hints, split_sketches
from tensorcas_mlflow.layout.manifests._manifest_stream import looks_like_stream, read_columns, read_head, write_stream
from tensorcas_mlflow.layout.manifests._rows import ByName, Columns, Row, Rows

if TYPE_CHECKING:
    from tensorcas_mlflow.layout.manifests._derived import Derivation

VERSION = 1
DERIVED_VERSION = 2
"""Version of manifests with derived rows."""
MAX_BYTES = 1 << 30
"""A manifest longer than this is refused; 10 million tensors need less."""
COMPRESSED_BELOW = 64 * 1024
"""Longer streams are stored uncompressed, so readers need not decompress them."""

_as_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def make_stream(head: Mapping[str, Any], columns: Columns) -> bytes:
    """Write a manifest.

    Args:
        head: Its head, everything besides the rows.
        columns: Its rows.

    Raises:
        ValueError: It is too long to be read again, or its metadata is not JSON.
    """
    try:
        said = _as_json({"format": DERIVED_VERSION if "derived" in head else VERSION, **head})
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a checkpoint's metadata must be plain JSON values: {error}") from error
    return write_stream(said, columns, max_bytes=MAX_BYTES)


def read_stream(data: bytes, *, max_rows: int | None = None) -> tuple[dict[str, Any], Columns]:
    """Read a manifest and check everything later code relies on, except that names are unique.

    Args:
        data: The stream.
        max_rows: Maximum number of rows; more are refused before they are read.

    Returns:
        Its head (with checked chunk size and kind of the metadata), and its rows.

    Raises:
        FormatError: It is not a manifest, or contradicts itself.
        NewerFormatError: A later release wrote it.
        Exception: One of `_UNREADABLE`: its head is no manifest's.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"a manifest of {len(data)} bytes is too long")
    said = read_head(data)
    if said is None:
        raise FormatError("not a manifest")
    head = json.loads(said)
    version = head["format"]
    if type(version) is not int:
        raise FormatError("a manifest has no version")
    if version > DERIVED_VERSION:
        raise NewerFormatError("the manifest", version, DERIVED_VERSION)
    if type(head["metadata"]) is not dict:
        raise FormatError("a manifest's metadata is not a JSON object")
    if type(head.get("left_out", {})) is not dict:
        raise FormatError("a manifest's left_out is not a JSON object")
    chunk_bytes = head["chunk_bytes"]
    if type(chunk_bytes) is not int or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError("a manifest has an impossible chunk size")
    columns = read_columns(data, len(said), max_rows=max_rows)
    columns.check_chunks(chunk_bytes)
    return head, columns


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""Exceptions of json and of the constructor for a head that is no manifest's."""
MAX_TEXT = 200
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_CHECKED_ROWS = 4096
"""Manifests with at most so many rows are checked for unique names at once, longer ones on the first need."""
_MIN_BESIDE_BYTES = 1 << 20
"""Below this size, hashing and parsing a stream in turn is faster than in parallel."""


KEPT_HEADER = "__safetensors__"
"""Key, in a checkpoint's metadata, of what it takes to write the header of its safetensors file again."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The rows of one checkpoint or file, in order.

    A forged manifest of very many rows may give two rows one name. A lookup by name, or a list of names, then
    raises `FormatError`.
    """

    kind: RefKind
    chunk_bytes: int
    store_id: str | None
    """Id of the store with the chunks, or None for a self-contained payload."""
    flavor: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a checkpoint that cannot be read as arrays, by name, with their types. If such a tensor has a row, the
    row holds its bytes, and only the adapter understands them; one without a row is not stored."""
    rows: Sequence[Row]
    """The rows, each built on access; `columns` has their contents all at once."""
    inputs: Sequence[Row] = ()
    """Stored rows that derived rows are made of; no part of the checkpoint or file. Their names are for later saves."""
    derived: tuple[Derivation, ...] = ()
    """The derived rows, ascending. The store need not keep their chunks."""
    hints: bytes = field(default=b"", repr=False, compare=False)
    """Places of its chunks at the time of writing, as in its blob; empty if the blob has none."""
    sketches: bytes = field(default=b"", repr=False, compare=False)
    """Sketches of its tensors, as in its blob; empty if the blob has none."""
    label: str | None = field(default=None, repr=False, compare=False)
    """Owner of the manifest, in words, for errors; None if it is unknown."""

    @property
    def own_metadata(self) -> Mapping[str, Any]:
        """The metadata without `KEPT_HEADER`."""
        if KEPT_HEADER not in self.metadata:
            return self.metadata
        return {key: value for key, value in self.metadata.items() if key != KEPT_HEADER}

    def __post_init__(self) -> None:
        if self.kind not in ("checkpoint", "file"):
            raise ValueError(f"a manifest's kind is not {self.kind!r}")
        texts: tuple[Any, ...] = (self.store_id, self.flavor)
        for text in texts:
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_TEXT):
                raise ValueError(f"a manifest's store and flavor have 1 to {MAX_TEXT} characters, not {text!r:.100}")
        if not all(isinstance(text, str) for item in self.left_out.items() for text in item):
            raise ValueError("a manifest's left_out is no mapping of names to types")
        for name in ("rows", "inputs"):
            rows: Sequence[Row] = getattr(self, name)
            if (name == "rows" or len(rows)) and not isinstance(rows, Rows):
                object.__setattr__(self, name, Rows(Columns.of_rows(rows)))
        if self.derived:
            from tensorcas_mlflow.layout.manifests._derived import check_derived  # few manifests have derived rows

            check_derived(self.derived, self.table, self.n_inputs)
        elif len(self.inputs):
            raise FormatError("a manifest without derived rows has inputs")
        if len(self.rows) <= _MAX_CHECKED_ROWS and not self.columns.have_names_of_their_own:
            self.check_names()

    def labelled(self, label: str) -> Manifest:
        """Return the same manifest with a label for errors about its tensors."""
        return self._with("label", label)

    def sketched(self, sketches: bytes) -> Manifest:
        """Return the same manifest with sketches of its tensors."""
        return self._with("sketches", sketches)

    def _with(self, name: str, value: Any) -> Manifest:
        made = copy.copy(self)
        object.__setattr__(made, name, value)
        return made

    @Lazy
    def columns(self) -> Columns:
        """The rows, column by column."""
        rows = self.rows
        assert isinstance(rows, Rows)
        return rows.columns

    @Lazy
    def by_name(self) -> ByName:
        """The rows by name."""
        return ByName(self.columns, allows_nameless=self.kind != "checkpoint")

    @property
    def n_inputs(self) -> int:
        """Number of the inputs of derived rows."""
        return len(self.inputs)

    @Lazy
    def table(self) -> Columns:
        """All rows, column by column: those of the content, and behind them the inputs of derived rows."""
        inputs = self.inputs
        return self.columns.joined(inputs.columns) if len(inputs) and isinstance(inputs, Rows) else self.columns

    @Lazy
    def stored_rows(self) -> Offsets:
        """Numbers of the rows in `table` that are not derived: the store keeps their chunks."""
        return np.delete(np.arange(len(self.table)), [each.row for each in self.derived])

    @Lazy
    def stored(self) -> Columns:
        """The rows whose chunks the store keeps, column by column; see `stored_rows`."""
        return self.table.take(self.stored_rows) if self.derived else self.columns

    @property
    def stored_digests(self) -> Digests:
        """The digests of the chunks that the store keeps for the manifest: those of derived rows are not among them."""
        return self.stored.digests

    @Lazy
    def stored_sizes(self) -> Offsets:
        """Sizes of the chunks in `stored_digests`."""
        return self.stored.chunk_sizes(self.chunk_bytes) if self.derived else self.chunk_sizes

    def names_of_stored(self, chunks: Any) -> tuple[str, ...]:
        """Return the names of the tensors that need some chunks; stretches of a file have no name.

        Args:
            chunks: Numbers of the chunks among `stored_digests`.
        """
        return tuple(name for row in self.rows_needing(chunks) if (name := self.columns.name(row)))

    def rows_needing(self, chunks: Any) -> list[int]:
        """Return the numbers of the content's rows that need some chunks; see `names_of_stored`."""
        return self._with_derived(self.stored_rows[self.stored.rows_of(chunks)])

    def names_needing(self, stored_rows: Any, among: Any = None) -> tuple[str, ...]:
        """Return the names of the tensors that need some stored rows: the rows themselves, and those derived of them.

        Args:
            stored_rows: Numbers of the rows in `table`.
            among: Numbers of the rows that may be named; by default all.
        """
        rows = self._with_derived(stored_rows)
        if among is not None:
            rows = sorted({*rows}.intersection(np.asarray(among).tolist()))
        return tuple(name for row in rows if (name := self.columns.name(row)))

    def _with_derived(self, stored_rows: Any) -> list[int]:
        """Return the rows of the content among stored rows, and those derived of them; ascending."""
        rows = set(np.asarray(stored_rows).tolist())
        rows |= {each.row for each in self.derived if not rows.isdisjoint(each.inputs)}
        return sorted(row for row in rows if row < len(self.columns))

    def derivations(self, rows: Offsets) -> dict[int, Derivation]:
        """Return the derivations of the derived ones among some rows, by position."""
        if not self.derived:
            return {}
        of_row = self._derivation_of
        return {at: found for at, row in enumerate(rows.tolist()) if (found := of_row.get(row)) is not None}

    @Lazy
    def _derivation_of(self) -> Mapping[int, Derivation]:
        return {each.row: each for each in self.derived}

    def in_full(self, *, store_id: str | None) -> Manifest:
        """Return the manifest of the same content for a place that keeps the chunks of every row.

        Args:
            store_id: Id of the store with the chunks; None for a self-contained file.
        """
        if not self.derived and store_id == self.store_id:
            return self
        return dataclasses.replace(self, store_id=store_id, inputs=(), derived=())

    @property
    def digests(self) -> Digests:
        """The digests of the content, row by row; `stored_digests` are those that the store keeps."""
        return self.columns.digests

    @Lazy
    def chunk_sizes(self) -> Offsets:
        """Sizes of the chunks in `digests`."""
        return self.columns.chunk_sizes(self.chunk_bytes)

    @Lazy
    def n_bytes(self) -> int:
        """Size of all rows together, equal ones counted each time."""
        return int(self.columns.n_bytes.sum())

    @Lazy
    def stream(self) -> bytes:
        """The manifest as an Arrow IPC stream."""
        head: dict[str, Any] = {
            "kind": self.kind,
            "chunk_bytes": self.chunk_bytes,
            "store": self.store_id,
            "flavor": self.flavor,
            "metadata": dict(self.metadata),
        }
        if self.left_out:
            head["left_out"] = dict(self.left_out)
        if self.derived:
            from tensorcas_mlflow.layout.manifests._derived import to_json

            head |= {"derived": to_json(self.derived), "n_inputs": self.n_inputs}
        return make_stream(head, self.table)

    def to_bytes(self) -> bytes:
        """Return the manifest as an artifact: an Arrow IPC stream."""
        return self.stream

    def to_blob(self, *, is_packed: bool = True) -> bytes:
        """Return the manifest as a store's blob, without hints: the stream, compressed if it is small, and sketches.

        Args:
            is_packed: Whether to compress it; False for a backend that does so itself.
        """
        if len(self.stream) >= COMPRESSED_BELOW or not is_packed:
            return self.stream + self.sketches
        return zstandard.ZstdCompressor(level=12).compress(self.stream) + self.sketches

    @Lazy
    def digest(self) -> str:
        """The digest of the stream, in hex: the manifest's name."""
        return digest(self.stream).hex()

    def names(self) -> list[str]:
        """Return the rows' names, in order."""
        self.check_names()
        return self.columns.names.to_list()

    def row(self, name: str) -> Row:
        """Return a row.

        Raises:
            TensorNotFoundError: No row has this name.
        """
        return self.columns.row(int(self.numbers((name,))[0]))

    def input_named(self, name: str) -> Row | None:
        """Return an input with a dtype by its name, the last one of several; None if there is none of the name."""
        number = self._input_numbers.get(name)
        return None if number is None else self.inputs[number]

    @Lazy
    def _input_numbers(self) -> Mapping[str, int]:
        rows = enumerate(self.inputs)
        return {row.spec.name: number for number, row in rows if row.spec.dtype is not None}

    def numbers(self, names: Iterable[str]) -> Offsets:
        """Return the positions of rows in `columns`.

        Raises:
            TensorNotFoundError: A name has no row.
        """
        try:
            return np.array([self.by_name.number(name) for name in names], dtype=np.int64)
        except KeyError as error:
            raise TensorNotFoundError(error.args[0]) from None

    def check_names(self) -> None:
        """Check that no two rows have one name; stretches of a file need no name.

        Raises:
            FormatError: Two rows have.
        """
        self.by_name.numbers  # noqa: B018 - builds the table and so checks it

    @staticmethod
    def looks_like(head: bytes) -> bool:
        """Tell from a file's first 64 KiB whether it may be a manifest; `from_bytes` decides."""
        return looks_like_stream(head)

    @classmethod
    def from_blob(cls, blob: bytes, name: str | None = None) -> Manifest:
        """Read a manifest from a store's blob; raise like `from_bytes`.

        Args:
            blob: The blob.
            name: The manifest's name, if the stream must hash to it. The hash is checked first: damage must not count
                as a later release's writing.
        """
        before, hints = split_hints(blob)
        stream, sketches = cls.stream_in(blob), split_sketches(before)[1]
        made: list[Manifest] = []
        # Of two errors the first job's is raised, whichever occurs first.
        jobs: list[Callable[[], None]] = [] if name is None else [lambda: _check_digest(stream, name)]
        jobs.append(lambda: made.append(cls.from_bytes(stream)))
        if len(stream) >= _MIN_BESIDE_BYTES:
            # Hashing a long stream takes as long as parsing it. This is safe on the pool's own threads too, as it waits
            # for nobody: the caller does any job no other thread has begun.
            threads.run_all(_do, jobs)
        else:
            for job in jobs:
                job()
        object.__setattr__(made[0], "hints", hints)
        object.__setattr__(made[0], "sketches", sketches)
        return made[0]

    @staticmethod
    def stream_in(blob: bytes) -> bytes:
        """Return the Arrow stream in a store's blob; raise `FormatError` if it cannot be decompressed."""
        blob, _ = split_sketches(split_hints(blob)[0])
        if blob[:4] != _ZSTD_MAGIC:
            return blob
        try:
            if not 0 < zstandard.frame_content_size(blob) < COMPRESSED_BELOW:
                raise FormatError("a compressed manifest has an impossible size")
            return zstandard.ZstdDecompressor().decompress(blob, max_output_size=COMPRESSED_BELOW)
        except zstandard.ZstdError as error:
            from tensorcas_mlflow.codecs import check_zstd_has_memory

            check_zstd_has_memory(error)
            raise FormatError(f"a compressed manifest cannot be read: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, *, max_rows: int | None = None) -> Manifest:
        """Read a manifest from an Arrow IPC stream and check everything later code relies on.

        Args:
            data: The stream.
            max_rows: Maximum number of rows; more are refused before they are read.

        Raises:
            FormatError: It is not a manifest, or contradicts itself.
            NewerFormatError: A later release wrote it.
        """
        try:
            head, table = read_stream(data, max_rows=max_rows)
            columns, inputs, derived = _parts_of(head, table)
            manifest = cls(
                kind=head["kind"],
                chunk_bytes=head["chunk_bytes"],
                store_id=head["store"],
                flavor=head["flavor"],
                metadata=head["metadata"],
                left_out=head.get("left_out", {}),
                rows=Rows(columns),
                inputs=inputs,
                derived=derived,
            )
        except FormatError:
            raise
        except _UNREADABLE as error:
            raise FormatError(f"not a manifest: {error}") from error
        manifest.__dict__["stream"] = data
        return manifest


def _parts_of(head: Mapping[str, Any], table: Columns) -> tuple[Columns, Sequence[Row], tuple[Derivation, ...]]:
    """Split the rows of a manifest into those of its content and the inputs; return both, and the derived rows."""
    if head["format"] < DERIVED_VERSION:
        return table, (), ()
    from tensorcas_mlflow.layout.manifests._derived import of_json

    n_inputs = head["n_inputs"]
    if type(n_inputs) is not int or not 0 <= n_inputs < len(table):
        raise FormatError("a manifest has an impossible number of inputs")
    n_rows, derived = len(table) - n_inputs, of_json(head["derived"])
    if not n_inputs:
        return table, (), derived
    every = np.arange(len(table))
    return table.take(every[:n_rows]), Rows(table.take(every[n_rows:])), derived


def _do(job: Callable[[], None]) -> None:
    job()


def _check_digest(stream: bytes, name: str) -> None:
    actual = digest(stream).hex()
    if actual != name[: 2 * DIGEST_BYTES]:
        raise FormatError(f"it hashes to {actual}")
