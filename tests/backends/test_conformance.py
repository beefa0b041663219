"""Every backend keeps every promise of the contract, and agrees with a dict."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend, MeteredBackend, ReadCounter
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.testing import BackendConformance


class TestLocalBackend(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        return LocalBackend(tmp_path / "store")


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    def backend(self) -> MemoryBackend:
        return MemoryBackend()


class TestMeteredBackend(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> MeteredBackend:
        return MeteredBackend(LocalBackend(tmp_path / "store"), ReadCounter())


def test_each_look_and_each_byte_that_is_read_is_counted() -> None:
    tally = ReadCounter()
    backend = MeteredBackend(MemoryBackend(is_remote=True), tally)
    backend.put_new("a/1", [b"abc"])

    assert backend.missing(["a/1", "a/2", "a/3"]) == {"a/2", "a/3"}
    assert (tally.n_requests, tally.n_bytes) == (3, 0)
    backend.get("a/1")
    backend.read_into("a/1", 1, memoryview(bytearray(2)))
    backend.stat("a/1")
    list(backend.list("a"))
    assert (tally.n_requests, tally.n_bytes) == (7, 5)


KEYS = st.sampled_from(["a/1", "a/2", "a/b/1", "a/b/2", "c/1", "d"])
CONTENT = st.binary(max_size=30)


class AgainstADict(RuleBasedStateMachine):
    """A random walk over one backend and a dict that must agree at every step."""

    intents = Bundle("intents")

    def make(self) -> Backend:
        return MemoryBackend()

    @initialize()
    def start(self) -> None:
        self.backend = self.make()
        self.model: dict[str, bytes] = {}
        self.n = 0

    @rule(key=KEYS, content=CONTENT)
    def put(self, key: str, content: bytes) -> None:
        try:
            self.backend.put_new(key, [content[:3], content[3:]])
            assert key not in self.model
            self.model[key] = content
        except BlobExistsError:
            assert key in self.model

    @rule(target=intents, content=CONTENT)
    def declare(self, content: bytes) -> tuple[str, str]:
        self.n += 1
        key = f"intents/{self.n}"
        token = self.backend.put_new(key, [content], durable=False)
        self.model[key] = content
        return key, token

    @rule(intent=intents, dest=KEYS, data=CONTENT, replace=st.booleans())
    def promote(self, intent: tuple[str, str], dest: str, data: bytes, replace: bool) -> None:
        source, token = intent
        try:
            self.backend.promote(source, dest, data, token=token, replace=replace)
            assert source in self.model
            assert replace or dest not in self.model
            del self.model[source]
            self.model[dest] = data
        except BlobNotFoundError:
            assert source not in self.model
        except BlobExistsError:
            assert source in self.model
            assert dest in self.model
            assert not replace
            self.model[source] = self.backend.get(source)

    @rule(intent=intents)
    def withdraw(self, intent: tuple[str, str]) -> None:
        assert self.backend.withdraw(*intent) == (intent[0] in self.model)
        self.model.pop(intent[0], None)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.backend.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS, start=st.integers(0, 40), size=st.integers(0, 40))
    def read(self, key: str, start: int, size: int) -> None:
        out = bytearray(size)
        try:
            self.backend.read_into(key, start, memoryview(out))
            assert bytes(out) == self.model[key][start : start + size]
        except BlobNotFoundError:
            assert key not in self.model
        except CorruptError:
            assert start + size > len(self.model[key])

    @rule(prefix=st.sampled_from(["a", "a/b", "c", "intents", "absent"]))
    def look(self, prefix: str) -> None:
        below = {key: value for key, value in self.model.items() if key.startswith(prefix + "/")}
        found = self.backend.list_dir(prefix)

        assert {info.key: info.size for info in self.backend.list(prefix)} == {k: len(v) for k, v in below.items()}
        children = sorted(k for k in below if "/" not in k.removeprefix(prefix + "/"))
        assert [info.key for info in found.facts()] == children
        assert sorted(f"{prefix}/{name}" for name, is_blob in found.blobs.items() if is_blob) == children
        # A name may go on being listed once it is empty.
        assert {k.removeprefix(prefix + "/").split("/")[0] for k in below if "/" in k.removeprefix(prefix + "/")} <= {
            *found.segments
        }
        for key, value in below.items():
            assert self.backend.get(key) == value


class LocalAgainstADict(AgainstADict):
    def make(self) -> Backend:
        self.folder = tempfile.TemporaryDirectory()
        return LocalBackend(Path(self.folder.name) / "store")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestMemoryWalk = AgainstADict.TestCase
TestMemoryWalk.settings = settings(max_examples=60, stateful_step_count=30)
TestLocalWalk = LocalAgainstADict.TestCase
TestLocalWalk.settings = settings(max_examples=25, stateful_step_count=25)


@pytest.fixture
def local(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path)


def test_failure_of_the_disk_is_a_backend_error(local: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")

    with pytest.raises(BackendError, match="could not write 'file/below'"):
        local.put_new("file/below", [b"x"])


def test_a_file_that_is_no_blob_is_passed_over(local: LocalBackend, tmp_path: Path) -> None:
    local.put_new("a/blob", [b"x"])
    (tmp_path / "a" / "not a key").write_bytes(b"")

    assert [info.key for info in local.list("a")] == ["a/blob"]


def test_a_link_in_the_place_of_a_blob_or_a_folder_is_listed_and_not_followed(
    local: LocalBackend, tmp_path: Path
) -> None:
    local.put_new("a/blob", [b"x"])
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "blob")
    (tmp_path / "a" / "folder").symlink_to(tmp_path / "a")

    assert [info.key for info in local.list("a")] == ["a/blob", "a/folder", "a/link"]
    for key in ("a/link", "a/folder"):
        assert local.stat(key) is None
        with pytest.raises(CorruptError, match="links are not followed"):
            local.get(key)
        with pytest.raises(CorruptError, match="links are not followed"):
            local.read_into(key, 0, memoryview(bytearray(1)))


def test_a_folder_in_the_place_of_a_blob_is_damage(local: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "a" / "blob").mkdir(parents=True)

    with pytest.raises(CorruptError, match="it is no file"):
        local.get("a/blob")
    with pytest.raises(CorruptError, match="it is no file"):
        local.read_into("a/blob", 0, memoryview(bytearray(1)))


def crashed_writer(root: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half a blob"
        os._exit(1)

    LocalBackend(root).put_new("packs/x.pack", pieces())


def test_sweep_removes_what_a_dead_writer_has_left(local: LocalBackend, tmp_path: Path) -> None:
    local.put_new("packs/y.pack", [b"whole"])
    writer = multiprocessing.get_context("fork").Process(target=crashed_writer, args=(tmp_path,))
    writer.start()
    writer.join()
    left = [path.name for path in (tmp_path / "packs").iterdir()]

    assert len(left) == 2
    assert [info.key for info in local.list("packs")] == ["packs/y.pack"]
    assert local.sweep(3600) == len(b"half a blob")
    assert [path.name for path in (tmp_path / "packs").iterdir()] == ["y.pack"]


def test_sweep_spares_what_a_living_writer_is_writing(local: LocalBackend) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half, "
        assert local.sweep(3600) == 0
        yield b"whole"

    local.put_new("k", pieces())

    assert local.get("k") == b"half, whole"


def test_sweep_removes_what_has_been_silent_for_long_and_survives_strange_names(
    local: LocalBackend, tmp_path: Path
) -> None:
    for name in ("+staging-", "+staging-1", "+staging-x-y", "+staging-1-elsewhere-0"):
        path = tmp_path / name
        path.write_bytes(b"1234")
        os.utime(path, (time.time() - 7200,) * 2)
    (tmp_path / "+staging-x-y-z").write_bytes(b"new")

    assert local.sweep(3600) == 16
    assert (tmp_path / "+staging-x-y-z").exists()


def test_withdraw_between_the_two_halves_of_a_promote_comes_too_late(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = local.put_new("intents/1", [b"x"])
    link = os.link
    withdrawn: list[bool] = []

    def link_then_lose_the_processor(source: Path, dest: Path) -> None:
        link(source, dest)
        withdrawn.append(local.withdraw("intents/1", token))

    monkeypatch.setattr(os, "link", link_then_lose_the_processor)
    local.promote("intents/1", "refs/@1", b"ref", token=token, replace=False)

    assert withdrawn == [False]
    assert local.get("refs/@1") == b"ref"
    assert local.stat("intents/1") is None


def test_two_backends_on_one_folder_see_each_other(tmp_path: Path) -> None:
    one, two = LocalBackend(tmp_path), LocalBackend(tmp_path)
    token = one.put_new("intents/1", [b"x"])

    assert two.get("intents/1") == b"x"
    assert two.withdraw("intents/1", token)
    with pytest.raises(BlobNotFoundError):
        one.promote("intents/1", "refs/@1", b"", token=token, replace=True)
