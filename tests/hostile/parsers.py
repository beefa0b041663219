"""Everything that reads bytes of a store, each with blobs to damage. As a program: damages them and tells what
came of it.

Digests are computed anew after the damage, as whoever can write to a store can do, so that the checks behind them are
reached. It runs in a process of its own, since the libraries underneath could end it, and may take memory only so far.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from tensorcas_mlflow.backends import BlobInfo, MemoryBackend
from tensorcas_mlflow.backends._objects import _MOVE, _Move
from tensorcas_mlflow.base.digest import digest, unique_rows
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.chunk_io import TensorsFile
from tensorcas_mlflow.chunk_io._cache_files import NAME, PutExtent, open_file, write_file
from tensorcas_mlflow.codecs import PLANES, RAW, SHUFFLE_ZSTD, ZSTD, codec_numbered, evaluate
from tensorcas_mlflow.errors import CorruptError, TensorCasError
from tensorcas_mlflow.layout import RefTarget, new_ref, ref_bytes
from tensorcas_mlflow.layout._records import parse_ref, record_bytes
from tensorcas_mlflow.layout.manifests import (
    Derivation,
    Manifest,
    Row,
    TensorsFileLayout,
    hint_bytes,
    kind_of,
    read_hints,
    read_pack_hints,
    split_hints,
)
from tensorcas_mlflow.layout.packs import (
    ENTRY,
    PackWriter,
    Payload,
    make_table,
    read_segment,
    read_table,
    segment_bytes,
)
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES
from tensorcas_mlflow.store.protocol import (
    condemned_bytes,
    intent_bytes,
    new_format,
    parse_format,
    parse_intent,
    read_condemned,
)
from tests.hostile import delta_parsers as of_deltas
from tests.hostile.damage import damaged

CHUNK = 4096
MORE_BYTES = 1 << 30
"""Memory that the program may take beyond its memory at the start."""
FREE_BYTES = 8 << 20
SLOW_S = 2.0
POOLS: list[pa.MemoryPool] = []
"""None may go while something is left that was taken from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """A reader of bytes, and what it is given."""

    samples: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    """Reads damaged bytes; what it gives back has been looked at."""
    mended: Callable[[bytes], bytes] = bytes
    """Makes the digests fit again."""
    times: int = 8
    """Limit for memory, as a multiple of the size of the bytes."""


def rows() -> list[Row]:
    """Rows of every kind."""

    def row(name: str, shape: tuple[int, ...], n: int, cuts: list[int] | None = None, dtype: str = "uint8") -> Row:
        at = None if cuts is None else np.array(cuts, np.int64)
        return Row(spec=Spec(name=name, dtype=dtype, shape=shape), cuts=at, digests=digests(n))

    return [
        row("weight", (3, 4000), 3),
        row("empty", (0, 7), 0),
        row("scalar", (), 1, dtype="float64"),
        row("cut", (9000,), 4, [100, 5000, 9000]),
        row("名前", (1,), 1, dtype="{a:int8,b:float32[2]}"),
    ]


def digests(n: int) -> Any:
    return np.frombuffer(b"".join(digest(bytes([k])) for k in range(n)), np.uint8).reshape(-1, 32)


@cache
def manifest() -> Manifest:
    return Manifest(
        kind="checkpoint", chunk_bytes=CHUNK, store_id="f" * 32, flavor="x", metadata={"a": [1]}, rows=rows()
    )


@cache
def derived_manifest() -> Manifest:
    """Rows that are functions of others, one of each function."""

    def row(dtype: str | None, *shape: int, name: str = "") -> Row:
        spec = Spec(name=name, dtype=dtype, shape=shape)
        return Row(spec=spec, cuts=None, digests=digests(-(-spec.n_bytes // CHUNK)))

    return Manifest(
        kind="checkpoint",
        chunk_bytes=CHUNK,
        store_id="f" * 32,
        flavor=None,
        rows=[
            row("float32", 32, 64, name="w"),
            row("bfloat16", 32, 64, name="cast"),
            row("float32", 64, 32, name="permute"),
            row("float16", 32, 20, name="slice"),
            row("float32", 64, 64, name="assemble"),
            row("float32", 32, 64, name="mean"),
            row(None, 2176, name="q8_0"),
        ],
        inputs=[row("float32", 32, 64)],
        derived=(
            Derivation(1, "cast", {}, (0,)),
            Derivation(2, "permute", {"axes": [1, 0]}, (0,)),
            Derivation(3, "slice", {"axis": 1, "start": 30}, (7,)),
            Derivation(4, "assemble", {"offsets": [[0, 0], [32, 0]]}, (0, 7)),
            Derivation(5, "mean", {}, (0, 7)),
            Derivation(6, "q8_0", {}, (7,)),
        ),
    )


def use(found: Manifest) -> None:
    """Look at all that a manifest says: what is read must be such that this cannot fail."""
    assert found.n_bytes == sum(row.spec.n_bytes for row in found.rows)
    assert len(found.digests) == sum(len(row.digests) for row in found.rows)
    for row in found.rows:
        ends = row.ends(found.chunk_bytes)
        assert len(ends) == len(row.digests)
        assert row.identity
        if len(ends):
            assert int(ends[-1]) == row.spec.n_bytes
            assert int(np.diff(ends, prepend=0).min()) > 0
    TensorsFileLayout.of(found)
    assert len(found.stored_sizes) == len(found.stored_digests)
    found.names_of_stored(np.arange(len(found.stored_digests)))
    for each in found.derived:
        inputs = [np.zeros(kind.shape, kind.numpy_dtype) for kind in (kind_of(found.table, at) for at in each.inputs)]
        made = evaluate(each.function, each.params, inputs, kind_of(found.table, each.row))
        assert made.nbytes == found.rows[each.row].spec.n_bytes


# --- packs


def chunks() -> list[tuple[bytes, Any]]:
    """Chunks that each codec encodes in its own way."""
    ramp = (np.arange(3 * CHUNK) % 251).astype(np.uint8).tobytes()
    floats = np.linspace(0, 1, CHUNK).astype(np.float32).tobytes()
    return [
        (ramp, RAW),
        (ramp, ZSTD),
        (floats, SHUFFLE_ZSTD),
        (floats, PLANES),
        (bytes(CHUNK), SHUFFLE_ZSTD),
        (b"", RAW),
    ]


@cache
def pack() -> bytes:
    made = [
        Payload(
            digest=digest(raw), raw_bytes=len(raw), codec=codec, typesize=4, data=codec.encode(raw, 4), begins_row=True
        )
        for raw, codec in chunks()
    ]
    return b"".join(bytes(piece) for piece in PackWriter().pieces(made))


def with_table_digest(blob: bytes) -> bytes:
    if len(blob) < FOOTER_BYTES:
        return blob
    offset = int.from_bytes(blob[-FOOTER_BYTES + 16 : -FOOTER_BYTES + 24], "little")
    return blob[:-32] + digest(blob[min(offset, len(blob)) : -32])


def tables() -> list[bytes]:
    """Packs of next to nothing, in which nearly every byte is of the table."""
    made = [
        Payload(digest=digest(raw), raw_bytes=len(raw), codec=RAW, typesize=1, data=raw, begins_row=False)
        for raw in (b"hello", b"", b"world")
    ]
    return [b"".join(bytes(piece) for piece in PackWriter().pieces(made)), pack()]


def read_pack(blob: bytes) -> None:
    """Read a pack's table and decode what it names, into buffers of the sizes that a manifest would say."""
    entries = read_table("packs/x.pack", len(blob), lambda start, stop: blob[start:stop])
    for entry in entries[:100]:
        start, size, n_bytes = int(entry["offset"]), int(entry["stored_bytes"]), int(entry["raw_bytes"])
        if n_bytes <= 4 * CHUNK:
            out = bytearray(n_bytes + 64)
            try:
                codec_numbered(int(entry["codec"])).decode_into(blob[start : start + size], memoryview(out)[:n_bytes])
            finally:
                assert not any(out[n_bytes:]), "written behind the buffer"


# --- records


@cache
def ref() -> bytes:
    target = RefTarget(path="a/b.arrow", uri="file:///x/a/b.arrow", run_id="r", step=3, metrics={"loss": 1.5, "n": 2})
    made = new_ref(target, key=target.key, kind="checkpoint", manifest="0" * 64, n_bytes=7, flavor="x")
    return ref_bytes(made)


VALUES: list[Any] = [None, True, -1, 1 << 63, 10**400, float("inf"), float("nan"), "", "..", "../../x", "\0", "\ud800"]
VALUES += ["x" * 5000, "http://u:p@h", [], [None], ["../../../x"], {}, {"a": 10**400}, {"": "nan"}, [[[[]]]]]


def records(text: bytes, rest: bytes = b"") -> list[bytes]:
    """A record, others that say something else in one place, and such as go deep or far."""
    record = json.loads(text)
    record.pop("check", None)
    changed = [{**record, key: value} for key in record for value in VALUES]
    # An attacker computes the check anew.
    others = [record_bytes(each) + rest for each in changed]
    deep = b"[" * 100_000
    return [text + rest, *others, deep, text[:-1] + b', "more": ' + deep, text.replace(b": 1", b": " + b"9" * 5000)]


def read_a_ref(data: bytes) -> None:
    found = parse_ref("refs/artifacts/a/@b.arrow", data)
    assert found.label
    with suppress(CorruptError):
        assert isinstance(found.created_s, float)
    assert 0 <= found.n_bytes < 1 << 63
    float(found.n_bytes)


def moves() -> list[bytes]:
    """Return intents with a commit under way: one for each possible record in the move's place."""
    data, magic, said = _Move(dest="refs/a", before="x", data=ref()).to_bytes().rpartition(_MOVE)
    return [data + magic + each for each in records(said)]


def read_an_intent(data: bytes) -> None:
    found = parse_intent(BlobInfo(key="intents/x", size=len(data), modified_s=0.0, token=""), data)
    assert found.digests is None or found.digests.shape[1] == 32


def read_a_list(data: bytes) -> None:
    backend = MemoryBackend()
    backend.put_new("condemned/" + "c" * 32, [data])
    found = read_condemned(backend)
    assert len(found.lists) == 1
    for name in found.packs:
        backend.stat(f"packs/{name}.pack")


# --- files


def read_tensors_file(scratch: Path, data: bytes) -> None:
    file = scratch / "x.tensors"
    file.write_bytes(data)
    opened = TensorsFile(file)
    use(opened.manifest)
    for array in opened.read(verify=False).values():
        assert array.nbytes <= len(data)


def self_contained() -> bytes:
    layout = TensorsFileLayout.of(manifest())
    return layout.head().ljust(layout.n_bytes, b"\1")


def with_manifest_digest(data: bytes) -> bytes:
    n_bytes = int.from_bytes(data[8:16], "little")
    return data[:16] + digest(data[64 : 64 + min(n_bytes, len(data))]) + data[48:]


@cache
def extents() -> list[bytes]:
    """Files of a few bytes, in which nearly every one is of the head, and of several blocks."""
    small: list[PutExtent] = [(8, b"x" * 50), (900, b"y" * 30), (1 << 40, b"z")]
    large: list[PutExtent] = [(8, b"x" * 5000), (9000, b"y" * 300_000)]
    with TemporaryDirectory() as folder:
        return [Path(write_file(folder, b"L" * 32, each)).read_bytes() for each in (small, small, small, large)]


def read_extents(scratch: Path, data: bytes) -> None:
    n_extents, _, n_bytes = struct.unpack_from("<IIQ", data.ljust(64, b"\0"), 8)
    at = 64 + 16 * n_extents
    head = data[: at + 16 * -(-n_bytes // (256 << 10))]
    file = scratch / f"{digest(head)[:16].hex()}.extents"
    assert NAME.fullmatch(file.name)
    file.write_bytes(data)
    try:
        opened = open_file(os.fspath(file), b"L" * 32)
        for position, start, stop in zip(opened.positions, opened.starts, opened.stops, strict=True):
            assert len(opened.read(int(position), int(position + stop - start))) == stop - start
    finally:
        file.unlink()


# --- hints and segments


def entries() -> Any:
    made = np.zeros(9, dtype=ENTRY)
    made["digest"] = unique_rows(digests(9))[0]
    made["offset"] = np.arange(9) * 70 + 8
    made["stored_bytes"] = made["raw_bytes"] = 70
    return made


def hints() -> bytes:
    return hint_bytes(["a" * 32, "b" * 32], np.arange(9) % 2, entries())


def with_hint_digest(data: bytes) -> bytes:
    packed = data[:-28]
    return packed + struct.pack("<I16s8s", len(packed), digest(packed)[:16], data[-8:]) if len(data) > 28 else data


def read_some_hints(data: bytes) -> None:
    _, found = split_hints(data)
    assert len(read_pack_hints(found) or ()) <= 1024
    told = read_hints(found, entries()["digest"])
    if told is not None:
        assert [told.packs[at] for at in told.pack]
        assert int(told.entries["offset"].max()) <= 1 << 56


def segment() -> bytes:
    return segment_bytes(make_table({"a" * 32: entries(), "b" * 32: entries()[:4]}))


def read_a_segment(data: bytes) -> None:
    table = read_segment("index/x.segment", data)
    table.find(digests(3))
    for row in range(len(table)):
        table.key_of(row)


def parsers(scratch: Path) -> dict[str, Parser]:
    """All of them, by name."""
    stream = manifest().to_bytes()
    file_of = partial(read_tensors_file, scratch)
    intent = intent_bytes("0" * 64, digests(3))
    list_ = condemned_bytes(frozenset(["a" * 32]), frozenset(["0" * 64]))
    return {
        "manifest": Parser(
            samples=lambda: [stream, derived_manifest().to_bytes()],
            read=lambda data: use(Manifest.from_bytes(data)),
            times=64,
        ),
        "manifest's blob": Parser(
            samples=lambda: [
                manifest().to_blob(),
                manifest().to_blob() + hints(),
                stream + hints(),
                derived_manifest().to_blob(),
            ],
            read=lambda data: use(Manifest.from_blob(data)),
            times=64,
        ),
        "manifest's head": Parser(samples=lambda: [stream[:2000], stream], read=Manifest.looks_like),
        "hints": Parser(samples=lambda: [hints()], read=read_some_hints, mended=with_hint_digest),
        "index segment": Parser(samples=lambda: [segment()], read=read_a_segment),
        "pack": Parser(samples=lambda: [pack()], read=read_pack, mended=with_table_digest),
        "pack's table": Parser(samples=tables, read=read_pack, mended=with_table_digest),
        "delta": Parser(samples=of_deltas.deltas, read=of_deltas.read_delta),
        "byte planes": Parser(samples=of_deltas.planes, read=of_deltas.read_planes),
        "pack of deltas": Parser(
            samples=lambda: [of_deltas.pack()], read=of_deltas.read_pack, mended=with_table_digest, times=16
        ),
        "index segment of deltas": Parser(samples=lambda: [of_deltas.segment()], read=of_deltas.read_a_segment),
        "census of deltas": Parser(
            samples=lambda: [of_deltas.census()], read=of_deltas.read_a_census, mended=of_deltas.with_census_digest
        ),
        "intent with bases": Parser(
            samples=lambda: records(*of_deltas.intent().split(b"\n", 1)), read=of_deltas.read_an_intent
        ),
        "ref": Parser(samples=lambda: records(ref()), read=read_a_ref),
        "intent": Parser(samples=lambda: records(*intent.split(b"\n", 1)), read=read_an_intent),
        "condemned list": Parser(samples=lambda: records(list_), read=read_a_list),
        "format": Parser(samples=lambda: records(new_format(CHUNK).strip()), read=parse_format),
        "move": Parser(samples=moves, read=_Move.parse),
        "self-contained file": Parser(
            samples=lambda: [self_contained()], read=file_of, mended=with_manifest_digest, times=64
        ),
        "file of the chunk cache": Parser(samples=extents, read=partial(read_extents, scratch)),
    }


# --- the program


def attack(parser: Parser, seeds: range) -> dict[str, Any]:
    """Give a parser damaged blobs; tells what it raised that is not ours, and what it took."""
    samples = parser.samples()
    if seeds.start == 0:  # the samples, and as many damaged ones
        seeds = range(len(samples) + seeds.stop)
    told: dict[str, Any] = {"n": len(seeds), "sound": 0, "alien": [], "greedy": [], "slow": []}
    for seed in seeds:
        data = parser.mended(damaged(samples[seed % len(samples)], seed)) if seed >= len(samples) else samples[seed]
        pool = pa.proxy_memory_pool(pa.system_memory_pool())
        POOLS.append(pool)
        pa.set_memory_pool(pool)
        tracemalloc.reset_peak()
        before, begun = tracemalloc.get_traced_memory()[0], time.process_time()
        try:
            parser.read(data)
            told["sound"] += 1
        except TensorCasError:
            pass
        except Exception as error:  # noqa: BLE001 -- whatever it is, a test tells it
            told["alien"].append(f"seed {seed}: {type(error).__name__}: {error}"[:300])
        finally:
            pa.set_memory_pool(pa.system_memory_pool())  # Arrow does not keep the one it is told
        peak = tracemalloc.get_traced_memory()[1] - before + (pool.max_memory() or 0)
        if peak > parser.times * len(data) + FREE_BYTES:
            told["greedy"].append(f"seed {seed}: {peak} bytes for {len(data)}")
        if time.process_time() - begun > SLOW_S:
            told["slow"].append(f"seed {seed}: {time.process_time() - begun:.1f} s")
    return told


def main(names: list[str], seeds: range) -> None:
    # What is imported later would count, and the address space that Arrow takes at its first allocation.
    pa.allocate_buffer(64)

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE_BYTES, now + MORE_BYTES))
    with TemporaryDirectory() as scratch:
        for name, parser in parsers(Path(scratch)).items():
            if name in names or not names:
                print(json.dumps({"begun": name}), flush=True)
                tracemalloc.start()
                print(json.dumps({"name": name, **attack(parser, seeds)}), flush=True)
                tracemalloc.stop()


if __name__ == "__main__":
    main(sys.argv[3:], range(int(sys.argv[1]), int(sys.argv[2])))
