"""The protocol loses nothing where `put_all` holds blobs back until the next `promote`, as a database makes it do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tensorcas_mlflow.backends import BlobInfo, Token
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError
from tests.protocol.casts import Cast
from tests.protocol.interleave import Actor, Run, WatchedBackend
from tests.protocol.schedules import explore
from tests.protocol.test_schedules import save_against_collection


class HoldingBackend(WatchedBackend):
    """View of the backend in memory whose `put_all` shows its blobs to others with the next `promote`.

    Reading a held blob, listing and deleting show the held blobs first.
    """

    def __init__(self, run: Run, actor: Actor) -> None:
        super().__init__(run, actor)
        self._held: dict[str, bytes] = {}

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        for key, pieces in blobs:
            self._held[key] = b"".join(bytes(piece) for piece in pieces)

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        if not durable and self._held and key.startswith("index/"):
            self._held[key] = b"".join(bytes(piece) for piece in pieces)
            return "held"
        return super().put_new(key, pieces, durable=durable)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        memory, held = self._run.memory, self._held

        def commit() -> None:
            found = memory.stat(source)
            if found is None or found.token != token:
                raise BlobNotFoundError(source)
            if not replace and memory.stat(dest) is not None:
                raise BlobExistsError(dest)
            for key, blob in held.items():
                memory.put_new(key, [blob])
            held.clear()
            memory.promote(source, dest, data, token=token, replace=replace)

        self._run.call(self._actor, "promote", dest, commit, source, dest, lambda: [*held])

    def _flush(self) -> None:
        held, self._held = self._held, {}
        for key, blob in held.items():
            super().put_new(key, [blob])

    def stat(self, key: str) -> BlobInfo | None:
        if key in self._held:
            self._flush()
        return super().stat(key)

    def get(self, key: str, **options: Any) -> bytes:
        if key in self._held:
            self._flush()
        return super().get(key, **options)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if key in self._held:
            self._flush()
        super().read_into(key, start, out)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        if prefix != "intents" and prefix != "condemned":
            self._flush()
        return super().list(prefix, after=after)

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        self._flush()
        return super().withdraw(key, token)

    def delete(self, *keys: str) -> None:
        self._flush()
        super().delete(*keys)


def two_saves() -> Cast:
    """Two saves of one new chunk, a collection and a deletion."""
    cast = Cast(before={0: "ab"}).writer("writer", "ac", 1).writer("other", "cd", 2)
    return cast.collector("collector").deletion("deletion", 0)


CASTS = {
    "a save": save_against_collection,
    "a save and a rewriting": lambda: save_against_collection(max_waste=0),
    "two saves": two_saves,
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_with_held_blobs_loses_or_leaks_though_actors_may_die(name: str) -> None:
    cast = CASTS[name]()
    deaths = ["writer", "collector"]

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=1, deaths=deaths, view=HoldingBackend)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted


@pytest.mark.long
@pytest.mark.parametrize("name", ["a save", "a save and a rewriting"])
def test_no_schedule_of_two_preemptions_with_held_blobs_loses_or_leaks(name: str) -> None:
    cast = CASTS[name]()

    found = explore(cast.blobs(), cast.actors, cast.check, max_preemptions=2, view=HoldingBackend)

    print(found)
    assert found.failure is None, str(found)
    assert found.is_exhausted
