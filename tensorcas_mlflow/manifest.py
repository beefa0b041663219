"""Manifests: the Arrow table of one checkpoint or file (``docs/format.md``, Manifests)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
import zstandard

from tensorcas_mlflow._arrow import UNREADABLE, read_batch, read_schema
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES, chunk_ends, n_chunks
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.errors import FormatError, NewerFormatError, TensorNotFoundError
from tensorcas_mlflow.hints import split_hints
from tensorcas_mlflow.tensor import Spec

VERSION = 1
MAX_BYTES = 1 << 30
"""A manifest longer than this is refused; 10 million tensors need less."""
MAX_TEXT = 200
_SCHEMA_KEY = b"tensorcas"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_COMPRESSED_BELOW = 64 * 1024
"""Longer ones are kept as they are, so that they can be mapped."""

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
"""Small streams made lately, by all that they are made of: a state that has not changed has the one it had before, and
making it again takes longer than hashing the state."""

Kind = Literal["checkpoint", "file"]
T = TypeVar("T")


class _Lazy(Generic[T]):
    """An attribute that is computed when it is first asked for.

    Before Python 3.12 `functools.cached_property` holds one lock for all instances while it computes: threads wait for
    each other, and a child that is forked meanwhile waits for ever.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a manifest: what it is, and which chunks it consists of."""

    spec: Spec
    cuts: Any
    """Byte offsets at which chunks end, an int64 array, or None."""
    digests: Digests

    def ends(self, chunk_bytes: int) -> Any:
        """Where the chunks of this row end, in bytes."""
        return chunk_ends(self.spec.n_bytes, chunk_bytes, self.cuts)

    @property
    def identity(self) -> str:
        """Digest of the row's content: equal wherever the same tensor is stored."""
        shape = np.array(self.spec.shape, dtype="<i8").tobytes()
        return digest((self.spec.dtype or "").encode() + b"\0" + shape + self.digests.tobytes()).hex()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The rows of one checkpoint or file, in order."""

    kind: Kind
    chunk_bytes: int
    store_id: str | None
    """Which store the chunks are in, or None for a self-contained payload."""
    flavor: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row]
    hints: bytes = field(default=b"", repr=False, compare=False)
    """Where its chunks lay when it was written, as its blob says it; empty where it says nothing."""
    label: str | None = field(default=None, repr=False, compare=False)
    """Whose it is, in words, for errors; None where nobody has said."""

    def __post_init__(self) -> None:
        if self.kind not in ("checkpoint", "file"):
            raise ValueError(f"a manifest's kind is not {self.kind!r}")
        texts: tuple[Any, ...] = (self.store_id, self.flavor)
        for text in texts:
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_TEXT):
                raise ValueError(f"a manifest's store and flavor have 1 to {MAX_TEXT} characters, not {text!r:.100}")
        # Stretches of a file need no name.
        n_nameless = sum(not row.spec.name for row in self.rows) if self.kind == "file" else 0
        if len(self.by_name) - min(n_nameless, 1) != len(self.rows) - n_nameless:
            raise ValueError("a manifest must not name two rows alike")

    def labelled(self, label: str) -> Manifest:
        """The same manifest, that is named so in errors about its tensors."""
        made = copy.copy(self)
        object.__setattr__(made, "label", label)
        return made

    @_Lazy
    def by_name(self) -> Mapping[str, Row]:
        """The rows by name."""
        return {row.spec.name: row for row in self.rows}

    @_Lazy
    def digests(self) -> Digests:
        """The digests of all rows, one after the other."""
        parts = [row.digests for row in self.rows]
        return np.concatenate(parts) if parts else np.empty((0, DIGEST_BYTES), np.uint8)

    @_Lazy
    def n_bytes(self) -> int:
        """Size of all rows together, equal ones counted each time."""
        return sum(row.spec.n_bytes for row in self.rows)

    @_Lazy
    def stream(self) -> bytes:
        """The manifest as an Arrow IPC stream."""
        head = {
            "format": VERSION,
            "kind": self.kind,
            "chunk_bytes": self.chunk_bytes,
            "store": self.store_id,
            "flavor": self.flavor,
            "metadata": dict(self.metadata),
        }
        said = json.dumps(head, sort_keys=True, separators=(",", ":"))
        if len(self.rows) > _MAX_RECENT_ROWS:
            return self._make_stream(said)
        key = _content_key(said, self.rows)
        stream = _recent_streams.get(key)
        if stream is None:
            stream = self._make_stream(said)
            if len(stream) < _COMPRESSED_BELOW:
                if len(_recent_streams) >= _MAX_RECENT:
                    _recent_streams.clear()
                _recent_streams[key] = stream
        return stream

    def _make_stream(self, said: str) -> bytes:
        counts = np.array([0] + [len(row.digests) for row in self.rows], dtype=np.int64).cumsum()
        if counts[-1] >= 1 << 31:
            raise ValueError(f"a checkpoint of {counts[-1]} chunks is too large: make a store with larger chunks")
        flat = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(DIGEST_BYTES), int(counts[-1]), [None, pa.py_buffer(np.ascontiguousarray(self.digests).data)]
        )
        batch = pa.record_batch(
            [
                pa.array([row.spec.name for row in self.rows], pa.utf8()),
                pa.array([row.spec.dtype for row in self.rows], pa.utf8()),
                pa.array([row.spec.shape for row in self.rows], pa.list_(pa.int64())),
                pa.ListArray.from_arrays(pa.array(counts, pa.int32()), flat),
                pa.array([row.cuts for row in self.rows], pa.list_(pa.int64())),
            ],
            schema=MANIFEST_SCHEMA.with_metadata({_SCHEMA_KEY: said}),
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        stream = sink.getvalue()
        if stream.size > MAX_BYTES:
            raise ValueError(f"a manifest of {stream.size} bytes is too long to be read again")
        return stream.to_pybytes()

    def to_bytes(self) -> bytes:
        """The manifest as an artifact: an Arrow IPC stream."""
        return self.stream

    def to_blob(self) -> bytes:
        """The manifest as a store keeps it: the stream, compressed if it is small; without hints."""
        if len(self.stream) >= _COMPRESSED_BELOW:
            return self.stream
        return zstandard.ZstdCompressor(level=12).compress(self.stream)

    @_Lazy
    def digest(self) -> str:
        """The digest of the stream, in hex: the manifest's name."""
        return digest(self.stream).hex()

    def names(self) -> list[str]:
        """The rows' names, in order."""
        return [row.spec.name for row in self.rows]

    def row(self, name: str) -> Row:
        """Find a row.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        try:
            return self.by_name[name]
        except KeyError:
            raise TensorNotFoundError(name) from None

    @staticmethod
    def looks_like(head: bytes) -> bool:
        """Tell from a file's first 64 KiB whether it may be a manifest; `from_bytes` decides."""
        if head[:4] != b"\xff\xff\xff\xff" or _SCHEMA_KEY not in head[:4096]:
            return False
        if 8 + int.from_bytes(head[4:8], "little") > len(head):
            return True  # the schema, which has the metadata in it, is longer
        try:
            return _SCHEMA_KEY in (read_schema(head).metadata or {})
        except UNREADABLE:
            return False

    @classmethod
    def from_blob(cls, blob: bytes, name: str | None = None) -> Manifest:
        """Read a manifest as a store keeps it; raises as `from_bytes` does.

        Args:
            blob: What the store has.
            name: The manifest's name, where it must hash to it. This is looked at first: damage must not be taken for a
                later release's writing.
        """
        manifest = cls.from_bytes(cls.stream_in(blob, name))
        object.__setattr__(manifest, "hints", split_hints(blob)[1])
        return manifest

    @staticmethod
    def stream_in(blob: bytes, name: str | None = None) -> bytes:
        """Take the Arrow stream out of what a store keeps; see `from_blob`."""
        blob, _ = split_hints(blob)
        if blob[:4] == _ZSTD_MAGIC:
            try:
                if not 0 < zstandard.frame_content_size(blob) < _COMPRESSED_BELOW:
                    raise FormatError("a compressed manifest has an impossible size")
                blob = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_COMPRESSED_BELOW)
            except zstandard.ZstdError as error:
                raise FormatError(f"a compressed manifest cannot be read: {error}") from error
        if name is not None and digest(blob).hex() != name[: 2 * DIGEST_BYTES]:
            raise FormatError(f"it hashes to {digest(blob).hex()}")
        return blob

    @classmethod
    def from_bytes(cls, data: bytes, *, max_rows: int | None = None) -> Manifest:
        """Read a manifest from an Arrow IPC stream, checking all that later code relies on.

        Args:
            data: The stream.
            max_rows: More rows are refused before they are read; one takes about 1.4 KB in memory.

        Raises:
            FormatError: It is not a manifest, or contradicts itself.
            NewerFormatError: A later release wrote it.
        """
        if len(data) > MAX_BYTES:
            raise FormatError(f"a manifest of {len(data)} bytes is too long")
        try:
            head = json.loads((read_schema(data).metadata or {})[_SCHEMA_KEY])
            version = head["format"]
            if type(version) is not int:
                raise FormatError("a manifest says no version")
            if version > VERSION:
                raise NewerFormatError("the manifest", version, VERSION)
            if type(head["metadata"]) is not dict:
                raise FormatError("a manifest's metadata are not a JSON object")
            batch = read_batch(data, MANIFEST_SCHEMA, what="a manifest", max_rows=max_rows)
            manifest = cls(
                kind=head["kind"],
                chunk_bytes=head["chunk_bytes"],
                store_id=head["store"],
                flavor=head["flavor"],
                metadata=head["metadata"],
                rows=_read_rows(batch, head["chunk_bytes"]),
            )
        except UNREADABLE as error:
            raise FormatError(f"not a manifest: {error}") from error
        manifest.__dict__["stream"] = data
        return manifest


def _content_key(said: str, rows: Sequence[Row]) -> bytes:
    """Hash all that a stream is made of: equal keys, equal streams."""
    parts: list[bytes] = [said.encode()]
    for row in rows:
        cuts = b"" if row.cuts is None else np.ascontiguousarray(row.cuts, dtype=np.int64).tobytes()
        about = repr((row.spec.name, row.spec.dtype, row.spec.shape, row.cuts is None, len(cuts), len(row.digests)))
        parts += [about.encode(), cuts, row.digests.tobytes()]
    return digest(b"\0".join(parts))


def _read_rows(batch: pa.RecordBatch, chunk_bytes: object) -> list[Row]:
    if type(chunk_bytes) is not int or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError("a manifest has an impossible chunk size")
    columns: list[Any] = [batch.column(name) for name in MANIFEST_SCHEMA.names]
    names, dtypes, shapes, chunks, cuts = columns
    if any(column.null_count for column in (names, shapes, chunks)) or any(
        column.values.null_count for column in (shapes, chunks, cuts)
    ):
        raise FormatError("a manifest leaves out what it must say")
    flat = _digests_of(chunks.values)
    chunk_at = chunks.offsets.to_numpy()
    cut_at = cuts.offsets.to_numpy()
    cut_values = cuts.values.to_numpy()
    cut_given = cuts.is_valid().to_numpy(zero_copy_only=False)
    rows: list[Row] = []
    for at, (name, dtype, shape) in enumerate(
        zip(names.to_pylist(), dtypes.to_pylist(), shapes.to_pylist(), strict=True)
    ):
        spec = Spec(name=name, dtype=dtype, shape=tuple(shape))
        row_cuts = cut_values[cut_at[at] : cut_at[at + 1]] if cut_given[at] else None
        row = Row(spec=spec, cuts=row_cuts, digests=flat[chunk_at[at] : chunk_at[at + 1]])
        # Counted before offsets are made for it: a hostile shape must not cost memory.
        fewest = n_chunks(spec.n_bytes, chunk_bytes)
        if len(row.digests) < fewest or len(row.digests) > fewest + (0 if row_cuts is None else len(row_cuts)):
            raise FormatError(f"row {name!r} of a manifest has {len(row.digests)} chunks, which do not make its size")
        if row_cuts is not None and len(row.ends(chunk_bytes)) != len(row.digests):
            raise FormatError(f"row {name!r} of a manifest has cuts that do not match its chunks")
        rows.append(row)
    return rows


def _digests_of(values: Any) -> Digests:
    if len(values) == 0:
        return np.empty((0, DIGEST_BYTES), np.uint8)
    begin = values.offset * DIGEST_BYTES
    flat: Digests = np.frombuffer(values.buffers()[1], np.uint8)[begin : begin + len(values) * DIGEST_BYTES]
    return flat.reshape(-1, DIGEST_BYTES)
