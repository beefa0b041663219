"""Manifest: the rows of one checkpoint or file, and their Arrow stream (``docs/format.md``, Manifests)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.arrow import (
    UNREADABLE,
    array_of_bools,
    array_of_numbers,
    array_of_texts,
    check_is_of_bytes,
    read_batch,
    read_schema,
    text_buffers,
    validity_of,
    values_of,
    values_or_any,
)
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest, digest_of
from tensorcas_mlflow.base.tensors import MAX_CHUNK_BYTES, Offsets, RowCuts
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.codecs import check_zstd_has_memory
from tensorcas_mlflow.errors import FormatError, NewerFormatError, TensorNotFoundError
from tensorcas_mlflow.layout._hints import split_hints
from tensorcas_mlflow.layout._records import RefKind
from tensorcas_mlflow.layout._rows import ByName, Columns, Row, Rows, step_range

VERSION = 1
MAX_BYTES = 1 << 30
"""A manifest longer than this is refused; 10 million tensors need less."""
COMPRESSED_BELOW = 64 * 1024
"""Longer streams are stored uncompressed, so readers need not decompress them."""
SCHEMA_KEY = b"tensorcas"
_BLOCK_BYTES = 1 << 15

MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("name", pa.utf8()),
        pa.field("dtype", pa.utf8()),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("chunks", pa.list_(pa.binary(DIGEST_BYTES))),
        pa.field("cuts", pa.list_(pa.int64())),
    ]
)

_MAX_RECENT = 64
_MAX_RECENT_ROWS = 4096
_recent_streams: dict[bytes, bytes] = {}
"""Recent small streams, by everything they are made of: an unchanged state has the same stream as before, and
building it again takes longer than hashing the state."""


def make_stream(head: Mapping[str, Any], columns: Columns) -> bytes:
    """Write a manifest.

    Args:
        head: Its head, everything besides the rows.
        columns: Its rows.

    Raises:
        ValueError: It is too long to be read again, or its metadata is not JSON.
    """
    try:
        said = json.dumps({"format": VERSION, **head}, sort_keys=True, separators=(",", ":"))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a checkpoint's metadata must be plain JSON values: {error}") from error
    if len(columns) > _MAX_RECENT_ROWS:
        return _make_stream(said, columns)
    key = _content_key(said, columns)
    stream = _recent_streams.get(key)
    if stream is None:
        stream = _make_stream(said, columns)
        if len(stream) < COMPRESSED_BELOW:
            if len(_recent_streams) >= _MAX_RECENT:
                _recent_streams.clear()
            _recent_streams[key] = stream
    return stream


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
        Exception: One of `UNREADABLE`: it is no manifest at all.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"a manifest of {len(data)} bytes is too long")
    head = json.loads((read_schema(data).metadata or {})[SCHEMA_KEY])
    version = head["format"]
    if type(version) is not int:
        raise FormatError("a manifest has no version")
    if version > VERSION:
        raise NewerFormatError("the manifest", version, VERSION)
    if type(head["metadata"]) is not dict:
        raise FormatError("a manifest's metadata is not a JSON object")
    if type(head.get("left_out", {})) is not dict:
        raise FormatError("a manifest's left_out is not a JSON object")
    chunk_bytes = head["chunk_bytes"]
    if type(chunk_bytes) is not int or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError("a manifest has an impossible chunk size")
    columns = _columns_of(read_batch(data, MANIFEST_SCHEMA, what="a manifest", max_rows=max_rows))
    columns.check_chunks(chunk_bytes)
    return head, columns


def looks_like_stream(head: bytes) -> bool:
    """Tell from a file's first 64 KiB whether it may be a manifest; `read_stream` decides."""
    if head[:4] != b"\xff\xff\xff\xff" or SCHEMA_KEY not in head[:4096]:
        return False
    if 8 + int.from_bytes(head[4:8], "little") > len(head):
        return True  # the schema, with the metadata in it, is longer
    try:
        return SCHEMA_KEY in (read_schema(head).metadata or {})
    except UNREADABLE:
        return False


# --- writing


def _make_stream(said: str, columns: Columns) -> bytes:
    n_chunks = len(columns.digests)
    if n_chunks >= 1 << 31:
        raise ValueError(f"a checkpoint of {n_chunks} chunks is too large: create a store with larger chunks")
    digests = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(DIGEST_BYTES), n_chunks, [None, pa.py_buffer(np.ascontiguousarray(columns.digests).data)]
    )
    batch = pa.record_batch(
        [
            columns.names,
            array_of_texts(columns.dtypes).take(array_of_numbers(columns.dtype, pa.int64())),
            _lists(columns.shape_at, array_of_numbers(columns.sides, pa.int64())),
            _lists(columns.chunk_at, digests),
            _cut_lists(columns),
        ],
        schema=MANIFEST_SCHEMA.with_metadata({SCHEMA_KEY: said}),
    )
    counter = pa.MockOutputStream()
    _write(counter, batch)
    if counter.size() > MAX_BYTES:
        raise ValueError(f"a manifest of {counter.size()} bytes is too long to be read again")
    block = pa.allocate_buffer(counter.size())
    _write(pa.FixedSizeBufferWriter(block), batch)
    return block.to_pybytes()


def _write(sink: Any, batch: Any) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _lists(at: Offsets, values: Any, mask: Any = None) -> Any:
    return pa.ListArray.from_arrays(array_of_numbers(at, pa.int32()), values, mask=mask)


def _cut_lists(columns: Columns) -> Any:
    cuts = columns.cuts
    if cuts is None:
        return pa.nulls(len(columns), pa.list_(pa.int64()))
    mask = None if cuts.given.all() else array_of_bools(~cuts.given)
    return _lists(cuts.at, array_of_numbers(cuts.values, pa.int64()), mask)


def _content_key(said: str, columns: Columns) -> bytes:
    """Hash everything a stream is made of: equal keys, equal streams."""
    name_at, names = text_buffers(columns.names)
    arrays = [name_at, columns.dtype, columns.shape_at, columns.sides, columns.chunk_at, columns.digests, names]
    if columns.cuts is not None:
        arrays += [columns.cuts.given, columns.cuts.at, columns.cuts.values]
    about = repr((said, columns.dtypes, [(each.dtype.str, len(each)) for each in arrays]))
    return digest_of([about.encode(), *(np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in arrays)])


# --- reading


def _columns_of(batch: Any) -> Columns:
    names, dtypes, shapes, chunks, cuts = (batch.column(name) for name in MANIFEST_SCHEMA.names)
    if any(column.null_count for column in (names, shapes, chunks)) or any(
        column.values.null_count for column in (shapes, chunks, cuts)
    ):
        raise FormatError("a manifest leaves out a required value")
    shape_at, first_side = _offsets(shapes)
    chunk_at, first_chunk = _offsets(chunks)
    different, dtype = _dtypes(dtypes)
    return Columns(
        names=names,
        dtypes=different,
        dtype=dtype,
        shape_offsets=shape_at,
        sides=values_of(shapes.values)[first_side : first_side + int(shape_at[-1])],
        chunk_offsets=chunk_at,
        digests=_digests_of(chunks.values)[first_chunk : first_chunk + int(chunk_at[-1])],
        cuts=_cuts_of(cuts),
    )


def _offsets(lists: Any) -> tuple[Any, int]:
    """Return the starts of lists among the values inside any list, and the position of the first such value."""
    if len(lists) == 0:
        return np.zeros(1, dtype=np.int64), 0
    at = values_of(lists.offsets)
    first = int(at[0])
    return at - first if first else at, first


def _dtypes(column: Any) -> tuple[tuple[str | None, ...], Any]:
    """Return the distinct dtypes, and for each row the position of its dtype."""
    if column.null_count == 0 and len(column):
        at, data = text_buffers(column)
        n_bytes = int(at[1])
        # Most checkpoints have one dtype, and one comparison costs less than a lookup of each.
        if step_range(at) == (n_bytes, n_bytes) and _repeats(data, n_bytes):
            return (column[0].as_py(),), np.broadcast_to(np.intp(0), len(column))
    encoded = column.dictionary_encode()
    different = encoded.dictionary.to_pylist()
    codes = np.where(validity_of(column), values_or_any(encoded.indices), len(different)).astype(np.intp)
    return (tuple(different) if column.null_count == 0 else (*different, None)), codes


def _repeats(data: Any, n_bytes: int) -> bool:
    """Tell whether bytes repeat their first ``n_bytes`` throughout."""
    pattern = np.tile(data[:n_bytes], -(-_BLOCK_BYTES // max(1, n_bytes)))
    blocks = range(0, len(data), len(pattern) or 1)
    return all(np.array_equal(block := data[at : at + len(pattern)], pattern[: len(block)]) for at in blocks)


def _cuts_of(lists: Any) -> RowCuts | None:
    if lists.null_count == len(lists):
        return None
    at, first = _offsets(lists)
    given = validity_of(lists)
    if np.diff(at)[~given].any():
        raise FormatError("a manifest has cuts of a row that has none")
    return RowCuts(given=given, at=at.astype(np.int64), values=values_of(lists.values)[first : first + int(at[-1])])


def _digests_of(values: Any) -> Digests:
    if len(values) == 0:
        return np.empty((0, DIGEST_BYTES), np.uint8)
    begin = values.offset * DIGEST_BYTES
    flat: Digests = np.frombuffer(values.buffers()[1], np.uint8)[begin : begin + len(values) * DIGEST_BYTES]
    return flat.reshape(-1, DIGEST_BYTES)


MAX_TEXT = 200
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_CHECKED_ROWS = 4096
"""Manifests with at most so many rows are checked for unique names at once, longer ones on the first need."""
_MIN_BESIDE_BYTES = 1 << 20
"""Below this size, hashing and parsing a stream in turn is faster than in parallel."""


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
    hints: bytes = field(default=b"", repr=False, compare=False)
    """Places of its chunks at the time of writing, as in its blob; empty if the blob has none."""
    label: str | None = field(default=None, repr=False, compare=False)
    """Owner of the manifest, in words, for errors; None if it is unknown."""

    def __post_init__(self) -> None:
        if self.kind not in ("checkpoint", "file"):
            raise ValueError(f"a manifest's kind is not {self.kind!r}")
        texts: tuple[Any, ...] = (self.store_id, self.flavor)
        for text in texts:
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_TEXT):
                raise ValueError(f"a manifest's store and flavor have 1 to {MAX_TEXT} characters, not {text!r:.100}")
        if not all(isinstance(text, str) for item in self.left_out.items() for text in item):
            raise ValueError("a manifest's left_out is no mapping of names to types")
        if not isinstance(self.rows, Rows):
            object.__setattr__(self, "rows", Rows(Columns.of_rows(self.rows)))
        if len(self.rows) <= _MAX_CHECKED_ROWS:
            self.check_names()

    def labelled(self, label: str) -> Manifest:
        """Return the same manifest with a label for errors about its tensors."""
        made = copy.copy(self)
        object.__setattr__(made, "label", label)
        return made

    @property
    def columns(self) -> Columns:
        """The rows, column by column."""
        rows = self.rows
        assert isinstance(rows, Rows)
        return rows.columns

    @Lazy
    def by_name(self) -> ByName:
        """The rows by name."""
        return ByName(self.columns, allows_nameless=self.kind == "file")

    @property
    def digests(self) -> Digests:
        """The digests of all rows, one after the other."""
        return self.columns.digests

    @Lazy
    def chunk_sizes(self) -> Offsets:
        """Sizes of the chunks of all rows, one after the other."""
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
        return make_stream(head, self.columns)

    def to_bytes(self) -> bytes:
        """Return the manifest as an artifact: an Arrow IPC stream."""
        return self.stream

    def to_blob(self) -> bytes:
        """Return the manifest as a store's blob: the stream, compressed if it is small; without hints."""
        if len(self.stream) >= COMPRESSED_BELOW:
            return self.stream
        return zstandard.ZstdCompressor(level=12).compress(self.stream)

    @Lazy
    def digest(self) -> str:
        """The digest of the stream, in hex: the manifest's name."""
        return digest(self.stream).hex()

    def names(self) -> list[str]:
        """Return the rows' names, in order."""
        self.check_names()
        names: list[str] = self.columns.names.to_pylist()
        return names

    def row(self, name: str) -> Row:
        """Return a row.

        Raises:
            TensorNotFoundError: No row has this name.
        """
        return self.columns.row(int(self.numbers((name,))[0]))

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
        stream, hints = cls.stream_in(blob), split_hints(blob)[1]
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
        return made[0]

    @staticmethod
    def stream_in(blob: bytes) -> bytes:
        """Return the Arrow stream in a store's blob; raise `FormatError` if it cannot be decompressed."""
        blob, _ = split_hints(blob)
        if blob[:4] != _ZSTD_MAGIC:
            return blob
        try:
            if not 0 < zstandard.frame_content_size(blob) < COMPRESSED_BELOW:
                raise FormatError("a compressed manifest has an impossible size")
            return zstandard.ZstdDecompressor().decompress(blob, max_output_size=COMPRESSED_BELOW)
        except zstandard.ZstdError as error:
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
            head, columns = read_stream(data, max_rows=max_rows)
            manifest = cls(
                kind=head["kind"],
                chunk_bytes=head["chunk_bytes"],
                store_id=head["store"],
                flavor=head["flavor"],
                metadata=head["metadata"],
                left_out=head.get("left_out", {}),
                rows=Rows(columns),
            )
        except UNREADABLE as error:
            check_is_of_bytes(error)
            raise FormatError(f"not a manifest: {error}") from error
        manifest.__dict__["stream"] = data
        return manifest


def _do(job: Callable[[], None]) -> None:
    job()


def _check_digest(stream: bytes, name: str) -> None:
    actual = digest(stream).hex()
    if actual != name[: 2 * DIGEST_BYTES]:
        raise FormatError(f"it hashes to {actual}")
