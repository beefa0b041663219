"""Compressed streams: members of zip archives, gzip and zlib files, taken apart for the store."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import joblib
import numpy as np
import pytest

from tensorcas_mlflow.file_formats import (
    DerivedBytes,
    FilePart,
    Learned,
    PlainBytes,
    Skeleton,
    Tape,
    Tensor,
    _deflated,
    split,
)

W = (np.random.default_rng(0).standard_normal((200, 400)) * 0.02).astype(np.float32)
V = np.random.default_rng(1).standard_normal(30_000)


def repetitive() -> Any:
    """Return numbers that each level compresses in another way."""
    rng = np.random.default_rng(0)
    words = [rng.bytes(int(n)) for n in rng.integers(3, 60, 400)]
    return np.frombuffer(b"".join(words[at] for at in rng.zipf(1.3, 40_000) % 400)[:400_000], np.int32)


def apart(data: bytes) -> tuple[list[FilePart], dict[str, tuple[Tensor, bytes]]]:
    """Split a file, check that its parts are the whole file, and that each content is that of its stream.

    Returns:
        The parts, and the tensors in streams by name, each with its bytes.
    """
    tape, parts, tensors, whole = Tape(io.BytesIO(data)), [], {}, b""
    for part in split(tape):
        assert not isinstance(part, Learned)
        if isinstance(part, DerivedBytes):
            content = b""
            for inner in part.parts:
                assert not isinstance(inner, Learned | DerivedBytes)
                taken = bytes(part.content.take(inner.n_bytes))
                content += taken
                if isinstance(inner, Tensor):
                    tensors[inner.name] = inner, taken
            assert part.content.is_at_end()
            stream = bytes(tape.peek(part.n_bytes))
            assert len(stream) == part.n_bytes
            assert zlib.decompress(stream, -15) == content
        whole += bytes(tape.take(part.n_bytes))
        parts.append(part)
    assert whole == data
    return parts, tensors


def savez(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def gz(data: bytes, level: int = 9, name: str = "") -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(name, "wb", level, out, mtime=0) as file:
        file.write(data)
    return out.getvalue()


def dumped(value: Any, compress: Any) -> bytes:
    out = io.BytesIO()
    joblib.dump(value, out, compress=compress)
    return out.getvalue()


def zipped(data: bytes, level: int = 6) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo("w.npy"), data, zipfile.ZIP_DEFLATED, level)
    return out.getvalue()


def check_is_w(found: tuple[Tensor, bytes], array: Any = W) -> None:
    tensor, data = found

    assert (tensor.dtype, tensor.shape) == (array.dtype.name, array.shape)
    assert data == array.tobytes()


def test_arrays_of_a_compressed_npz_are_tensors_under_their_names() -> None:
    parts, tensors = apart(savez(w=W, v=V))

    assert [type(part) for part in parts if isinstance(part, DerivedBytes | PlainBytes)] == [DerivedBytes, DerivedBytes]
    assert tensors.keys() == {"w", "v"}
    check_is_w(tensors["w"])
    check_is_w(tensors["v"], V)


@pytest.mark.parametrize("level", range(1, 10))
def test_every_level_is_found(level: int) -> None:
    parts, tensors = apart(zipped(npy(repetitive()), level))

    [found] = [part.params["level"] for part in parts if isinstance(part, DerivedBytes)]
    assert zipped(npy(repetitive()), found) == zipped(npy(repetitive()), level)
    check_is_w(tensors["w"], repetitive())


@pytest.mark.parametrize("name", ["", "weights.npy"])
def test_a_gzip_file_is_taken_apart(name: str) -> None:
    parts, tensors = apart(gz(npy(W), name=name))

    assert [type(part) for part in parts] == [Skeleton, DerivedBytes, Skeleton]
    check_is_w(tensors[""])


def test_every_member_of_a_gzip_file_is_taken_apart() -> None:
    parts, _ = apart(gz(npy(repetitive())) + gz(npy(repetitive()), 6))

    assert [part.params["level"] for part in parts if isinstance(part, DerivedBytes)] == [9, 6]


def test_a_gzip_header_may_have_all_of_its_fields() -> None:
    head = b"\x1f\x8b\x08\x1e" + bytes(6) + b"\5\0extra" + b"name\0" + b"comment\0" + b"\1\2"
    parts, tensors = apart(head + gz(npy(W))[10:])

    assert [part.n_bytes for part in parts][::2] == [len(head), 8]
    check_is_w(tensors[""])


@pytest.mark.parametrize("compress", [1, 3, 9, ("gzip", 3), ("zlib", 6)])
def test_arrays_of_a_compressed_joblib_file_are_tensors(compress: Any) -> None:
    parts, tensors = apart(dumped({"w": W, "n": 3}, compress))

    assert DerivedBytes in map(type, parts)
    assert [data for tensor, data in tensors.values() if tensor.dtype == "float32"] == [W.tobytes()]


def test_members_of_a_compressed_tar_archive_are_taken_apart() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("w.npy")
        info.size = len(npy(W))
        archive.addfile(info, io.BytesIO(npy(W)))
    parts, tensors = apart(out.getvalue())

    assert DerivedBytes in map(type, parts)
    check_is_w(next(iter(tensors.values())))


def test_a_stream_of_an_archive_written_to_a_stream_is_taken_apart() -> None:
    class Unseekable(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any, /) -> int:
            self.data += bytes(data)
            return len(data)

    out = Unseekable()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[call-overload]
        archive.writestr("w.npy", npy(W))
    _, tensors = apart(out.data)

    check_is_w(tensors["w"])


def test_a_stream_within_a_stream_stays_as_it_is() -> None:
    parts, _ = apart(gz(savez(w=W), 6))

    assert [type(part) for part in parts] == [Skeleton, DerivedBytes, Skeleton]


def wrong_level_behind() -> bytes:
    """A stream that begins as one of level 6 and goes on as one of level 1."""
    engine = zlib.compressobj(6, zlib.DEFLATED, -15)
    half = engine.compress(npy(W)) + engine.flush(zlib.Z_FULL_FLUSH)
    other = zlib.compressobj(1, zlib.DEFLATED, -15)
    return half + other.compress(npy(V)) + other.flush()


def raw(data: bytes, **options: Any) -> bytes:
    engine = zlib.compressobj(6, zlib.DEFLATED, -15, **options)
    return engine.compress(data) + engine.flush()


GZIP_HEAD, TRAILER = b"\x1f\x8b\x08\0" + bytes(6), bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: gz(npy(W))[:-3000], id="cut off"),
        pytest.param(lambda: GZIP_HEAD + wrong_level_behind() + TRAILER, id="of two levels"),
        pytest.param(lambda: GZIP_HEAD + raw(npy(W), memLevel=9) + TRAILER, id="with another memory level"),
        pytest.param(lambda: GZIP_HEAD + raw(npy(W), strategy=zlib.Z_HUFFMAN_ONLY) + TRAILER, id="of another strategy"),
        pytest.param(lambda: gz(bytes(100 << 20), 6), id="of zeros"),
        pytest.param(lambda: b"\x1f\x8b\x08\4" + bytes(6) + b"\xff\xff" + bytes(100_000), id="with a long header"),
        pytest.param(lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 100_000, id="with a name without an end"),
        pytest.param(lambda: b"\x1f\x8b\x08\0", id="only a header"),
        pytest.param(lambda: b"\x78\x9c" + np.random.default_rng(2).bytes(200_000), id="not zlib at all"),
        pytest.param(lambda: gz(npy(W[:20])), id="short"),
    ],
)
def test_a_stream_that_cannot_be_made_again_is_stored_as_it_is(data: Callable[[], bytes]) -> None:
    parts, _ = apart(data())

    assert DerivedBytes not in map(type, parts)


def test_a_long_content_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deflated, "MOST_RAW_BYTES", W.nbytes)

    assert DerivedBytes not in map(type, apart(savez(w=W))[0])
    assert DerivedBytes in map(type, apart(savez(w=W[:190]))[0])
