"""The promises of `tensorcas_mlflow.integration.server_store.CarrierBackend`, each as a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.integration.server_store import CarrierBackend

KEYS = (
    "format",
    "packs/" + "0" * 32 + ".pack",
    "refs/runs/8f3c/@-3",
    "refs/runs/8f3c/my%20model%2Fema/@12",
    "A-Z_a.z=0~9@x",
    "x" * 200,
    "a%zz",
)


def intent() -> str:
    return f"intents/{uuid.uuid4().hex}"


class CarrierConformance:
    """Conformance suite for carriers. A subclass defines a fixture ``backend`` that returns an empty one."""

    @pytest.fixture
    def backend(self) -> CarrierBackend:
        raise NotImplementedError("a subclass gives the carrier that is tested")

    # --- put_new, get, stat, missing

    @pytest.mark.parametrize("key", KEYS)
    def test_a_blob_is_read_back_as_it_was_put(self, backend: CarrierBackend, key: str) -> None:
        token = backend.put_new(key, [b"con", bytearray(b""), memoryview(b"tent")])
        info = backend.stat(key)

        assert backend.get(key) == b"content"
        assert info is not None
        assert (info.key, info.size, info.token) == (key, 7, token)

    def test_a_blob_may_be_empty(self, backend: CarrierBackend) -> None:
        backend.put_new("nothing", [])

        assert backend.get("nothing") == b""

    def test_a_key_that_is_taken_is_refused(self, backend: CarrierBackend) -> None:
        backend.put_new("k", [b"first"])
        with pytest.raises(BlobExistsError):
            backend.put_new("k", [b"second"])

        assert backend.get("k") == b"first"

    def test_what_the_pieces_raise_comes_out_and_nothing_is_created(self, backend: CarrierBackend) -> None:
        def pieces() -> Iterator[bytes]:
            yield b"a beginning"
            raise OSError("mine")

        with pytest.raises(OSError, match="mine"):
            backend.put_new("folder/k", pieces())
        assert backend.stat("folder/k") is None

    def test_what_is_not_there_is_not_found(self, backend: CarrierBackend) -> None:
        backend.put_new("a/b", [b"x"])

        assert backend.missing(["a/b", "a/c", "b/a%20c"]) == {"a/c", "b/a%20c"}
        for key in ("b", "a/c", "c/d"):
            assert backend.stat(key) is None
            with pytest.raises(BlobNotFoundError):
                backend.get(key)
            with pytest.raises(BlobNotFoundError):
                backend.read_into(key, 0, memoryview(bytearray(1)))

    def test_what_somebody_else_has_removed_is_not_found(self, backend: CarrierBackend) -> None:
        backend.put_new("a/b", [b"x"])
        CarrierBackend(backend._shelf, uri=backend.uri).delete("a/b")

        with pytest.raises(BlobNotFoundError):
            backend.get("a/b")

    def test_a_blob_longer_than_it_may_be_is_corrupt(self, backend: CarrierBackend) -> None:
        backend.put_new("k", [b"12345"])

        assert backend.get("k", max_bytes=5) == b"12345"
        with pytest.raises(CorruptError):
            backend.get("k", max_bytes=4)

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "..", "a/../b", "a b", "é", "x" * 201])
    def test_what_is_no_key_is_refused(self, backend: CarrierBackend, key: str) -> None:
        for call in (backend.stat, backend.get, backend.delete, backend.list_dir):
            with pytest.raises(ValueError, match="not a key"):
                call(key)

    # --- read_into

    def test_any_range_of_a_blob_can_be_read(self, backend: CarrierBackend) -> None:
        content = bytes(range(256)) * 40
        backend.put_new("k", [content])

        for start, stop in ((0, 0), (0, len(content)), (17, 4_000), (len(content) - 1, len(content))):
            out = bytearray(stop - start)
            backend.read_into("k", start, memoryview(out))
            assert bytes(out) == content[start:stop]
        with pytest.raises(CorruptError):
            backend.read_into("k", len(content) - 1, memoryview(bytearray(2)))

    # --- listing

    def test_listings_show_what_is_below_a_prefix_of_whole_segments(self, backend: CarrierBackend) -> None:
        for key in ("a/x", "a/b/y", "a/b/c/z", "ab/x", "c"):
            backend.put_new(key, [key.encode()])
        found = backend.list_dir("a")

        assert sorted((info.key, info.size) for info in backend.list("a")) == [("a/b/c/z", 7), ("a/b/y", 5), ("a/x", 3)]
        assert ([info.key for info in found.facts()], found.segments) == (["a/x"], {"b"})
        assert list(backend.list("absent")) == []

    def test_what_a_listing_shows_can_be_read(self, backend: CarrierBackend) -> None:
        backend.put_new("refs/runs/8f3c/größe".replace("ö", "%C3%B6").replace("ß", "%C3%9F") + "/@1", [b"ref"])
        [name] = backend.list_dir("refs/runs/8f3c").segments
        [info] = backend.list(f"refs/runs/8f3c/{name}")

        assert backend.get(info.key) == b"ref"
        assert backend.withdraw(info.key, info.token)

    def test_delete_of_nothing_is_no_error(self, backend: CarrierBackend) -> None:
        backend.put_new("a/b", [b""])
        backend.delete("a/b")
        backend.delete("a/b")
        backend.delete("b/c")

        assert list(backend.list("a")) == []

    # --- promote and withdraw

    def test_promote_turns_the_source_into_the_destination(self, backend: CarrierBackend) -> None:
        source = intent()
        token = backend.put_new(source, [b"an intent"])
        backend.promote(source, "refs/runs/8f3c/@1", b"ref", token=token, replace=False)

        assert backend.get("refs/runs/8f3c/@1") == b"ref"
        assert backend.stat(source) is None

    def test_promote_replaces_only_if_told_to(self, backend: CarrierBackend) -> None:
        source, dest = intent(), "refs/runs/8f3c/@1"
        token = backend.put_new(source, [b"an intent"])
        backend.put_new(dest, [b"first"])
        with pytest.raises(BlobExistsError):
            backend.promote(source, dest, b"second", token=token, replace=False)

        assert backend.get(dest) == b"first"
        assert backend.stat(source) is not None

        backend.promote(source, dest, b"second", token=token, replace=True)

        assert [info.key for info in backend.list("refs")] == [dest]
        assert backend.get(dest) == b"second"

    @pytest.mark.parametrize("replace", [True, False])
    def test_promote_of_what_is_gone_changes_nothing(self, backend: CarrierBackend, replace: bool) -> None:
        source = intent()
        token = backend.put_new(source, [b"an intent"])
        backend.put_new("refs/runs/8f3c/@1", [b"first"])
        assert backend.withdraw(source, token)

        with pytest.raises(BlobNotFoundError):
            backend.promote(source, "refs/runs/8f3c/@1", b"second", token=token, replace=replace)
        with pytest.raises(BlobNotFoundError):
            backend.promote(source, "refs/runs/8f3c/@2", b"second", token=token, replace=replace)
        assert [info.key for info in backend.list("refs")] == ["refs/runs/8f3c/@1"]
        assert backend.get("refs/runs/8f3c/@1") == b"first"

    def test_withdraw_happens_once(self, backend: CarrierBackend) -> None:
        source = intent()
        token = backend.put_new(source, [b"an intent"])

        assert not backend.withdraw(source, "another")
        assert backend.withdraw(source, token)
        assert not backend.withdraw(source, token)
