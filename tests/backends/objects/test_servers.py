"""Checks of each server for the assumptions of the tests of object stores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import obstore
import pytest
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import AzureStore, S3Store

from tests.backends.objects.conftest import fresh_name
from tests.backends.objects.servers import AzureServer, S3Server

if TYPE_CHECKING:
    from obstore import PutResult, UpdateVersion

N_RACES = 100
N_WRITERS = 8


class ObjectServerChecks:
    """Assumptions about an empty place on any server."""

    def test_a_key_is_written_once(self, store: S3Store | AzureStore) -> None:
        obstore.put(store, "k", b"first", mode="create")
        with pytest.raises(AlreadyExistsError):
            obstore.put(store, "k", b"second", mode="create")

        assert bytes(obstore.get(store, "k").bytes()) == b"first"

    def test_a_key_is_replaced_by_who_knows_what_is_there(self, store: S3Store | AzureStore) -> None:
        first = obstore.put(store, "k", b"first")
        obstore.put(store, "k", b"second", mode=if_still(first))
        with pytest.raises(PreconditionError):
            obstore.put(store, "k", b"third", mode=if_still(first))

        assert bytes(obstore.get(store, "k").bytes()) == b"second"

    def test_one_of_many_writers_of_a_new_key_wins(self, store: S3Store | AzureStore) -> None:
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

    def test_one_of_many_who_replace_a_key_wins(self, store: S3Store | AzureStore) -> None:
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

    def test_server_reads_ranges(self, store: S3Store | AzureStore) -> None:
        data = bytes(range(256)) * 1000
        obstore.put(store, "k", data)

        assert bytes(obstore.get_range(store, "k", start=1000, length=77)) == data[1000:1077]
        parts = obstore.get_ranges(store, "k", starts=[0, 200_000], lengths=[10, 20], coalesce=0)
        assert [bytes(part) for part in parts] == [data[:10], data[200_000:200_020]]

    def test_a_large_body_goes_up_in_parts(self, store: S3Store | AzureStore) -> None:
        data = bytes(range(256)) * 50_000
        obstore.put(store, "k", data, use_multipart=True, chunk_size=5 << 20)

        assert obstore.head(store, "k")["size"] == len(data)
        assert bytes(obstore.get(store, "k").bytes()) == data

    def test_keys_are_listed_by_prefix(self, store: S3Store | AzureStore) -> None:
        for n in range(5):
            obstore.put(store, f"a/{n}", b"x")
        obstore.put(store, "b/0", b"x")

        assert listed(store, prefix="a") == [f"a/{n}" for n in range(5)]
        assert list(obstore.list_with_delimiter(store)["common_prefixes"]) == ["a", "b"]

    def test_more_keys_are_listed_than_one_answer_holds(self, store: S3Store | AzureStore) -> None:
        keys = [f"many/{n:05}" for n in range(1200)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: obstore.put(store, key, b""), keys))

        assert listed(store, prefix="many") == keys

    def test_keys_are_deleted_many_at_once(self, store: S3Store | AzureStore) -> None:
        for key in ("a", "b", "c"):
            obstore.put(store, key, b"x")
        obstore.delete(store, ["a", "b"])

        assert listed(store) == ["c"]

    def test_a_list_while_others_write_fails_nobody(self, store: S3Store | AzureStore) -> None:
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


class S3Checks(ObjectServerChecks):
    """Assumptions about S3 that Azure does not meet.

    Azure has no ranges from the end, and its answer names keys that were not there to delete. It lists from a key on
    only since a version of 2026, and Azurite passes over the question and lists all.
    """

    def test_the_end_of_a_blob_is_read_without_its_size(self, store: S3Store) -> None:
        obstore.put(store, "k", b"0123456789")

        assert bytes(obstore.get(store, "k", options={"range": {"suffix": 3}}).bytes()) == b"789"

    def test_keys_are_listed_after_a_key(self, store: S3Store) -> None:
        for n in range(5):
            obstore.put(store, f"a/{n}", b"x")

        assert listed(store, prefix="a", offset="a/2") == ["a/3", "a/4"]
        assert listed(store, prefix="a", offset="a/25") == ["a/3", "a/4"]

    def test_deleting_a_missing_key_does_no_harm(self, store: S3Store) -> None:
        obstore.put(store, "a", b"x")
        obstore.delete(store, ["a", "never there"])
        obstore.delete(store, "a")

        assert listed(store) == []

    def test_a_multipart_upload_yields_to_a_key_that_is_there(self, store: S3Store, at: tuple[S3Server, str]) -> None:
        server, bucket = at
        client = server.client()
        key = {"Bucket": bucket, "Key": "k"}
        upload = client.create_multipart_upload(**key)["UploadId"]
        part = client.upload_part(**key, UploadId=upload, PartNumber=1, Body=b"late")
        obstore.put(store, "k", b"there")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.complete_multipart_upload(**key, UploadId=upload, MultipartUpload=parts, IfNoneMatch="*")

        assert bytes(obstore.get(store, "k").bytes()) == b"there"

    def test_parts_that_arrived_are_listed_and_can_be_completed_later(
        self, store: S3Store, at: tuple[S3Server, str]
    ) -> None:
        server, bucket = at
        key = {"Bucket": bucket, "Key": "k"}
        upload = server.client().create_multipart_upload(**key)["UploadId"]
        server.client().upload_part(**key, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))
        later = server.client()
        begun = later.list_multipart_uploads(Bucket=bucket)["Uploads"]
        arrived = later.list_parts(**key, UploadId=upload)["Parts"]
        parts = {"Parts": [{"PartNumber": it["PartNumber"], "ETag": it["ETag"]} for it in arrived]}
        later.complete_multipart_upload(**key, UploadId=upload, MultipartUpload=parts)

        assert [(it["Key"], it["UploadId"]) for it in begun] == [("k", upload)]
        assert obstore.head(store, "k")["size"] == 5 << 20


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


def listed(store: S3Store | AzureStore, **kwargs: Any) -> list[str]:
    return [meta["path"] for batch in obstore.list(store, **kwargs) for meta in batch]


@pytest.mark.long
class TestMoto(S3Checks):
    @pytest.fixture
    def at(self, s3: S3Server, bucket: str) -> tuple[S3Server, str]:
        return s3, bucket

    @pytest.fixture
    def store(self, at: tuple[S3Server, str]) -> S3Store:
        return S3Store(at[1], **at[0].config)


@pytest.mark.long
class TestLocalStack(S3Checks):
    @pytest.fixture
    def at(self, second_s3: S3Server) -> tuple[S3Server, str]:
        return second_s3, second_s3.make_bucket(fresh_name())

    @pytest.fixture
    def store(self, at: tuple[S3Server, str]) -> S3Store:
        return S3Store(at[1], **at[0].config)


@pytest.mark.long
class TestAzurite(ObjectServerChecks):
    @pytest.fixture
    def store(self, azure: AzureServer) -> AzureStore:
        return AzureStore(azure.make_container(fresh_name()), **azure.config)
