"""The proxy passes on what it is given, counts it, and breaks what it is told to break."""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from tests.backends.objects.faults import (
    EXPIRED_TOKEN,
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Answer,
    CutBody,
    CutUpload,
    Fault,
    Late,
    LostAnswer,
    ResetBefore,
    Rule,
    Rulebook,
    Stall,
)
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.relay import Link
from tests.backends.objects.requests_seen import Kind, kind_of
from tests.backends.objects.servers import S3Server

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from obstore.store import BackoffConfig

BODY = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def direct(s3: S3Server, bucket: str) -> S3Store:
    """The bucket, past the proxy."""
    return S3Store(bucket, **s3.config)


@pytest.fixture
def once(s3: S3Server, bucket: str, way: Proxy) -> S3Store:
    """The bucket through the proxy, by a client that asks once and reports what it gets."""
    return S3Store(bucket, **s3.at(way.endpoint).config, retry_config={"max_retries": 0})


@pytest.fixture
def again(s3: S3Server, bucket: str, way: Proxy) -> S3Store:
    """The bucket through the proxy, by a client that tries again and gives up on an answer after a second."""
    config = s3.at(way.endpoint).config
    config["client_options"] = config["client_options"] | {"timeout": timedelta(seconds=1)}
    soon: BackoffConfig = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5)}
    return S3Store(bucket, **config, retry_config={"max_retries": 5, "backoff": soon})


def raw(way: Proxy, method: str, path: str, **kwargs: object) -> tuple[int, bytes]:
    """Ask by hand, with a client that knows nothing of S3."""
    connection = http.client.HTTPConnection(urlsplit(way.endpoint).netloc, timeout=20)
    connection.request(method, path, **kwargs)  # type: ignore[arg-type]
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_object_put_through_the_proxy_reaches_the_server(once: S3Store, direct: S3Store) -> None:
    obstore.put(once, "k", BODY, use_multipart=False)

    assert bytes(obstore.get(direct, "k").bytes()) == BODY
    assert bytes(obstore.get(once, "k").bytes()) == BODY


def test_multipart_upload_passes_the_proxy(once: S3Store, direct: S3Store, way: Proxy) -> None:
    data = BODY * 4
    obstore.put(once, "k", data, use_multipart=True, chunk_size=5 << 20)

    assert bytes(obstore.get(direct, "k").bytes()) == data
    assert way.traffic().counts == {("POST", Kind.CREATE): 1, ("PUT", Kind.PART): 3, ("POST", Kind.COMPLETE): 1}
    assert way.traffic().n_billed == 1


def test_range_request_passes_the_proxy(once: S3Store) -> None:
    obstore.put(once, "k", BODY)

    assert bytes(obstore.get_range(once, "k", start=1000, length=50)) == BODY[1000:1050]


def test_chunked_body_passes_the_proxy(s3: S3Server, bucket: str, way: Proxy, direct: S3Store) -> None:
    answer = raw(way, "PUT", f"/{bucket}/k", body=iter([b"one", b"two"]), encode_chunked=True)

    assert answer[0] == 200
    assert bytes(obstore.get(direct, "k").bytes()) == b"onetwo"


def test_a_client_that_waits_for_100_continue_is_told_to(s3: S3Server, bucket: str, way: Proxy) -> None:
    client = s3.at(way.endpoint).client()
    client.put_object(Bucket=bucket, Key="k", Body=b"boto3 asks first")

    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"boto3 asks first"


def test_a_connection_serves_many_requests(way: Proxy) -> None:
    connection = http.client.HTTPConnection(urlsplit(way.endpoint).netloc, timeout=20)
    connection.connect()
    port = connection.sock.getsockname()[1]
    for _ in range(3):
        connection.request("HEAD", "/no-such-bucket/k")
        connection.getresponse().read()

    assert connection.sock is not None
    assert connection.sock.getsockname()[1] == port
    assert len(way.traffic()) == 3


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ("PUT /b/k", Kind.PUT),
        ("PUT /b", Kind.OTHER),
        ("PUT /b/k/l?partNumber=1&uploadId=u", Kind.PART),
        ("POST /b/k?uploads", Kind.CREATE),
        ("POST /b/k?uploadId=u", Kind.COMPLETE),
        ("DELETE /b/k?uploadId=u", Kind.ABORT),
        ("DELETE /b/k", Kind.DELETE),
        ("POST /b?delete", Kind.DELETE),
        ("POST /b/?delete=", Kind.DELETE),
        ("GET /b/k", Kind.GET),
        ("GET /b?list-type=2&prefix=p%2F", Kind.LIST),
        ("GET /b/?uploads", Kind.LIST),
        ("GET /b/k?uploadId=u", Kind.LIST),
        ("GET /b?location", Kind.OTHER),
        ("GET /", Kind.OTHER),
        ("HEAD /b/k", Kind.HEAD),
    ],
)
def test_requests_are_of_the_kinds_that_are_billed(asked: str, kind: Kind) -> None:
    method, target = asked.split()
    path, _, query = target.partition("?")

    assert kind_of(method, path, query) == kind


def test_requests_are_counted_by_kind(once: S3Store, way: Proxy) -> None:
    obstore.put(once, "a/k", b"x")
    obstore.copy(once, "a/k", "a/l")
    obstore.get(once, "a/k").bytes()
    obstore.head(once, "a/k")
    obstore.list_with_delimiter(once, "a/")
    obstore.delete(once, ["a/k", "a/l"])

    assert way.traffic().counts == {
        ("PUT", Kind.PUT): 1,
        ("PUT", Kind.COPY): 1,
        ("GET", Kind.GET): 1,
        ("HEAD", Kind.HEAD): 1,
        ("GET", Kind.LIST): 1,
        ("POST", Kind.DELETE): 1,
    }


def test_bytes_are_counted_both_ways(once: S3Store, way: Proxy) -> None:
    obstore.put(once, "k", BODY)
    obstore.get_range(once, "k", start=0, length=1000)

    assert way.traffic().up_bytes == len(BODY)
    assert way.traffic().of(Kind.GET).down_bytes == 1000


def test_the_log_tells_ranges_and_conditions(once: S3Store, way: Proxy) -> None:
    obstore.put(once, "k", b"0123456789", mode="create")
    obstore.get_range(once, "k", start=2, length=3)
    put, get = way.traffic().exchanges

    assert (put.status, dict(put.headers)["if-none-match"]) == (200, "*")
    assert (get.status, dict(get.headers)["range"]) == (206, "bytes=2-4")
    assert "range=bytes=2-4 -> 206 up=0 down=3" in str(way.traffic())


def test_proxy_does_not_count_requests_it_forgot(once: S3Store, way: Proxy) -> None:
    obstore.put(once, "k", b"x")
    way.forget()

    assert len(way.traffic()) == 0


def test_every_request_waits_for_the_latency(once: S3Store, way: Proxy) -> None:
    way.shape(Link(latency_s=0.05))
    obstore.put(once, "k", b"x")
    obstore.get(once, "k").bytes()

    for it in way.traffic().exchanges:
        assert it.stop_s is not None
        assert it.stop_s - it.start_s >= 0.05


def test_bandwidth_is_limited_each_way(once: S3Store, way: Proxy) -> None:
    way.shape(Link(up_bytes_per_s=3e7, down_bytes_per_s=1e7))
    obstore.put(once, "k", BODY, use_multipart=False)
    obstore.get(once, "k").bytes()
    put, get = way.traffic().exchanges

    assert put.stop_s is not None
    assert put.stop_s - put.start_s >= 0.09
    assert get.stop_s is not None
    assert get.stop_s - get.start_s >= 0.27


@pytest.mark.parametrize("fault", [SLOW_DOWN, TOO_MANY_REQUESTS, INTERNAL_ERROR, EXPIRED_TOKEN])
def test_an_error_is_answered_and_nothing_is_written(fault: Answer, once: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(fault)
    with pytest.raises(BaseError, match=fault.code):
        obstore.put(once, "k", b"x")

    assert list(obstore.list(direct)) == []
    assert [it.status for it in way.traffic().exchanges] == [fault.status]


def test_an_error_leaves_the_connection_usable_after_a_long_body(once: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(SLOW_DOWN)
    with pytest.raises(BaseError):
        obstore.put(once, "k", BODY, use_multipart=False)
    obstore.put(once, "k", b"second")

    assert bytes(obstore.get(direct, "k").bytes()) == b"second"


def test_a_reset_before_the_request_leaves_the_server_alone(once: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(ResetBefore())
    with pytest.raises(BaseError):
        obstore.put(once, "k", b"x")

    assert list(obstore.list(direct)) == []


def test_a_lost_answer_is_lost_after_the_server_has_written(once: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(LostAnswer())
    with pytest.raises(BaseError):
        obstore.put(once, "k", b"x")

    assert bytes(obstore.get(direct, "k").bytes()) == b"x"
    assert [it.status for it in way.traffic().exchanges] == [None]


def test_retry_after_a_lost_answer_meets_its_own_blob(again: S3Store, way: Proxy) -> None:
    way.inject(LostAnswer(), header="if-none-match")
    with pytest.raises(BaseError):
        obstore.put(again, "k", b"x", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(again, "k", b"x", mode="create")

    assert bytes(obstore.get(again, "k").bytes()) == b"x"


def test_an_upload_that_is_cut_writes_nothing(once: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(CutUpload(1_000_000))
    with pytest.raises(BaseError):
        obstore.put(once, "k", BODY, use_multipart=False)

    assert list(obstore.list(direct)) == []


@pytest.mark.parametrize("reset", [False, True])
def test_a_download_that_is_cut_does_not_pass_for_whole(once: S3Store, way: Proxy, *, reset: bool) -> None:
    obstore.put(once, "k", BODY)
    way.inject(CutBody(1_000_000, reset=reset), kinds=(Kind.GET,))
    with pytest.raises(BaseError):
        obstore.get(once, "k").bytes()

    assert way.traffic().of(Kind.GET).down_bytes == 1_000_000


def test_a_stalled_request_has_been_carried_out(again: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(Stall(60), kinds=(Kind.PUT,), times=None)
    with pytest.raises(BaseError, match="Timeout"):
        obstore.put(again, "k", b"x", mode="create")

    assert bytes(obstore.get(direct, "k").bytes()) == b"x"


def test_a_late_request_overwrites_what_came_after_it(again: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(Late(1.5), kinds=(Kind.PUT,))
    with pytest.raises(BaseError, match="Timeout"):
        obstore.put(again, "k", b"late", mode="create")
    obstore.put(direct, "k", b"in between")
    obstore.delete(direct, "k")
    while way.traffic().exchanges[0].status is None:
        time.sleep(0.05)

    assert bytes(obstore.get(direct, "k").bytes()) == b"late"


@pytest.mark.parametrize("fault", [SLOW_DOWN, INTERNAL_ERROR, ResetBefore(), LostAnswer(), CutUpload(1000), Stall(60)])
def test_a_client_that_tries_again_gets_through(fault: Fault, again: S3Store, direct: S3Store, way: Proxy) -> None:
    way.inject(fault, times=2)
    obstore.put(again, "k", BODY, use_multipart=False)

    assert bytes(obstore.get(direct, "k").bytes()) == BODY
    assert len(way.traffic()) == 3


def test_calm_ends_all_faults_of_the_proxy(once: S3Store, way: Proxy) -> None:
    way.inject(SLOW_DOWN, times=None)
    way.calm()
    obstore.put(once, "k", b"x")

    assert [it.fault for it in way.traffic().exchanges] == [None]


def hits(rule: Rule, n: int) -> list[int]:
    """Numbers of the requests, of n equal ones, that a rule strikes."""
    book = Rulebook()
    book.add(rule)
    return [i for i in range(1, n + 1) if book.fault_for(Kind.PUT, "/b/refs/k", ())]


def test_a_rule_strikes_the_nth_match_and_some_after_it() -> None:
    rule = Rule(fault=SLOW_DOWN, kinds=(Kind.PUT,), path="/refs/", nth=3, times=2)

    assert hits(rule, 10) == [3, 4]


def test_a_rule_by_chance_strikes_the_same_requests_each_time() -> None:
    rule = Rule(fault=SLOW_DOWN, times=None, probability=0.3, seed=7)

    assert hits(rule, 100) == hits(rule, 100)
    assert 15 < len(hits(rule, 100)) < 45


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule(fault=SLOW_DOWN, kinds=(Kind.GET,)),
        lambda: Rule(fault=SLOW_DOWN, path="/packs/"),
        lambda: Rule(fault=SLOW_DOWN, header="range"),
    ],
)
def test_a_rule_leaves_other_requests_alone(make: Callable[[], Rule]) -> None:
    assert hits(make(), 10) == []
