"""What the tests of object stores take for granted of each server they run against."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from tests.objects.servers import S3Server

if TYPE_CHECKING:
    from obstore import PutResult, UpdateVersion

N_RACES = 100
N_WRITERS = 8


class ObjectServerChecks:
    """What holds for an empty place on any server."""

    def test_a_key_is_written_once(self, store: S3Store | AzureStore | GCSStore) -> None:
        obstore.put(store, "k", b"first", mode="create")
        with pytest.raises(AlreadyExistsError):
            obstore.put(store, "k", b"second", mode="create")

        assert bytes(obstore.get(store, "k").bytes()) == b"first"

    def test_a_key_is_replaced_by_who_knows_what_is_there(self, store: S3Store | AzureStore | GCSStore) -> None:
        first = obstore.put(store, "k", b"first")
        obstore.put(store, "k", b"second", mode=if_still(first))
        with pytest.raises(PreconditionError):
            obstore.put(store, "k", b"third", mode=if_still(first))

        assert bytes(obstore.get(store, "k").bytes()) == b"second"

    def test_one_of_many_writers_of_a_new_key_wins(self, store: S3Store | AzureStore | GCSStore) -> None:
        def write(key: str, writer: int) -> bytes | None:
            data = f"writer {writer}".encode()
            try:
                obstore.put(store, key, data, mode="create")
            except AlreadyExistsError:
                return None
            return data

        for n in range(N_RACES):
            winners = [data for data in at_once(write, f"k{n}") if data is not None]
            assert winners == [bytes(obstore.get(store, f"k{n}").bytes())]

    def test_one_of_many_who_replace_a_key_wins(self, store: S3Store | AzureStore | GCSStore) -> None:
        seen = obstore.put(store, "k", b"nobody")

        def write(key: str, writer: int) -> bytes | None:
            data = f"writer {writer}".encode()
            try:
                obstore.put(store, key, data, mode=if_still(seen))
            except PreconditionError:
                return None
            return data

        for n in range(N_RACES):
            winners = [data for data in at_once(write, "k") if data is not None]
            assert winners == [bytes(obstore.get(store, "k").bytes())]
            seen = obstore.put(store, "k", f"round {n}".encode())

    def test_ranges_are_read(self, store: S3Store | AzureStore | GCSStore) -> None:
        data = bytes(range(256)) * 1000
        obstore.put(store, "k", data)

        assert bytes(obstore.get_range(store, "k", start=1000, length=77)) == data[1000:1077]
        parts = obstore.get_ranges(store, "k", starts=[0, 200_000], lengths=[10, 20], coalesce=0)
        assert [bytes(part) for part in parts] == [data[:10], data[200_000:200_020]]
        assert bytes(obstore.get(store, "k", options={"range": {"suffix": 5}}).bytes()) == data[-5:]

    def test_a_large_body_goes_up_in_parts(self, store: S3Store | AzureStore | GCSStore) -> None:
        data = bytes(range(256)) * 50_000
        obstore.put(store, "k", data, use_multipart=True, chunk_size=5 << 20)

        assert obstore.head(store, "k")["size"] == len(data)
        assert bytes(obstore.get(store, "k").bytes()) == data

    def test_keys_are_listed_by_prefix_and_after_a_key(self, store: S3Store | AzureStore | GCSStore) -> None:
        for n in range(5):
            obstore.put(store, f"a/{n}", b"x")
        obstore.put(store, "b/0", b"x")

        assert listed(store, prefix="a") == [f"a/{n}" for n in range(5)]
        assert listed(store, prefix="a", offset="a/2") == ["a/3", "a/4"]
        assert list(obstore.list_with_delimiter(store)["common_prefixes"]) == ["a", "b"]

    def test_more_keys_are_listed_than_one_answer_holds(self, store: S3Store | AzureStore | GCSStore) -> None:
        keys = [f"many/{n:05}" for n in range(1200)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: obstore.put(store, key, b""), keys))

        assert listed(store, prefix="many") == keys

    def test_keys_are_deleted_many_at_once_and_missing_ones_do_no_harm(
        self, store: S3Store | AzureStore | GCSStore
    ) -> None:
        obstore.put(store, "a", b"x")
        obstore.put(store, "b", b"x")
        obstore.put(store, "c", b"x")
        obstore.delete(store, ["a", "b"])

        assert listed(store) == ["c"]

    def test_a_list_while_others_write_fails_nobody(self, store: S3Store | AzureStore | GCSStore) -> None:
        stop = threading.Event()

        def write() -> int:
            n = 0
            while not stop.is_set():
                obstore.put(store, f"w/{n}", b"x")
                n += 1
            return n

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write) for _ in range(2)]
            for _ in range(30):
                listed(store, prefix="w")
            stop.set()
            n_written = max(writer.result() for writer in writers)

        assert len(listed(store, prefix="w")) == n_written


def at_once(write: Any, key: str) -> list[bytes | None]:
    """Let many writers begin together."""
    start = threading.Barrier(N_WRITERS)

    def one(writer: int) -> bytes | None:
        start.wait()
        result: bytes | None = write(key, writer)
        return result

    with ThreadPoolExecutor(N_WRITERS) as pool:
        return list(pool.map(one, range(N_WRITERS)))


def if_still(written: PutResult) -> UpdateVersion:
    """The mode of a put that replaces only what was written then."""
    state: UpdateVersion = {}
    for name in ("e_tag", "version"):
        # What a server does not tell must not be named: obstore refuses None here.
        if written[name] is not None:
            state[name] = written[name]
    return state


def listed(store: S3Store | AzureStore | GCSStore, **kwargs: Any) -> list[str]:
    return [meta["path"] for batch in obstore.list(store, **kwargs) for meta in batch]


class TestMoto(ObjectServerChecks):
    @pytest.fixture
    def store(self, s3: S3Server, bucket: str) -> S3Store:
        return S3Store(bucket, **s3.config)
