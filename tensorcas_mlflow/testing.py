"""Conformance suite for backends. Needs pytest."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorcas_mlflow.backends import Backend, Token
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, CorruptError


class ConcurrencyConformance:
    """A part of `BackendConformance`."""

    rounds = 60
    """Number of repetitions of each race; fewer for backends with slow calls."""

    def test_of_many_that_put_one_key_one_wins(self, backend: Backend) -> None:
        for turn in range(self.rounds // 3):
            won = _race(8, lambda n, turn=turn: _put(backend, f"race/{turn}", n))  # type: ignore[misc]

            assert won.count(True) == 1
            assert backend.get(f"race/{turn}") == str(won.index(True)).encode() * 50

    def test_of_many_that_withdraw_one_blob_one_does(self, backend: Backend) -> None:
        for turn in range(self.rounds // 3):
            token = backend.put_new(f"intents/{turn}", [b"x"])
            done = _race(6, lambda n, turn=turn, token=token: backend.withdraw(f"intents/{turn}", token))  # type: ignore[misc]

            assert done.count(True) == 1

    @pytest.mark.parametrize("replace", [True, False])
    def test_a_blob_is_promoted_or_withdrawn_and_never_both(self, backend: Backend, replace: bool) -> None:
        token = backend.put_new("intents/alone", [b"x" * 500], durable=False)
        began = time.perf_counter()
        backend.promote("intents/alone", "refs/@alone", b"ref", token=token, replace=replace)
        took_s = time.perf_counter() - began
        n_promoted = n_withdrawn = 0
        for turn in range(2 * self.rounds):
            source, dest = f"intents/{turn}", f"refs/@{turn}"
            token = backend.put_new(source, [b"x" * 500], durable=False)
            # One of the two begins later, by up to twice the time of a promote alone: so each of them wins sometimes,
            # however many steps either takes.
            lead = (turn % 9 - 4) / 2

            def act(n: int, source: str = source, dest: str = dest, token: Token = token, lead: float = lead) -> bool:
                time.sleep(took_s * max(0, lead if n % 2 else -lead))
                if n % 2:
                    return backend.withdraw(source, token)
                try:
                    backend.promote(source, dest, b"ref", token=token, replace=replace)
                except BlobNotFoundError:
                    return False
                return True

            promoted, withdrawn = _race(2, act)

            assert not (promoted and withdrawn)
            assert promoted == (backend.stat(dest) is not None)
            assert backend.stat(source) is None
            n_promoted += promoted
            n_withdrawn += withdrawn
        assert n_promoted > 0
        assert n_withdrawn > 0

    def test_of_many_that_promote_to_one_key_one_wins_if_none_may_replace(self, backend: Backend) -> None:
        for turn in range(self.rounds // 4):
            tokens = [backend.put_new(f"intents/{turn}-{n}", [b"x"], durable=False) for n in range(5)]

            def act(n: int, turn: int = turn, tokens: list[Token] = tokens) -> bool:
                try:
                    data = str(n).encode() * 100
                    backend.promote(f"intents/{turn}-{n}", f"refs/@{turn}", data, token=tokens[n], replace=False)
                except BlobExistsError:
                    return False
                return True

            won = _race(5, act)

            assert won.count(True) == 1
            assert backend.get(f"refs/@{turn}") == str(won.index(True)).encode() * 100
            assert len(list(backend.list("intents"))) == 4 * (turn + 1)

    def test_a_replaced_blob_is_never_absent_or_mixed(self, backend: Backend) -> None:
        backend.put_new("refs/@1", [b"0" * 300])
        seen: list[bytes] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.append(backend.get("refs/@1"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for n in range(self.rounds):
                token = backend.put_new(f"intents/{n}", [b"x" * 700], durable=False)
                backend.promote(f"intents/{n}", "refs/@1", str(n % 10).encode() * (n + 1), token=token, replace=True)
        finally:
            done.set()
            watcher.join()

        assert all(blob == blob[:1] * len(blob) for blob in seen)

    def test_a_listing_holds_what_was_there_all_along_exactly_once(self, backend: Backend) -> None:
        lasting = {f"a/{n % 3}/{n}" for n in range(60)}
        for key in lasting:
            backend.put_new(key, [b""], durable=False)
        done = threading.Event()

        def stir() -> None:
            n = 0
            while not done.is_set():
                backend.put_new(f"a/{n % 3}/new-{n}", [b""], durable=False)
                backend.delete(f"a/{n % 3}/new-{n}")
                n += 1

        stirrer = threading.Thread(target=stir)
        stirrer.start()
        try:
            for _ in range(self.rounds // 2):
                keys = [info.key for info in backend.list("a")]
                assert len(keys) == len(set(keys))
                assert lasting <= set(keys)
        finally:
            done.set()
            stirrer.join()


def _put(backend: Backend, key: str, n: int) -> bool:
    try:
        backend.put_new(key, [str(n).encode()] * 50, durable=False)
    except BlobExistsError:
        return False
    return True


def _race(n_threads: int, act: Callable[[int], bool]) -> list[bool]:
    """Let threads act at the same time; raise their exceptions here."""
    barrier = threading.Barrier(n_threads)
    results: dict[int, bool | BaseException] = {}

    def run(n: int) -> None:
        barrier.wait()
        try:
            results[n] = act(n)
        except BaseException as error:  # noqa: BLE001 - raised again below
            results[n] = error

    workers = [threading.Thread(target=run, args=(n,)) for n in range(n_threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    outcome: list[bool] = []
    for n in range(n_threads):
        result = results[n]
        if isinstance(result, BaseException):
            raise result
        outcome.append(result)
    return outcome


NOT_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "../a",
    "a b",
    "a\\b",
    "a\0b",
    "a\n",
    "é",
    "a+b",
    "a*",
    "x" * 201,
)
KEYS = ("a", "a/b/c", "refs/@1", "A-Z_a.z=0~9%2F@x", "...", ".hidden", "x" * 200, "/".join(["d"] * 12))


class BackendConformance(ConcurrencyConformance):
    """The promises of every backend. To use it, subclass it and add a fixture ``backend`` with an empty backend.

    ```python
    class TestLocalBackend(BackendConformance):
        @pytest.fixture
        def backend(self, tmp_path: Path) -> LocalBackend:
            return LocalBackend(tmp_path)
    ```
    """

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("a subclass has a fixture with the backend to test")

    # --- put_new, get, stat

    @pytest.mark.parametrize("key", KEYS)
    def test_a_blob_is_read_back_as_it_was_put(self, backend: Backend, key: str) -> None:
        token = backend.put_new(key, [b"con", b"", b"tent"])
        info = backend.stat(key)

        assert backend.get(key) == b"content"
        assert info is not None
        assert (info.key, info.size, info.token) == (key, 7, token)
        assert info.modified_s > 1_600_000_000

    def test_a_blob_may_be_empty(self, backend: Backend) -> None:
        backend.put_new("none", [])
        backend.put_new("nothing", [b""], durable=False)

        assert backend.get("none") == backend.get("nothing") == b""

    def test_pieces_may_be_any_buffers(self, backend: Backend) -> None:
        words = memoryview(b"12345678").cast("I")
        backend.put_new("k", [bytearray(b"a"), memoryview(b"xbx")[1:2], words])

        assert backend.get("k") == b"ab12345678"

    def test_a_blob_is_not_there_before_its_last_byte(self, backend: Backend) -> None:
        class NoMoreError(Exception):
            pass

        def pieces() -> Iterator[Any]:
            yield b"x"
            assert backend.stat("k") is None
            yield b"y"
            raise NoMoreError

        with pytest.raises(NoMoreError):
            backend.put_new("k", pieces())
        assert backend.stat("k") is None

    def test_what_the_pieces_raise_comes_out_and_nothing_is_created(self, backend: Backend) -> None:
        for error in (ValueError("mine"), OSError("mine"), KeyboardInterrupt("mine"), BlobNotFoundError("mine")):

            def pieces(error: BaseException = error) -> Iterator[bytes]:
                yield b"a beginning"
                raise error

            with pytest.raises(type(error)) as caught:
                backend.put_new("folder/k", pieces())
            assert caught.value is error

        assert backend.stat("folder/k") is None
        assert list(backend.list("folder")) == []

    def test_blobs_that_are_put_together_are_all_there_afterwards(self, backend: Backend) -> None:
        backend.put_all((f"packs/{n}", [b"blob ", str(n).encode()]) for n in range(20))
        backend.put_all([])

        assert [backend.get(f"packs/{n}") for n in range(20)] == [b"blob %d" % n for n in range(20)]

    def test_what_is_put_together_is_drawn_in_its_order(self, backend: Backend) -> None:
        said: list[str] = []

        def pieces(name: str) -> Iterator[bytes]:
            said.append(f"{name} begins")
            yield b"x"
            said.append(f"{name} ends")

        def blobs() -> Iterator[tuple[str, Iterator[bytes]]]:
            for name in ("a", "b"):
                said.append(name)
                yield f"packs/{name}", pieces(name)

        backend.put_all(blobs())

        assert said == ["a", "a begins", "a ends", "b", "b begins", "b ends"]

    def test_what_is_put_together_does_not_replace_a_blob(self, backend: Backend) -> None:
        backend.put_new("packs/b", [b"first"])
        with pytest.raises(BlobExistsError) as caught:
            backend.put_all([("packs/a", [b"second"]), ("packs/b", [b"second"])])

        assert caught.value.key == "packs/b"
        assert backend.get("packs/b") == b"first"

    def test_what_is_put_together_and_raises_leaves_nothing_half_written(self, backend: Backend) -> None:
        def pieces() -> Iterator[bytes]:
            yield b"a beginning"
            raise OSError("mine")

        with pytest.raises(OSError, match="mine"):
            backend.put_all([("packs/a", [b"whole"]), ("packs/b", pieces())])

        assert backend.stat("packs/b") is None
        assert all(backend.get(info.key) == b"whole" for info in backend.list("packs"))

    def test_the_first_blob_at_a_key_stays(self, backend: Backend) -> None:
        token = backend.put_new("k", [b"first"])
        with pytest.raises(BlobExistsError) as caught:
            backend.put_new("k", [b"second"])
        info = backend.stat("k")

        assert caught.value.key == "k"
        assert backend.get("k") == b"first"
        assert info is not None
        assert info.token == token

    def test_a_key_can_be_taken_again_once_it_is_deleted(self, backend: Backend) -> None:
        backend.put_new("k", [b"first"])
        backend.delete("k")
        backend.put_new("k", [b"second"])

        assert backend.get("k") == b"second"

    def test_what_is_not_there_is_not_found(self, backend: Backend) -> None:
        backend.put_new("a/b", [b"x"])

        for key in ("b", "a/c", "a/b/c", "c/d"):
            assert backend.stat(key) is None
            with pytest.raises(BlobNotFoundError):
                backend.get(key)
            with pytest.raises(BlobNotFoundError):
                backend.read_into(key, 0, memoryview(bytearray(1)))

    def test_a_blob_longer_than_it_may_be_is_corrupt(self, backend: Backend) -> None:
        backend.put_new("k", [b"12345"])

        assert backend.get("k", max_bytes=5) == b"12345"
        with pytest.raises(CorruptError):
            backend.get("k", max_bytes=4)

    # --- read_into

    def test_any_range_of_a_blob_can_be_read(self, backend: Backend) -> None:
        content = bytes(range(256)) * 40
        backend.put_new("k", [content])

        for start, stop in ((0, 0), (0, 1), (0, len(content)), (17, 4_000), (len(content) - 1, len(content))):
            out = bytearray(stop - start)
            backend.read_into("k", start, memoryview(out))
            assert bytes(out) == content[start:stop]

    def test_a_range_beyond_the_end_is_corrupt(self, backend: Backend) -> None:
        backend.put_new("k", [b"12345"])

        for start, size in ((0, 6), (5, 1), (4, 2), (100, 1)):
            with pytest.raises(CorruptError):
                backend.read_into("k", start, memoryview(bytearray(size)))

    def test_many_can_be_looked_for_at_once(self, backend: Backend) -> None:
        keys = [f"packs/{n}" for n in range(60)]
        for key in keys[::2]:
            backend.put_new(key, [b"x"])

        assert backend.missing(keys) == set(keys[1::2])
        assert backend.missing(keys[:3]) == {keys[1]}
        assert backend.missing([]) == set()

    def test_a_blob_may_be_longer_than_one_request_carries(self, backend: Backend) -> None:
        content = random.Random(0).randbytes(1 << 20)
        token = backend.put_new("packs/1", (content for _ in range(17)))
        info = backend.stat("packs/1")
        out = bytearray(2 << 20)
        backend.read_into("packs/1", (15 << 20) + 1, memoryview(out)[:-1])

        assert info is not None
        assert (info.size, info.token) == (17 << 20, token)
        assert out[:-1] == (content * 2)[1:]

    def test_what_the_pieces_raise_late_comes_out_and_nothing_is_created(self, backend: Backend) -> None:
        class NoMoreError(Exception):
            pass

        def pieces() -> Iterator[bytes]:
            for _ in range(17):
                yield bytes(1 << 20)
            raise NoMoreError

        with pytest.raises(NoMoreError):
            backend.put_new("packs/1", pieces())
        assert backend.stat("packs/1") is None

    # --- promote and withdraw

    def test_promote_turns_the_source_into_the_destination(self, backend: Backend) -> None:
        for n, data in enumerate((b"short", b"", b"longer than the source was, by far")):
            token = backend.put_new(f"intents/{n}", [b"an intent of some bytes"], durable=False)
            backend.promote(f"intents/{n}", f"refs/deep/{n}/@ref", data, token=token, replace=False)

            assert backend.get(f"refs/deep/{n}/@ref") == data
            assert backend.stat(f"intents/{n}") is None
        assert list(backend.list("intents")) == []

    def test_promote_replaces_only_if_told_to(self, backend: Backend) -> None:
        backend.put_new("ref", [b"first"])
        token = backend.put_new("intents/x", [b"x"])
        with pytest.raises(BlobExistsError):
            backend.promote("intents/x", "ref", b"second", token=token, replace=False)

        assert backend.get("ref") == b"first"
        assert backend.stat("intents/x") is not None

        backend.promote("intents/x", "ref", b"second", token=token, replace=True)

        assert backend.get("ref") == b"second"
        assert backend.stat("intents/x") is None

    def test_a_promoted_blob_is_a_blob_like_any_other(self, backend: Backend) -> None:
        token = backend.put_new("intents/x", [b"x"])
        backend.promote("intents/x", "ref", b"data", token=token, replace=True)
        info = backend.stat("ref")

        assert info is not None
        assert info.size == 4
        with pytest.raises(BlobExistsError):
            backend.put_new("ref", [b"y"])
        assert backend.withdraw("ref", info.token)
        assert backend.stat("ref") is None

    @pytest.mark.parametrize("replace", [True, False])
    def test_promote_of_what_is_gone_changes_nothing(self, backend: Backend, replace: bool) -> None:
        token = backend.put_new("intents/x", [b"x"])
        assert backend.withdraw("intents/x", token)

        with pytest.raises(BlobNotFoundError):
            backend.promote("intents/x", "ref", b"data", token=token, replace=replace)
        assert backend.stat("ref") is None
        assert backend.stat("intents/x") is None

    def test_promote_relies_on_the_token(self, backend: Backend) -> None:
        other = backend.put_new("other", [b"y"])
        backend.put_new("intents/x", [b"x"])
        backend.put_new("ref", [b"first"])

        with pytest.raises(BlobNotFoundError):
            backend.promote("intents/x", "ref", b"data", token=other, replace=True)
        assert backend.get("intents/x") == b"x"
        assert backend.get("ref") == b"first"

    def test_withdraw_relies_on_the_token_and_happens_once(self, backend: Backend) -> None:
        other = backend.put_new("other", [b"y"])
        token = backend.put_new("intents/x", [b"x"])

        assert not backend.withdraw("intents/x", other)
        assert not backend.withdraw("absent", token)
        assert not backend.withdraw("absent/folder", token)
        assert backend.stat("intents/x") is not None
        assert backend.withdraw("intents/x", token)
        assert not backend.withdraw("intents/x", token)
        assert backend.stat("intents/x") is None

    def test_creator_of_a_blob_withdraws_it_once_and_frees_its_key(self, backend: Backend) -> None:
        token = backend.put_new("intents/a", [b"x"], durable=False)
        backend.put_all([("packs/a", [b"pack"])])
        backend.put_new("packs/b", [b"seen"])

        assert backend.withdraw("intents/a", token, own=["packs/a", "packs/b", "packs/absent"])
        assert not backend.withdraw("intents/a", token, own=())
        assert list(backend.list("intents")) == []
        assert backend.get("packs/b") == b"seen"
        assert all(backend.get(info.key) in (b"pack", b"seen") for info in backend.list("packs"))
        with pytest.raises(BlobNotFoundError):
            backend.promote("intents/a", "refs/@a", b"ref", token=token, replace=False)

    def test_the_token_of_a_listing_is_the_token_of_the_blob(self, backend: Backend) -> None:
        token = backend.put_new("intents/a", [b"x"])
        (listed,) = backend.list("intents")
        (child,) = backend.list_dir("intents").facts()

        assert listed.token == child.token == token

    # --- listing

    def test_list_finds_all_below_a_prefix_of_whole_segments(self, backend: Backend) -> None:
        for key in ("a/x", "a/b/y", "a/b/c/z", "ab/x", "c"):
            backend.put_new(key, [key.encode()])

        assert sorted(info.key for info in backend.list("a")) == ["a/b/c/z", "a/b/y", "a/x"]
        assert sorted(info.key for info in backend.list("a/b")) == ["a/b/c/z", "a/b/y"]
        assert [(info.key, info.size) for info in backend.list("ab")] == [("ab/x", 4)]
        assert list(backend.list("absent")) == []

    def test_list_can_begin_after_any_text(self, backend: Backend) -> None:
        for key in ("a/b", "a/b0", "a/c", "a/d/e"):
            backend.put_new(key, [b""])

        assert sorted(info.key for info in backend.list("a", after="a/b")) == ["a/b0", "a/c", "a/d/e"]
        assert sorted(info.key for info in backend.list("a", after="a/bz")) == ["a/c", "a/d/e"]
        assert list(backend.list("a", after="a/d/e")) == []

    def test_a_remote_listing_is_in_order(self, backend: Backend) -> None:
        for key in ("a/c", "a/b/z", "a/b-", "a/B"):
            backend.put_new(key, [b""])
        keys = [info.key for info in backend.list("a")]

        assert sorted(keys) == ["a/B", "a/b-", "a/b/z", "a/c"]
        assert keys == sorted(keys) or not backend.is_remote

    def test_list_dir_gives_children_and_sorted_facts(self, backend: Backend) -> None:
        for key in ("a/z", "a/c/y", "a/b/y", "a/b/x/w", "a/@k", "b/q"):
            backend.put_new(key, [b"1"])

        for most in (None, 1000):
            found = backend.list_dir("a", most=most)
            assert [info.key for info in found.facts()] == ["a/@k", "a/z"]
            assert (dict(found.blobs), found.segments) == ({"@k": True, "z": True}, {"b", "c"})
            assert found.is_whole
        for prefix in ("a/d", "absent"):
            found = backend.list_dir(prefix)
            assert (found.facts(), found.blobs, found.segments) == ([], {}, set())

    def test_list_dir_that_ends_at_its_bound_says_so_and_shows_nothing_else(self, backend: Backend) -> None:
        for key in ("a/z", "a/b/x", "a/b/y", "b/q"):
            backend.put_new(key, [b"1"])
        found = backend.list_dir("a", most=2)

        assert found.blobs.keys() <= {"z"}
        assert found.segments <= {"b"}
        assert not found.is_whole or (set(found.blobs), set(found.segments)) == ({"z"}, {"b"})

    def test_what_is_removed_is_no_longer_listed(self, backend: Backend) -> None:
        backend.put_new("a/x", [b""])
        backend.put_new("a/y", [b""])
        backend.delete("a/x")

        assert [info.key for info in backend.list("a")] == ["a/y"]

    def test_files_have_the_bytes_of_every_large_blob(self, backend: Backend) -> None:
        backend.put_new("kind/zero", [b"x"])
        before = {file.path: file.size for file in backend.files()}
        backend.put_new("kind/one", [bytes(1 << 20)])
        backend.put_new("kind/below/two", [bytes(3 << 20)])
        after = {file.path: file.size for file in backend.files()}

        assert after == before | {"kind/one": 1 << 20, "kind/below/two": 3 << 20}

    def test_delete_of_nothing_is_no_error(self, backend: Backend) -> None:
        backend.put_new("a", [b""])
        backend.delete("a")
        backend.delete("a")
        backend.delete("b/c")

        assert backend.stat("a") is None

    def test_delete_removes_all_that_are_there_and_nothing_else(self, backend: Backend) -> None:
        for key in ("a/x", "a/y", "a/z", "a/large", "b/x"):
            backend.put_new(key, [bytes(1 << 20) if key == "a/large" else b"1"])
        backend.delete("a/x", "a/none", "a/large", "b/x", "a/x", "a/y")
        backend.delete()

        assert [info.key for prefix in ("a", "b") for info in backend.list(prefix)] == ["a/z"]

    def test_sweep_touches_no_blob(self, backend: Backend) -> None:
        backend.put_new("a/x", [b"1"])
        backend.sweep(0.0)

        assert backend.sweep(0.0) == 0
        assert backend.get("a/x") == b"1"

    # --- keys

    @pytest.mark.parametrize("key", NOT_KEYS, ids=repr)
    def test_what_is_not_a_key_is_refused_by_every_method(self, backend: Backend, key: str) -> None:
        token = backend.put_new("ok", [b"x"])
        calls: list[Callable[[], object]] = [
            lambda: backend.put_new(key, [b"x"]),
            lambda: backend.promote(key, "other", b"", token=token, replace=True),
            lambda: backend.promote("ok", key, b"", token=token, replace=True),
            lambda: backend.withdraw(key, token),
            lambda: backend.stat(key),
            lambda: backend.get(key),
            lambda: backend.read_into(key, 0, memoryview(bytearray(1))),
            lambda: list(backend.list(key)),
            lambda: backend.list_dir(key),
            lambda: backend.delete(key),
        ]

        for call in calls:
            with pytest.raises(ValueError, match="not a key"):
                call()
        assert backend.get("ok") == b"x"
