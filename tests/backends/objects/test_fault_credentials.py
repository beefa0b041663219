"""Credentials that expire are renewed if they can be, or said to have expired; and nobody gets to read them."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import _buckets
from tensorcas_mlflow.errors import BackendError, ForbiddenError, RefusedError
from tests.backends.objects.faults import EXPIRED_TOKEN, EXPIRED_TOKEN_403, SLOW_DOWN, Answer, Fault, ResetBefore, Stall
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.backends.objects.trials import Place, Trials, be_hasty, model_of, reach, save

pytestmark = pytest.mark.long

SECRET, TOKEN = "5ecret-of-this-test", "t0ken-of-this-test"
DENIED = Answer(403, "AccessDenied")

PROVIDER = f"""#!{sys.executable}
import json, pathlib

count = pathlib.Path(__file__).with_suffix(".count")
n = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(n))
print(json.dumps({{"Version": 1, "AccessKeyId": f"key-{{n}}", "SecretAccessKey": "{SECRET}", "SessionToken": "{TOKEN}",
                  "Expiration": "2999-01-01T00:00:00Z"}}))
"""


@pytest.fixture(autouse=True)
def hasty(s3: S3Server, way: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are reached through the proxy, by clients that do not wait long."""
    reach(s3.at(way.endpoint), monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    be_hasty(monkeypatch)


@pytest.fixture
def place(s3: S3Server, way: Proxy, bucket: str) -> Iterator[Place]:
    """A store with one checkpoint, which is still whole after the test."""
    place = Trials(s3, way, bucket).place()
    place.keep(place.direct(), 0, model_of(0))
    yield place
    way.calm()
    place.check()


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that gives out credentials, named in boto3's settings; the file it returns counts its runs."""
    program = tmp_path / "provider.py"
    program.write_text(PROVIDER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config").write_text(f"[default]\nregion = us-east-1\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return program.with_suffix(".count")


def texts(error: BaseException | None) -> Iterator[str]:
    """All that an error and its causes say."""
    while error is not None:
        yield from (str(error), repr(error), *map(str, getattr(error, "__notes__", ())))
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("answer", [EXPIRED_TOKEN, EXPIRED_TOKEN_403])
def test_expired_credentials_are_reported_at_once(place: Place, answer: Answer) -> None:
    store = place.through()
    place.way.forget()
    place.way.inject(answer, times=None)
    with pytest.raises(ForbiddenError, match="credentials have expired: renew them"):
        save(store, model_of(1), 1)

    assert len(place.way.traffic()) == 2, str(place.way.traffic())


@pytest.mark.parametrize("answer", [EXPIRED_TOKEN, EXPIRED_TOKEN_403])
def test_an_answer_that_has_no_room_for_the_reason_is_said_to_be_about_credentials(
    place: Place, answer: Answer
) -> None:
    store = place.through()
    place.way.inject(answer, kinds=(Kind.HEAD,), times=None)
    with pytest.raises(ForbiddenError, match="or have expired"):
        store.artifact_token("a/model")


def test_the_same_store_goes_on_when_credentials_are_renewed(place: Place) -> None:
    store = place.through()
    for nth in range(1, 8):  # all but the last, which only tidies up
        place.way.calm()
        place.way.inject(EXPIRED_TOKEN, nth=nth, times=None)
        with pytest.raises(ForbiddenError):
            save(store, model_of(nth), 1)
    place.way.calm()
    place.keep(store, 1, model_of(1))

    assert len(store.checkpoints()) == 2


def test_new_credentials_in_the_environment_are_taken_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.through()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    place.way.inject(EXPIRED_TOKEN)
    place.keep(store, 1, model_of(1))


def test_provider_is_asked_for_new_credentials_after_expiry(place: Place, provider: Path) -> None:
    store = place.through()
    n_before = int(provider.read_text())
    place.way.inject(EXPIRED_TOKEN, nth=3)
    place.keep(store, 1, model_of(1))

    assert int(provider.read_text()) == n_before + 1


@pytest.mark.parametrize("kind", [Kind.PART, Kind.COMPLETE])
def test_an_upload_that_meets_expired_credentials_is_reported_and_the_next_succeeds(
    place: Place, provider: Path, kind: Kind
) -> None:
    large = {"w": np.random.default_rng(5).integers(0, 256, 18 << 20, dtype=np.uint8)}
    store = place.through()
    place.way.inject(EXPIRED_TOKEN, kinds=(kind,))
    with pytest.raises(ForbiddenError):
        save(store, large, 1)
    place.keep(store, 1, large)

    assert int(provider.read_text()) >= 2


@pytest.mark.parametrize(
    "fault",
    [
        EXPIRED_TOKEN,
        DENIED,
        ResetBefore(),
        *(pytest.param(it, marks=pytest.mark.long) for it in (EXPIRED_TOKEN_403, SLOW_DOWN, Stall(seconds=1.0))),
    ],
)
def test_no_error_tells_a_secret(place: Place, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(_buckets, "GIVE_UP_S", 0.1)
    monkeypatch.setattr("tensorcas_mlflow.backends._open._RETRIES", {"max_retries": 1})
    store = place.through()
    actions = (
        lambda: save(store, model_of(1), 1),
        lambda: store.checkpoints(),
        lambda: store.artifact("a/model"),
        lambda: store.artifact_token("a/model"),
        lambda: store.drop_artifacts(""),
    )
    place.way.inject(fault, times=None)
    said: list[str] = []
    for act in actions:
        with pytest.raises(BackendError) as caught:
            act()
        said += texts(caught.value)

    assert said
    assert not any(secret in text for text in said for secret in (SECRET, TOKEN))


def test_store_that_only_fails_is_given_up_with_an_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "GIVE_UP_S", 0.3)
    store = place.through()
    place.way.forget()
    place.way.inject(SLOW_DOWN, times=None)
    with pytest.raises(BackendError, match=r"after \d+ attempts.*503") as caught:
        save(store, model_of(1), 1)

    assert not isinstance(caught.value, RefusedError)
    assert 3 < len(place.way.traffic()) < 100


def test_a_store_that_stays_silent_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "GIVE_UP_S", 0.3)
    store = place.through()
    place.way.forget()
    place.way.inject(Stall(seconds=60), kinds=(Kind.PUT,), times=None)
    with pytest.raises(BackendError):
        store.begin_checkpoint(model_of(1))

    assert len(place.way.traffic().of(Kind.PUT)) == 1
