"""The batch decode gives the bytes that the codecs of Python give, and refuses what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow import native
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io._catalog import Places
from tensorcas_mlflow.chunk_io._decode import Batch, ChainLinks, Fault, Wanted, decode, decode_chain
from tensorcas_mlflow.chunk_io._plan import Target
from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Codec, Transform
from tensorcas_mlflow.errors import CorruptChunkError, FormatError
from tensorcas_mlflow.layout import ENTRY, RefTarget
from tensorcas_mlflow.store import Store

if native.core is None or not native.has_zstd:
    pytest.skip("the package was built without libzstd", allow_module_level=True)

GUARD = 64
SIZES = (1, 2, 3, 7, 8, 9, 31, 64, 1_000, 4_099, 30_001)


def floats(n_bytes: int, seed: int) -> bytes:
    """Return single precision numbers near those of another seed, cut to a size."""
    start = np.random.default_rng(1).normal(0, 0.02, n_bytes // 4 + 1)
    moved = np.random.default_rng(seed).normal(0, 1e-5, n_bytes // 4 + 1)
    return (start + moved).astype(np.float32).tobytes()[:n_bytes]


def decayed(n_bytes: int, n_steps: int) -> bytes:
    """Return numbers that have lost a little at every step."""
    words = np.random.default_rng(1).normal(0, 0.02, n_bytes // 4 + 1).astype(np.float32)
    for _ in range(n_steps):
        words *= np.float32(1 - 1e-6)
    return words.tobytes()[:n_bytes]


Chain = list[tuple[Codec, bytes]]
"""A chunk's codec and payload, then those of its base, and so on."""


def chains(n_bytes: int) -> Iterator[tuple[bytes, Chain]]:
    """Yield chunks with the chains that decode to them: every codec, transform, word, unit and inner codec."""
    base, chunk, following = floats(n_bytes, 2), floats(n_bytes, 3), floats(n_bytes, 4)
    full: Chain = [(RAW, base)]
    yield chunk, [(RAW, chunk)]
    yield chunk, [(ZSTD, bytes(ZSTD.encode(chunk, 4)))]
    yield from (
        (chunk, [(SHUFFLE_ZSTD, bytes(SHUFFLE_ZSTD.encode(chunk, width)))]) for width in (1, 3, 12, 700, 40_000)
    )
    yield from ((chunk, [(PLANES, bytes(PLANES.encode(chunk, width)))]) for width in (1, 2, 4, 8))
    yield bytes(n_bytes), [(PLANES, bytes(PLANES.encode(bytes(n_bytes), 4)))]
    for width in (1, 2, 4, 8):
        for transform in Transform:
            yield chunk, [(DELTA, bytes(DELTA.encode_as(chunk, width, base, transform))), *full]
        for unit in (1, 2, 4):
            if unit * width <= 8:
                grouped = bytes(DELTA.encode_as(chunk, width, base, Transform.GROUPED, unit=unit))
                yield chunk, [(DELTA, grouped), *full]
    for inner in (RAW, ZSTD, PLANES):
        payload = bytes([inner.number, 0x20]) + bytes(inner.encode(chunk, 4))
        made = bytearray(n_bytes)
        DELTA.decode_into(payload, memoryview(made), base)
        yield bytes(made), [(DELTA, payload), *full]
    lost, before = decayed(n_bytes, 5), decayed(n_bytes, 0)
    yield lost, [(DELTA, bytes(DELTA.encode_as(lost, 4, before, Transform.DECAYED))), (RAW, before)]
    first = (DELTA, bytes(DELTA.encode(chunk, 4, base)))
    yield following, [(DELTA, bytes(DELTA.encode(following, 2, chunk))), first, (PLANES, bytes(PLANES.encode(base, 4)))]


def links_of(chunk: bytes, chain: Chain) -> ChainLinks:
    """Lay the links of one chunk out as in a pack without gaps."""
    entries = np.zeros(len(chain), dtype=ENTRY)
    sizes = np.array([len(payload) for _, payload in chain])
    entries["codec"] = [codec.number for codec, _ in chain]
    entries["stored_bytes"], entries["offset"] = sizes, sizes.cumsum() - sizes
    entries["raw_bytes"] = len(chunk)
    entries["digest"][0] = np.frombuffer(digest(chunk), np.uint8)
    none = np.zeros(len(chain), np.int64)
    places = Places(found=np.ones(len(chain), bool), pack=none, packs=["a" * 32], entries=entries)
    return ChainLinks(places=places, begins=np.array([0, len(chain)]))


def run_core(chunk: bytes, chain: Chain, *, verify: bool = True) -> bytes | None:
    """Decode a chunk with the core; return None if it fails, and check the bytes around the target."""
    out = bytearray(b"\xa5" * (len(chunk) + 2 * GUARD))
    target = Target(
        blocks=[memoryview(out)],
        block=np.zeros(1, np.int64),
        start=np.array([GUARD]),
        n_bytes=np.array([len(chunk)]),
    )
    wanted = Wanted(digests=np.frombuffer(digest(chunk), np.uint8).reshape(1, -1), target=target, verify=verify)
    links = links_of(chunk, chain)
    batch = Batch.of(links, np.arange(1), np.zeros(1, np.int64), 0)
    failed = decode(links, wanted, batch, source=0, buffers=[b"".join(payload for _, payload in chain)])
    made = bytes(out[GUARD : GUARD + len(chunk)])

    assert out[:GUARD] + out[-GUARD:] == b"\xa5" * 2 * GUARD
    if len(failed):
        assert made == b"\xa5" * len(chunk), "a failed chunk has changed its target"
        return None
    return made


def run_python(chunk: bytes, chain: Chain, *, verify: bool = True) -> bytes | None:
    """Decode a chunk with the codecs of Python; return None if it fails."""
    links = links_of(chunk, chain)
    expected = digest(chunk) if verify else None
    made = decode_chain(links.places.entries, [payload for _, payload in chain], expected, len(chunk))
    return None if isinstance(made, Fault) else bytes(made)


@pytest.mark.parametrize("n_bytes", SIZES)
def test_core_decodes_every_codec_to_the_bytes_of_the_chunk(n_bytes: int) -> None:
    for chunk, chain in chains(n_bytes):
        assert run_core(chunk, chain) == chunk, [codec.name for codec, _ in chain]
        assert run_python(chunk, chain) == chunk


def test_chain_of_the_greatest_depth_is_decoded() -> None:
    n_bytes = 10_001
    states = [floats(n_bytes, seed) for seed in range(2, 11)]
    chain: Chain = [(ZSTD, bytes(ZSTD.encode(states[0], 4)))]
    for base, chunk in pairwise(states):
        chain.insert(0, (DELTA, bytes(DELTA.encode(chunk, 4, base))))

    assert len(chain) == 9
    assert run_core(states[-1], chain) == states[-1]


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_core_accepts_no_changed_byte_that_python_refuses(change: int) -> None:
    for chunk, chain in chains(257):
        for number, (codec, payload) in enumerate(chain):
            for at in range(len(payload)):
                changed = bytearray(payload)
                changed[at] ^= change
                other = [*chain[:number], (codec, bytes(changed)), *chain[number + 1 :]]
                found = run_core(chunk, other)

                assert found in (None, chunk)
                assert found == run_python(chunk, other), (codec.name, at)


def test_core_refuses_every_payload_that_is_cut_short_or_continued() -> None:
    for chunk, chain in chains(257):
        codec, payload = chain[0]
        for other in [*(payload[:n_bytes] for n_bytes in range(0, len(payload), 3)), payload + b"x"]:
            changed = [(codec, other), *chain[1:]]

            found = run_core(chunk, changed)
            assert found in (None, chunk)
            assert found is None or (len(other) > len(payload) and run_python(chunk, changed) == chunk), codec.name


def test_unknown_codec_is_refused_by_the_core() -> None:
    chunk = floats(100, 2)
    links = links_of(chunk, [(RAW, chunk)])
    links.places.entries["codec"] = 9
    wanted = Wanted(
        digests=np.frombuffer(digest(chunk), np.uint8).reshape(1, -1),
        target=Target.of_buffers([memoryview(bytearray(100))]),
        verify=False,
    )

    failed = decode(links, wanted, Batch.of(links, np.arange(1), np.zeros(1, np.int64), 0), source=0, buffers=[chunk])
    assert failed.tolist() == [0]
    with pytest.raises(FormatError):
        raise FormatError(str(decode_chain(links.places.entries, [chunk], None, 100)))


def tables() -> tuple[list[Any], list[Any], list[Any]]:
    """Make the tables of two chunks in two parts, with their buffers and blocks."""
    chunk, base = floats(256, 3), floats(256, 2)
    payload = bytes(DELTA.encode(chunk, 4, base))
    read = np.dtype([("start", "<u8"), ("n_bytes", "<u8"), ("source", "<i4"), ("kind", "<u4")])
    link = np.dtype([("begin", "<u8"), ("n_stored", "<u4"), ("read", "<u4"), ("codec", "<u4"), ("unused", "<u4")])
    of_chunk = [("start", "<u8"), ("block", "<u4"), ("n_bytes", "<u4"), ("first_link", "<u4"), ("n_links", "<u4")]
    part = np.dtype([("first_read", "<u4"), ("last_read", "<u4"), ("first_chunk", "<u4"), ("last_chunk", "<u4")])
    made = [
        np.array([(0, len(payload), 0, 0), (0, 256, 1, 0), (0, 256, 1, 0)], read),
        np.array([(0, len(payload), 0, 3, 0), (0, 256, 1, 0, 0), (0, 256, 2, 0, 0)], link),
        np.array(
            [
                (0, 0, 256, 0, 2, np.frombuffer(digest(chunk), "u1")),
                (256, 0, 256, 2, 1, np.frombuffer(digest(base), "u1")),
            ],
            np.dtype([*of_chunk, ("digest", "u1", (32,))]),
        ),
        np.array([(0, 2, 0, 1), (2, 3, 1, 2)], part),
    ]
    return made, [payload, base], [memoryview(bytearray(512))]


def test_tables_with_two_parts_are_decoded() -> None:
    made, sources, blocks = tables()
    assert native.core is not None

    assert native.core.decode(*made, sources, blocks, True, 2) == b"\0\0"
    assert bytes(blocks[0]) == floats(256, 3) + floats(256, 2)


@pytest.mark.parametrize("table", range(4))
def test_tables_that_point_outside_of_each_other_or_of_a_buffer_are_refused(table: int) -> None:
    assert native.core is not None
    names = [name for name in tables()[0][table].dtype.names if name not in ("digest", "unused", "codec")]
    for name in names:
        for row in range(len(tables()[0][table])):
            for value in (1 << 31, (1 << 31) - 1, 1_000):
                made, sources, blocks = tables()
                field = made[table][name]
                field[row] = value if value <= np.iinfo(field.dtype).max else -1

                with pytest.raises(ValueError, match="do not fit"):
                    native.core.decode(*made, sources, blocks, True, 2)
                assert not any(blocks[0])


def test_tables_of_broken_rows_and_memory_that_cannot_be_written_are_refused() -> None:
    assert native.core is not None
    made, sources, _ = tables()

    with pytest.raises(ValueError, match="do not fit"):
        native.core.decode(made[0].tobytes()[:-1], *made[1:], sources, [memoryview(bytearray(512))], True, 1)
    with pytest.raises(BufferError):
        native.core.decode(*made, sources, [bytes(512)], True, 1)
    with pytest.raises(TypeError):
        native.core.decode(*made, [1, 2], [memoryview(bytearray(512))], True, 1)


@pytest.mark.parametrize("descriptor", [-1, 1_000_000])
def test_read_that_fails_fails_its_chunk_alone(descriptor: int) -> None:
    assert native.core is not None
    made, sources, blocks = tables()
    made[0]["source"][2], made[0]["kind"][2] = descriptor, 1

    statuses = native.core.decode(*made, sources, blocks, True, 1)
    assert statuses[0] == 0
    assert statuses[1] != 0


# --- whole loads


@pytest.fixture(params=[True, False], ids=["core", "python"])
def with_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(native, "has_zstd", request.param)
    return bool(request.param)


def save_history(root: Path) -> tuple[Store, list[dict[str, np.ndarray[Any, Any]]]]:
    """Save four steps, the later ones as deltas, with tensors of many sizes."""
    store = Store.init(root, chunk_bytes=16 << 10)
    rng = np.random.default_rng(0)
    state = {f"w{n}": rng.normal(0, 0.02, 10_000 * n + 3).astype(np.float32) for n in range(1, 5)}
    steps = []
    for step in range(4):
        with store.write_checkpoint(state, series="s") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
        steps.append(state)
        state = {name: (x + rng.normal(0, 1e-5, len(x))).astype(np.float32) for name, x in state.items()}
    return store, steps


def test_every_step_of_a_history_is_read_by_the_core_and_by_python(tmp_path: Path, with_core: bool) -> None:
    store, steps = save_history(tmp_path)
    refs = sorted(store.checkpoints(), key=lambda ref: ref.step or 0)

    assert any(store.catalog.find(store.manifest(ref).digests).entries["depth"].any() for ref in refs)
    for ref, state in zip(refs, steps, strict=True):
        found = Store.open(tmp_path).read_tensors(store.manifest(ref))
        assert all(np.array_equal(found[name], array) for name, array in state.items())


@pytest.mark.parametrize("verify", [True, False])
def test_damaged_chunk_does_not_reach_the_memory_it_is_read_into(tmp_path: Path, with_core: bool, verify: bool) -> None:
    store = Store.init(tmp_path, chunk_bytes=16 << 10)
    wanted = np.arange(20_000, dtype=np.float32)
    with store.write_checkpoint({"w": wanted}) as pending:
        manifest = pending.manifest
        pending.commit(RefTarget(run_id="run", step=1))
    [pack] = (tmp_path / ".tensorcas" / "packs").iterdir()
    entry = store.catalog.find(manifest.digests).entries[2]
    data = bytearray(pack.read_bytes())
    data[int(entry["offset"])] ^= 0xFF
    pack.write_bytes(data)
    out = np.full_like(wanted, -1)

    with pytest.raises(CorruptChunkError, match="'w'"):
        Store.open(tmp_path).read_tensors(manifest, out={"w": out}, verify=verify)
    assert ((out == -1) | (out == wanted)).all()
    assert (out[8_192:12_288] == -1).all()
