"""The carrier's contract, in memory and over a server; and what only one of the two can show."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import BlobNotFoundError
from tensorcas_mlflow.integration.server_store import CarrierBackend, Entry, NoAnswerError, Shelf, UnreachableError
from tensorcas_mlflow.integration.server_store._backend import Downloads
from tensorcas_mlflow.integration.server_store._shelf import ArtifactShelf, BrokenOffError
from tests.integration.server_store.conformance import CarrierConformance, intent
from tests.integration.server_store.conftest import Experiment


class MemoryShelf(Shelf):
    """Files in memory."""

    def __init__(self) -> None:
        self.memory = MemoryBackend()
        self.fetched: list[str] = []

    def put(self, path: str, file: Path) -> None:
        self.memory.delete(path)
        self.memory.put_new(path, [file.read_bytes()])

    def fetch(self, path: str, out: Path) -> None:
        self.fetched.append(path)
        out.write_bytes(self.memory.get(path))

    def head(self, path: str, n_bytes: int) -> bytes:
        return self.memory.get(path)[:n_bytes]

    def entries(self, folder: str) -> list[Entry]:
        everything = self.memory._blobs
        below = f"{folder}/" if folder else ""
        found = {}
        for path, (data, _, _) in everything.items():
            name, is_deeper, _ = path.removeprefix(below).partition("/")
            if path.startswith(below):
                found[name] = Entry(name=name, size=None if is_deeper else len(data))
        return list(found.values())

    def delete(self, path: str) -> None:
        self.memory.delete(path)


class SilentShelf(MemoryShelf):
    """One whose answers to some puts are lost, after they were carried out or before."""

    silent_below = ""
    is_done = True

    def put(self, path: str, file: Path) -> None:
        is_lost = bool(self.silent_below) and path.startswith(self.silent_below)
        if not is_lost or self.is_done:
            super().put(path, file)
        if is_lost:
            raise NoAnswerError("write", path, "the line went dead")


class BreakingShelf(MemoryShelf):
    """One whose answers to the next fetches break off; the last one after somebody has deleted the file, if told so."""

    n_breaks = 0
    is_deleted = False

    def fetch(self, path: str, out: Path) -> None:
        if self.n_breaks == 0:
            super().fetch(path, out)
            return
        self.n_breaks -= 1
        out.write_bytes(self.memory.get(path)[:1])
        if self.is_deleted and self.n_breaks == 0:
            self.memory.delete(path)
        raise BrokenOffError("read", path, "IncompleteRead")


class DeadShelf(MemoryShelf):
    """One whose server is gone from some time on."""

    is_dead = False
    n_asked = 0

    def put(self, path: str, file: Path) -> None:
        if self.is_dead:
            raise UnreachableError("write", path, "connection refused")
        super().put(path, file)

    def entries(self, folder: str) -> list[Entry]:
        if self.is_dead:
            self.n_asked += 1
            raise UnreachableError("list", folder, "connection refused")
        return super().entries(folder)


class TestInMemory(CarrierConformance):
    @pytest.fixture
    def backend(self) -> CarrierBackend:
        return CarrierBackend(MemoryShelf(), uri="mlflow-artifacts:/1")


class TestOverAServer(CarrierConformance):
    @pytest.fixture
    def backend(self, carried: Experiment) -> CarrierBackend:
        shelf = ArtifactShelf(get_artifact_repository(carried.uri), ".tensorcas")
        return CarrierBackend(shelf, uri=carried.uri)


def test_files_on_the_server_are_named_as_a_local_store_names_them(carried: Experiment) -> None:
    carrier = CarrierBackend(ArtifactShelf(get_artifact_repository(carried.uri), ".tensorcas"), uri=carried.uri)
    keys = ["format", f"packs/{'a' * 32}.pack", "refs/runs/8f3c/ema/@1", "refs/runs/8f3c/a=b~c@d/@-1"]
    for key in keys:
        carrier.put_new(key, [key.encode()])
    local = LocalBackend(carried.folder / ".tensorcas")

    for key in keys:
        assert local.get(key) == key.encode()


def test_a_segment_that_servers_decode_is_written_as_a_hash_of_what_it_stands_for() -> None:
    shelf = MemoryShelf()
    CarrierBackend(shelf, uri="mlflow-artifacts:/1").put_new("refs/my%20model/@a%20b", [b"ref"])

    folder, leaf = (f"~{digest(text).hex()[:32]}" for text in (b"my model", b"a b"))
    assert [info.key for info in shelf.memory.list("refs")] == [f"refs/{folder}/@{leaf}"]


@pytest.mark.parametrize("is_done", [True, False])
def test_an_intent_stays_when_nobody_knows_whether_its_ref_was_put(is_done: bool) -> None:
    shelf = SilentShelf()
    backend = CarrierBackend(shelf, uri="mlflow-artifacts:/1")
    source = intent()
    token = backend.put_new(source, [b"an intent"])
    shelf.silent_below, shelf.is_done = "refs/", is_done

    with pytest.raises(NoAnswerError, match="safe to try again"):
        backend.promote(source, "refs/runs/8f3c/@1", b"ref", token=token, replace=False)
    # A server that is slow may put the ref now. Without the intent, a collection would not have waited for it.
    assert not backend.withdraw(source, token)
    assert backend.stat(source) is not None


def test_a_blob_whose_bytes_break_off_is_fetched_again() -> None:
    shelf = BreakingShelf()
    backend = CarrierBackend(shelf, uri="mlflow-artifacts:/1")
    backend.put_new("k", [b"0123456789"])
    shelf.n_breaks = 2

    assert backend.get("k") == b"0123456789"


def test_a_blob_that_is_deleted_while_it_is_served_is_gone() -> None:
    shelf = BreakingShelf()
    backend = CarrierBackend(shelf, uri="mlflow-artifacts:/1")
    backend.put_new("k", [b"0123456789"])
    shelf.n_breaks, shelf.is_deleted = 1, True

    with pytest.raises(BlobNotFoundError, match="'k'"):
        backend.get("k")


def test_a_blob_whose_bytes_always_break_off_is_given_up() -> None:
    shelf = BreakingShelf()
    backend = CarrierBackend(shelf, uri="mlflow-artifacts:/1")
    backend.put_new("k", [b"0123456789"])
    shelf.n_breaks = 1_000

    with pytest.raises(NoAnswerError, match="safe to try again"):
        backend.get("k")
    assert shelf.n_breaks > 900


def test_a_server_that_is_gone_is_not_asked_for_the_intent_after_a_put_it_has_not_answered() -> None:
    shelf = DeadShelf()
    backend = CarrierBackend(shelf, uri="mlflow-artifacts:/1")
    source = intent()
    token = backend.put_new(source, [b"an intent"])
    shelf.is_dead = True
    with pytest.raises(NoAnswerError):
        backend.put_new(f"packs/{'a' * 32}.pack", [b"a pack"])

    assert not backend.withdraw(source, token)
    assert shelf.n_asked == 0


def test_a_blob_is_fetched_once_however_many_threads_read_it(tmp_path: Path) -> None:
    shelf = MemoryShelf()
    backend = CarrierBackend(shelf, uri="mlflow-artifacts:/1")
    backend.put_new("k", [b"0123456789"])
    outs = [bytearray(1) for _ in range(10)]
    threads = [
        threading.Thread(target=backend.read_into, args=("k", at, memoryview(out))) for at, out in enumerate(outs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert b"".join(outs) == b"0123456789"
    assert shelf.fetched == ["k"]


def test_cache_of_fetched_blobs_is_bounded() -> None:
    fetched: list[str] = []
    downloads = Downloads(max_bytes=25)

    def get(key: str) -> bytes:
        def fetch(out: Path) -> None:
            fetched.append(key)
            out.write_bytes(b"0123456789")

        out = bytearray(10)
        assert downloads.get(key, fetch).read_into(0, memoryview(out))
        return bytes(out)

    for key in "abacab":
        assert get(key) == b"0123456789"
    assert fetched == ["a", "b", "c", "b"]


def test_a_fetch_that_fails_is_tried_again() -> None:
    downloads = Downloads()
    fails = [True, False]

    def fetch(out: Path) -> None:
        if fails.pop(0):
            raise BlobNotFoundError("k")
        out.write_bytes(b"x")

    with pytest.raises(BlobNotFoundError):
        downloads.get("k", fetch)
    assert downloads.get("k", fetch).size == 1
