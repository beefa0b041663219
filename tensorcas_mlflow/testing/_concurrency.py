"""The promises of `tensorcas_mlflow.backends.Backend` to concurrent users of one root, each as a test."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tensorcas_mlflow.backends import Backend, Token
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError


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
        n_promoted = 0
        for turn in range(2 * self.rounds):
            source, dest = f"intents/{turn}", f"refs/@{turn}"
            token = backend.put_new(source, [b"x" * 500], durable=False)

            def act(n: int, source: str = source, dest: str = dest, token: Token = token) -> bool:
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
        assert n_promoted < 2 * self.rounds

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
