"""The batch decode gives the bytes that the reference gives, and refuses what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io._decode import (
    CHUNK,
    LINK,
    NOWHERE,
    PART,
    READ,
    Batch,
    ChainLinks,
    Fault,
    Wanted,
    decode,
    decode_chain,
)
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.chunk_io._plan import Target
from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Transform
from tensorcas_mlflow.errors import CorruptChunkError, FormatError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import ENTRY, MAX_DEPTH
from tensorcas_mlflow.native import core
from tensorcas_mlflow.store import Store
from tests.native.chains import Chain, chains, floats, tables
from tests.reference.choose import CODECS

GUARD = 64
SAMPLES = [sample for n_bytes in (1, 7, 257, 4_099) for sample in chains(n_bytes)]
SIZES = (1, 2, 3, 7, 8, 9, 31, 64, 1_000, 4_099, 30_001)


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
    """Decode a chunk with the codecs of the reference; return None if it fails."""
    made: bytes | None = None
    for codec, payload in reversed(chain):
        out = bytearray(len(chunk))
        try:
            CODECS[codec.number].decode_into(payload, memoryview(out), made)
        except FormatError:
            return None
        made = bytes(out)
    return made if made and (made == chunk or not verify) else None


@pytest.mark.parametrize("n_bytes", SIZES)
def test_core_decodes_every_codec_to_the_bytes_of_the_chunk(n_bytes: int) -> None:
    for chunk, chain in chains(n_bytes):
        assert run_core(chunk, chain) == chunk, [codec.name for codec, _ in chain]
        assert run_python(chunk, chain) == chunk


def few_changed(base: bytes, seed: int) -> bytes:
    """Return single precision numbers of which one in a hundred differs from the base's."""
    words = np.frombuffer(base, np.uint32).copy()
    words[np.random.default_rng(seed).random(len(words)) < 0.01] += np.uint32(seed)
    return words.tobytes()


@pytest.mark.parametrize("n_sparse", [0, 1, 3, MAX_DEPTH])
def test_chain_of_the_greatest_depth_is_decoded(n_sparse: int) -> None:
    """Sparse deltas change the memory of their base, and others are made next to it."""
    n_bytes = 10_000
    base = floats(n_bytes, 2)
    chain: Chain = [(ZSTD, bytes(ZSTD.encode(base, 4)))]
    for number in range(MAX_DEPTH):
        is_sparse = number % (n_sparse + 1) > 0
        chunk = few_changed(base, number + 1) if is_sparse else floats(n_bytes, number + 3)
        transform = Transform.SPARSE if is_sparse else Transform.GROUPED
        chain.insert(0, (DELTA, bytes(DELTA.encode_as(chunk, 4, base, transform))))
        base = chunk

    assert run_core(base, chain) == run_python(base, chain) == base
    assert run_core(base, chain, verify=False) == base


CHANGES = (0x01, 0x80, 0xFF)


def check_changed_payloads(change: int, first: int, step: int) -> None:
    """Change each byte of the first few of every payload, and of the others some."""
    for chunk, chain in chains(257):
        for number, (codec, payload) in enumerate(chain):
            for at in sorted({*range(min(12, len(payload))), *range(first, len(payload), step)}):
                changed = bytearray(payload)
                changed[at] ^= change
                other = [*chain[:number], (codec, bytes(changed)), *chain[number + 1 :]]

                assert run_core(chunk, other) in (None, chunk), (codec.name, at)


@pytest.mark.parametrize("change", CHANGES)
def test_core_decodes_a_changed_payload_to_the_chunk_or_not_at_all(change: int) -> None:
    """The changes together reach every byte."""
    check_changed_payloads(change, CHANGES.index(change), len(CHANGES))


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_core_decodes_a_payload_with_any_changed_byte_to_the_chunk_or_not_at_all(change: int) -> None:
    check_changed_payloads(change, 0, 1)


@pytest.mark.long
def test_both_refuse_every_payload_that_is_cut_short_or_continued() -> None:
    for chunk, chain in chains(257):
        codec, payload = chain[0]
        for other in [*(payload[:n_bytes] for n_bytes in range(0, len(payload), 3)), payload + b"x"]:
            changed = [(codec, other), *chain[1:]]

            assert run_core(chunk, changed) is None, codec.name
            assert run_python(chunk, changed) is None, codec.name


SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"


def frames_of(content: bytes) -> dict[str, bytes]:
    """Return frames of a content, sound and unsound ones."""
    plain = zstandard.ZstdCompressor().compress(content)
    summed = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    first, second = (zstandard.ZstdCompressor().compress(part) for part in (content[:1], content[1:]))
    size, head = len(content).to_bytes(4, "little"), zstandard.frame_header_size(plain)
    return {
        "plain": plain,
        "checksum": summed,
        "cut checksum": summed[:-4],
        "cut in its checksum": summed[:-1],
        "wrong checksum": summed[:-1] + bytes([summed[-1] ^ 1]),
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(content),
        "wide window": zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=1)
        ).compress(content),
        "widest window": plain[:4] + bytes([0x80, 21 << 3]) + size + plain[head:],
        "dictionary": plain[:4] + bytes([plain[4] | 1, 7]) + plain[5:],
        "skippable before": SKIPPED + plain,
        "skippable behind": plain + SKIPPED,
        "skippable alone": SKIPPED,
        "byte behind": plain + b"\0",
        "two": first + second,
        "twice": plain + plain,
        "empty before": zstandard.ZstdCompressor().compress(b"") + plain,
        "empty behind": plain + zstandard.ZstdCompressor().compress(b""),
        "cut": plain[:-1],
        "nothing": b"",
    }


GOOD_FRAMES = {"plain", "checksum", "wide window", "widest window"}


@pytest.mark.parametrize("n_bytes", [1, 200, 4_099, 100_000])
def test_core_and_python_take_the_same_frames(n_bytes: int) -> None:
    chunk = np.repeat(np.frombuffer(floats(n_bytes, 2), np.uint8)[: n_bytes // 2 + 1], 2).tobytes()[:n_bytes]
    base = floats(n_bytes, 3)
    for name, frame in frames_of(chunk).items():
        shuffled = (1).to_bytes(2, "little") + frame
        for chain in ([(ZSTD, frame)], [(SHUFFLE_ZSTD, shuffled)]):
            expected = chunk if name in GOOD_FRAMES else None
            assert run_core(chunk, chain) == run_python(chunk, chain) == expected, (name, chain[0][0].name)
        plane = b"\1" + len(frame).to_bytes(4, "little") + frame
        delta = bytes([ZSTD.number, 0]) + frame
        for other in ([(PLANES, plane)], [(DELTA, delta), (RAW, base)]):
            in_core, in_python = (run(chunk, other, verify=False) for run in (run_core, run_python))
            assert (in_core is None) == (in_python is None), (name, other[0][0].name)


@pytest.mark.long
@given(st.data())
@settings(max_examples=300, derandomize=True)  # releases of Zstandard may differ in damaged blocks
def test_core_and_python_take_the_same_changed_payloads(data: st.DataObject) -> None:
    chunk, chain = data.draw(st.sampled_from(SAMPLES))
    at = data.draw(st.integers(0, len(chain) - 1))
    codec, payload = chain[at]
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(0, 3))):
        if changed:
            place = data.draw(st.integers(0, min(len(changed), 16) - 1))
            changed[place] = data.draw(st.integers(0, 255))
    kind = data.draw(st.sampled_from(["as it is", "cut", "continued", "skipped"]))
    if kind == "cut":
        del changed[data.draw(st.integers(0, len(changed))) :]
    changed += {"continued": data.draw(st.binary(max_size=9)), "skipped": SKIPPED}.get(kind, b"")
    other = [*chain[:at], (codec, bytes(changed)), *chain[at + 1 :]]

    assert run_core(chunk, other) == run_python(chunk, other), codec.name


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
    assert isinstance(decode_chain(links.places.entries, [chunk], None, 100), Fault)


def test_tables_with_two_parts_are_decoded() -> None:
    made, sources, blocks = tables()

    assert core.decode(*made, sources, blocks, True, 2) == b"\0\0"
    assert bytes(blocks[0]) == floats(256, 3) + floats(256, 2)


def test_chunk_without_a_block_is_verified_and_not_kept() -> None:
    made, sources, blocks = tables()
    made[2]["block"], made[2]["start"] = NOWHERE, 1 << 40
    intact = core.decode(*made, sources, blocks, True, 2)
    sources[1] = bytes(256)

    assert intact == b"\0\0"
    assert all(core.decode(*made, sources, [], True, 2))
    assert not any(blocks[0])


def test_stored_bytes_are_compared_with_their_own_digest_if_the_link_says_so() -> None:
    made, sources, blocks = tables()
    made[1]["checks"] = 1
    intact = core.decode(*made, sources, blocks, True, 2)
    made[1]["stored_digest"][1, 15] ^= 1

    assert intact == b"\0\0"
    assert [bool(status) for status in core.decode(*made, sources, blocks, True, 2)] == [True, False]


@pytest.mark.parametrize("table", range(4))
def test_tables_that_point_outside_of_each_other_or_of_a_buffer_are_refused(table: int) -> None:
    names = [
        name for name in tables()[0][table].dtype.names if name not in ("digest", "stored_digest", "checks", "codec")
    ]
    for name in names:
        for row in range(len(tables()[0][table])):
            for value in (1 << 31, (1 << 31) - 1, 1_000):
                if (table, name, value) == (1, "n_bytes", 1_000):
                    continue  # a base of any size below the largest is decoded, and then does not fit its delta
                made, sources, blocks = tables()
                field = made[table][name]
                field[row] = value if value <= np.iinfo(field.dtype).max else -1

                with pytest.raises(ValueError, match="do not fit"):
                    core.decode(*made, sources, blocks, True, 2)
                assert not any(blocks[0])


def test_tables_of_broken_rows_and_memory_that_cannot_be_written_are_refused() -> None:
    made, sources, _ = tables()

    with pytest.raises(ValueError, match="do not fit"):
        core.decode(made[0].tobytes()[:-1], *made[1:], sources, [memoryview(bytearray(512))], True, 1)
    with pytest.raises(BufferError):
        core.decode(*made, sources, [bytes(512)], True, 1)
    with pytest.raises(TypeError):
        core.decode(*made, [1, 2], [memoryview(bytearray(512))], True, 1)


@pytest.mark.parametrize("descriptor", [-1, 1_000_000])
def test_read_that_fails_fails_its_chunk_alone(descriptor: int) -> None:
    made, sources, blocks = tables()
    made[0]["source"][2], made[0]["kind"][2] = descriptor, 1

    statuses = core.decode(*made, sources, blocks, True, 1)
    assert statuses[0] == 0
    assert statuses[1] != 0


# --- whole loads


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


def test_every_step_of_a_history_is_read(tmp_path: Path) -> None:
    store, steps = save_history(tmp_path)
    refs = sorted(store.checkpoints(), key=lambda ref: ref.step or 0)

    assert any(store.catalog.find(store.manifest(ref).digests).entries["depth"].any() for ref in refs)
    for ref, state in zip(refs, steps, strict=True):
        found = Store.open(tmp_path).read_tensors(store.manifest(ref))
        assert all(np.array_equal(found[name], array) for name, array in state.items())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.usefixtures("store_of_files")
def test_damaged_chunk_does_not_reach_the_memory_it_is_read_into(tmp_path: Path, verify: bool) -> None:
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


@pytest.mark.parametrize("n_bytes", [400, 30_000])
@pytest.mark.parametrize("damaged", [None, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("transform", [Transform.GROUPED, Transform.SPARSE])
def test_chains_that_share_links_are_decoded_as_if_they_shared_none(
    n_bytes: int, damaged: int | None, transform: Transform
) -> None:
    """A tree of versions: 1 and 4 are deltas against 0, and 2 and 3 against 1."""
    base_of = {1: 0, 2: 1, 3: 1, 4: 0}
    versions = [floats(n_bytes, seed) for seed in range(5)]
    if transform is Transform.SPARSE:
        for version, base in base_of.items():
            versions[version] = few_changed(versions[base], version)
    payloads = [bytes(PLANES.encode(versions[0], 4))]
    payloads += [
        bytes(DELTA.encode_as(versions[version], 4, versions[base], transform)) for version, base in base_of.items()
    ]
    if damaged is not None:
        payloads[damaged] = payloads[damaged][:-1] + bytes([payloads[damaged][-1] ^ 64])
    chains = {0: [0], 1: [1, 0], 2: [2, 1, 0], 3: [3, 1, 0], 4: [4, 0]}
    order = [0, 1, 2, 3, 4, 2, 0, 1]
    reads = np.zeros(5, READ)
    reads["n_bytes"], reads["source"] = [len(payload) for payload in payloads], range(5)
    numbers = [link for version in order for link in chains[version]]
    links = np.zeros(len(numbers), LINK)
    links["read"], links["n_stored"] = numbers, reads["n_bytes"][numbers]
    links["n_bytes"] = n_bytes
    links["codec"] = [DELTA.number if number else PLANES.number for number in numbers]
    chunks = np.zeros(len(order), CHUNK)
    chunks["start"], chunks["n_bytes"] = np.arange(len(order)) * n_bytes, n_bytes
    chunks["n_links"] = [len(chains[version]) for version in order]
    chunks["first_link"] = chunks["n_links"].cumsum() - chunks["n_links"]
    chunks["digest"] = [np.frombuffer(digest(versions[version]), np.uint8) for version in order]
    parts = np.array([(0, 5, 0, len(order))], PART)
    out = bytearray(len(order) * n_bytes)
    statuses = core.decode(reads, links, chunks, parts, payloads, [out], True, 1)

    for at, version in enumerate(order):
        made = bytes(out[at * n_bytes : (at + 1) * n_bytes])
        assert made == (bytes(n_bytes) if statuses[at] else versions[version])
        if damaged not in chains[version]:
            assert statuses[at] == 0
        else:
            alone = links[chunks["first_link"][at] :][: len(chains[version])]
            one = chunks[at : at + 1].copy()
            one["first_link"] = one["start"] = 0
            [status] = core.decode(reads, alone.copy(), one, np.array([(0, 5, 0, 1)], PART), payloads, [out], True, 1)
            assert bool(status) == bool(statuses[at])


def moved_chains() -> tuple[list[bytes], list[list[tuple[Any, bytes, int]]]]:
    """Make chunks that are parts of a delta's chunk, and one of a part; the links of each, with their sizes."""
    base, long = floats(30_000, 1), few_changed(floats(30_000, 1), 7)
    full = [
        (DELTA, bytes(DELTA.encode_as(long, 4, base, Transform.SPARSE)), 30_000),
        (PLANES, bytes(PLANES.encode(base, 4)), 30_000),
    ]
    parts = [long[:4_096], long[300:20_301], long[29_000:], few_changed(long[800:9_800], 3), floats(5_000, 9)]
    chunks, chains = [], []
    for part, offset in zip(parts, (0, 300, 29_000, 800, 12_000), strict=True):
        chunks.append(bytes(part))
        chains.append([(DELTA, DELTA.encode_moved(part, 4, long, offset), len(part)), *full])
    inner = chunks[1][5_000:9_000]
    chunks.append(inner)
    chains.append([(DELTA, DELTA.encode_moved(inner, 4, chunks[1], 5_000), len(inner)), *chains[1]])
    chunks += [long, base]
    chains += [full, full[1:]]
    return chunks, chains


def decode_tables(chunks: list[bytes], chains: list[list[tuple[Any, bytes, int]]]) -> tuple[bytes, list[bytes]]:
    """Decode chunks in one part; return their statuses, and what was made of each."""
    flat = [link for chain in chains for link in chain]
    reads, links = np.zeros(len(flat), READ), np.zeros(len(flat), LINK)
    reads["n_bytes"] = links["n_stored"] = [len(payload) for _, payload, _ in flat]
    reads["source"] = links["read"] = range(len(flat))
    links["codec"], links["n_bytes"] = [codec.number for codec, _, _ in flat], [size for _, _, size in flat]
    table = np.zeros(len(chunks), CHUNK)
    table["n_bytes"], table["n_links"] = list(map(len, chunks)), list(map(len, chains))
    table["first_link"] = table["n_links"].cumsum() - table["n_links"]
    table["start"] = table["n_bytes"].cumsum() - table["n_bytes"]
    table["digest"] = [np.frombuffer(digest(chunk), np.uint8) for chunk in chunks]
    out = bytearray(sum(map(len, chunks)))
    part = np.array([(0, len(flat), 0, len(chunks))], PART)
    statuses = core.decode(reads, links, table, part, [payload for _, payload, _ in flat], [out], True, 1)
    return statuses, [bytes(out[at : at + n]) for at, n in zip(table["start"].tolist(), map(len, chunks), strict=True)]


def test_moved_deltas_decode_to_parts_of_their_bases() -> None:
    chunks, chains = moved_chains()

    statuses, made = decode_tables(chunks, chains)

    assert not any(statuses)
    assert made == chunks
    for chunk, chain in zip(chunks, chains, strict=True):
        entries = np.zeros(len(chain), ENTRY)
        entries["codec"], entries["raw_bytes"] = [codec.number for codec, _, _ in chain], [size for _, _, size in chain]
        assert decode_chain(entries, [payload for _, payload, _ in chain], digest(chunk), len(chunk)) == chunk


@pytest.mark.parametrize("offset", [30_000 - 4_095, 30_000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_moved_delta_that_ends_behind_its_base_is_refused(offset: int) -> None:
    chunks, chains = moved_chains()
    payload = chains[0][0][1]
    forged = payload[:2] + offset.to_bytes(4, "little") + payload[6:]
    chains[0][0] = (DELTA, forged, len(chunks[0]))

    statuses, made = decode_tables(chunks, chains)

    assert [bool(status) for status in statuses] == [True] + [False] * (len(chunks) - 1)
    assert made[1:] == chunks[1:]
    with pytest.raises(FormatError, match="do not decode"):
        DELTA.decode_into(forged, memoryview(bytearray(len(chunks[0]))), bytes(30_000))


def test_moved_delta_in_a_moved_delta_and_any_other_delta_against_a_longer_base_are_refused() -> None:
    chunks, chains = moved_chains()
    codec, payload, size = chains[0][0]
    for forged in (payload[:6] + payload, payload[6:], payload[:6], payload[:3]):
        chains[0][0] = (codec, forged, size)

        statuses, _ = decode_tables(chunks[:1], chains[:1])

        assert statuses[0]
        with pytest.raises(FormatError):
            DELTA.decode_into(forged, memoryview(bytearray(size)), bytes(30_000))


def test_damaged_moved_deltas_are_refused_like_any_damage() -> None:
    chunks, chains = moved_chains()
    rng = np.random.default_rng(5)
    for _ in range(300):
        at, link = int(rng.integers(0, len(chains))), int(rng.integers(0, 2))
        damaged = [list(chain) for chain in chains]
        codec, payload, size = damaged[at][min(link, len(damaged[at]) - 1)]
        changed = bytearray(payload)
        changed[int(rng.integers(0, min(len(changed), 24)))] ^= int(rng.integers(1, 256))
        damaged[at][min(link, len(damaged[at]) - 1)] = (codec, bytes(changed), size)

        statuses, made = decode_tables(chunks, damaged)

        assert all(status or bytes_ == chunk for status, bytes_, chunk in zip(statuses, made, chunks, strict=True))
