"""DEFLATE of the compiled core against zlib."""

from __future__ import annotations

import zlib
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import _deflate

pytestmark = [
    pytest.mark.skipif(
        "ng" in zlib.ZLIB_RUNTIME_VERSION, reason="another library of that name compresses in another way"
    ),
]


def zlib_stream(data: Buffer, level: int) -> bytes:
    engine = zlib.compressobj(level, zlib.DEFLATED, -15)
    return engine.compress(data) + engine.flush()


def ours(data: Buffer, level: int, room: int | None = None) -> bytes | None:
    out = bytearray(len(data) + len(data) // 100 + 100 if room is None else room)
    n_bytes = _deflate.deflate(data, level, out)
    return None if n_bytes is None else bytes(out[:n_bytes])


def fibonacci(n: int) -> bytes:
    """Return bytes whose best code would be longer than DEFLATE allows."""
    counts = [1, 1]
    while len(counts) < n:
        counts.append(counts[-1] + counts[-2])
    data = np.repeat(np.arange(n, dtype=np.uint8), counts)
    np.random.default_rng(0).shuffle(data)
    return data.tobytes()


def contents() -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    words = rng.choice([b"the", b"weight", b"of", b"a", b"layer", b"0.125", b"\n"], 20_000).tolist()
    return {
        "nothing": b"",
        "one byte": b"a",
        "two": b"ab",
        "three": b"abc",
        "a run": b"a" * 20_000,
        "noise": rng.bytes(20_000),
        "text": b" ".join(words),
        "float32": rng.standard_normal(5_000).astype(np.float32).tobytes(),
        "float16": (rng.standard_normal(8_000) * 0.02).astype(np.float16).tobytes(),
        "few values": rng.integers(0, 3, 12_000).astype(np.uint8).tobytes(),
        "long codes": fibonacci(20),
        "short and rare": bytes(range(256)) * 2 + b"\0" * 3000 + rng.bytes(300),
    }


@pytest.mark.parametrize("level", range(1, 10))
@pytest.mark.parametrize("name", contents())
def test_the_stream_is_the_one_of_zlib(name: str, level: int) -> None:
    data = contents()[name]
    stream = zlib_stream(data, level)

    assert ours(data, level) == stream
    assert _deflate.deflates_to(data, level, stream)
    assert not _deflate.deflates_to(data, level, stream + b"\0")
    assert not _deflate.deflates_to(data, level, stream[:-1])
    assert not _deflate.deflates_to(data, level, bytes([stream[0] ^ 8]) + stream[1:])


@pytest.mark.parametrize("level", range(1, 10))
@pytest.mark.parametrize("seed", range(4))
def test_the_stream_of_many_windows_is_the_one_of_zlib(level: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    past = rng.integers(0, 4, 40_000).astype(np.uint8)
    parts = [past]
    # Matches at the very edges of the window, and blocks that begin before it.
    while sum(map(len, parts)) < 400_000:
        whole = np.concatenate(parts)
        distance = int(rng.choice([32_506, 32_507, 32_768, 32_505, 1, 4096, 4097, int(rng.integers(1, 40_000))]))
        begin = len(whole) - distance
        n = int(rng.choice([3, 4, 257, 258, 259, int(rng.integers(1, 2000))]))
        parts += [
            np.resize(whole[begin : begin + n], n),
            rng.integers(0, 256, int(rng.integers(0, 50))).astype(np.uint8),
        ]
        if rng.random() < 0.02:
            parts.append(np.zeros(int(rng.integers(0, 120_000)), np.uint8))
    data = np.concatenate(parts).tobytes()

    assert ours(data, level) == zlib_stream(data, level)


@pytest.mark.long
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 400)), max_size=60),
    st.integers(1, 9),
    st.integers(0, 70_000),
)
def test_any_bytes_give_the_stream_of_zlib(runs: list[tuple[bytes, int]], level: int, n_before: int) -> None:
    data = bytes(n_before) + b"".join(part * n for part, n in runs)

    assert ours(data, level) == zlib_stream(data, level)


def test_a_stream_that_does_not_fit_is_told() -> None:
    data = contents()["float32"]
    stream = zlib_stream(data, 6)

    assert ours(data, 6, len(stream)) == stream
    assert ours(data, 6, len(stream) - 1) is None
    assert ours(data, 6, 0) is None


@pytest.mark.parametrize("level", [-1, 0, 10])
def test_another_level_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match="level"):
        ours(b"abc", level)


def test_streams_of_all_releases_are_the_same() -> None:
    data = contents()["text"][:3000] + bytes(range(256)) * 8

    # The format promises these bytes.
    found = sha256(b"".join(ours(data, level) or b"" for level in range(1, 10))).hexdigest()
    assert found == "08ef1825bb4d9004f32e3d36bdc93e4c416c88620e749aef066acfdd3a188d55"
