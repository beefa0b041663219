"""Headers of safetensors files read as columns by the core, and tensor by tensor where it leaves them to Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.file_formats import _safetensors, open_listing
from tensorcas_mlflow.native import core
from tests.native.fuzz_header import header, mutated


def write(path: Path, text: bytes, n_bytes: int) -> Path:
    """Write a file of this header and so many bytes of tensors."""
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_bytes))
    return path


def end_of(text: bytes) -> int:
    """Return the greatest end of a tensor in a header; 0 if it is none."""
    try:
        entries = json.loads(text)
        return max(int(each["data_offsets"][1]) for name, each in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return 0


def contents(path: Path) -> Any:
    """Return all that a listing says of a file, or the type of its error."""
    try:
        listing = open_listing(path)
    except TensorCasError as error:
        return type(error)
    places = [(name, place.spec, place.start, place.n_bytes) for name, place in listing.locations.items()]
    return places, listing.metadata, listing.left_out


def without_columns(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(_safetensors, "_list_usual", lambda *_: None)
        return contents(path)


def scanned(text: bytes) -> Any:
    """Return the core's columns of a header; None if it leaves it to Python."""
    return core.list_header(text, _safetensors._KIND_NAMES, _safetensors._KIND_BYTES)


@pytest.mark.long
def test_listing_is_the_same_with_and_without_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_read = n_refused = n_columns = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        text = header(rng)
        if seed % 2:
            text = mutated(rng, text)
        size = end_of(text)
        path = write(tmp_path / "a.safetensors", text, size if size < 1 << 20 else 0)
        found = contents(path)

        assert found == without_columns(path, monkeypatch), seed
        n_refused += isinstance(found, type)
        n_read += not isinstance(found, type)
        n_columns += scanned(text) is not None

    assert min(n_read, n_refused, n_columns) > 50


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def text_of(*entries: tuple[str, Any]) -> bytes:
    """Return a header with entries in this order, which may repeat names."""
    return (
        b"{" + b",".join(json.dumps(name).encode() + b":" + json.dumps(each).encode() for name, each in entries) + b"}"
    )


def at(begin: int, end: int, **other: Any) -> dict[str, Any]:
    return ENTRY | {"data_offsets": [begin, end]} | other


HOSTILE = {
    "hole": text_of(("a", ENTRY), ("b", at(12, 20))),
    "shared bytes": text_of(("a", ENTRY), ("b", at(4, 12))),
    "repeated name": text_of(("a", ENTRY), ("b", at(8, 16)), ("a", at(16, 24))),
    "size of another shape": text_of(("a", at(0, 12))),
    "negative side": text_of(("a", at(0, 8, shape=[-2]))),
    "side with a leading zero": text_of(("a", ENTRY)).replace(b"[2]", b"[02]"),
    "fraction": text_of(("a", ENTRY)).replace(b"[2]", b"[2.0]"),
    "product beyond 64 bits": text_of(("a", at(0, 8, shape=[1 << 32, 1 << 32, 2]))),
    "number beyond 64 bits": text_of(("a", ENTRY)).replace(b"[2]", b"[18446744073709551618]"),
    "impossible empty shape": text_of(("a", at(0, 0, shape=[1 << 40, 1 << 40, 0]))),
    "too many sides": text_of(("a", at(0, 4, shape=[1] * 65))),
    "unknown dtype": text_of(("a", at(0, 8, dtype="F33"))),
    "end before the beginning": text_of(("a", at(8, 0))),
    "bytes behind the last tensor": text_of(("a", at(0, 4, shape=[1]))),
    "no name": text_of(("", ENTRY)),
    "name of the skeleton": text_of(("__skeleton__", ENTRY)),
    "line break in a name": text_of(("a\nb", ENTRY)),
    "invalid UTF-8": text_of(("a", ENTRY)).replace(b'"a"', b'"\xff"'),
    "comma at the end": text_of(("a", ENTRY)).replace(b"}}", b"},}"),
    "text behind the header": text_of(("a", ENTRY)) + b"x",
    "second metadata": text_of(("__metadata__", {"a": "b"}), ("__metadata__", {"a": "b"}), ("a", ENTRY)),
    "metadata with a key twice": b'{"__metadata__":{"a":"b","a":"c"},' + text_of(("a", ENTRY))[1:],
    "metadata with a number": text_of(("__metadata__", {"a": 1}), ("a", ENTRY)),
    "lone surrogate in the metadata": text_of(("__metadata__", {"a": "\ud800"}), ("a", ENTRY)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_header_is_refused_with_and_without_columns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HOSTILE[kind]
    path = write(tmp_path / "a.safetensors", text, 24 if kind == "repeated name" else 20 if kind == "hole" else 8)

    assert isinstance(contents(path), type)
    assert isinstance(without_columns(path, monkeypatch), type)


def test_tensors_in_another_order_than_in_the_header_are_listed_by_position(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", text_of(("a", at(8, 16)), ("b", ENTRY), ("c", at(8, 8, shape=[0]))), 16)

    listing = open_listing(path)

    assert list(listing.locations) == ["b", "c", "a"]
    assert [place.start for place in listing.locations.values()] == [
        len(path.read_bytes()) - 16 + at for at in (0, 8, 8)
    ]
    assert listing.locations["a"].spec.shape == (2,)


def test_core_makes_no_object_for_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(f"layer.{number}", at(8 * number, 8 * number + 8)) for number in range(5_000)]
    path = write(tmp_path / "a.safetensors", text_of(*entries), 8 * len(entries))
    monkeypatch.setattr(_safetensors, "HeaderEntry", None)

    listing = open_listing(path)

    assert listing.locations["layer.4000"].start == path.stat().st_size - 8 * 1_000
    assert len(listing.locations) == len(listing.columns()) == 5_000


@pytest.mark.long
def test_names_made_to_collide_are_read_without_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second word of a name cancels the hash of the first one, so all names have one hash.
    first = np.frombuffer(b"".join(b"%08x" % number for number in range(1 << 20)), np.uint64)
    mixed = (first ^ np.uint64(16)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    second = (mixed ^ np.frombuffer(b"@@@@@@@@", np.uint64)).view(np.uint8).reshape(-1, 8)
    is_text = ((second >= 0x20) & (second <= 0x7E) & (second != ord('"')) & (second != ord("\\"))).all(axis=1)
    names = [(b"%08x" % number + second[number].tobytes()).decode() for number in np.flatnonzero(is_text)[:80].tolist()]
    text = text_of(*[(name, at(8 * number, 8 * number + 8)) for number, name in enumerate(names)])
    path = write(tmp_path / "a.safetensors", text, 8 * len(names))

    assert len(names) == 80
    assert scanned(text) is None
    assert len(contents(path)[0]) == 80
    assert contents(path) == without_columns(path, monkeypatch)
