"""Logins, signatures and keys are in no message, no traceback, no ref, no page and no output of a command."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

from tensorcas_mlflow.backends import Root, open_bucket
from tensorcas_mlflow.backends import _open as credentials
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    DirectAccessError,
    PendingSavesError,
    StoreNotFoundError,
    TensorCasError,
    WrongStoreError,
    without_secrets,
)
from tensorcas_mlflow.integration._artifact_uri import root_of
from tensorcas_mlflow.integration._home import home_of
from tensorcas_mlflow.integration._mlflow_errors import to_mlflow
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.integration.pages import render_page
from tensorcas_mlflow.integration.server_store._shelf import ArtifactShelf
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout._keys import copies_prefix
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.store import Store

SECRET = "s3cr3tpassw0rd"
URIS = [
    f"https://user:{SECRET}@host.example:5000/api/2.0/artifacts",
    f"https://{SECRET}@host.example/",
    f"postgresql+psycopg2://mlflow:{SECRET}@db/mlflow",
    f"ftp://user:{SECRET}@host/artifacts/1",
    f"https://acc.blob.core.windows.net/c/k?sv=2024&sig={SECRET}%3D&se=1",
    f"s3://KEY:{SECRET}@bucket/path",
    f"tensorcas-s3://KEY:{SECRET}@bucket/path",
    f"tensorcas://user:{SECRET}@host/path",
    f"tensorcas-az://key:{SECRET}@account/x",
    f"tensorcas-s3://bucket/x?token={SECRET}",
    f"mlflow-artifacts://user:{SECRET}@host/0/artifacts",
    f"https://user:p@{SECRET}@host/",
]


@pytest.mark.parametrize("uri", URIS)
def test_uri_in_a_message_is_shown_without_credentials(uri: str) -> None:
    shown = without_secrets(f"could not read {uri!r}: no answer from {uri} (twice)")

    assert SECRET not in shown
    assert shown.startswith("could not read '")
    assert shown.endswith(" (twice)")


@pytest.mark.parametrize(
    "text",
    [
        "tensorcas-az://container@account/path",
        "tensorcas-s3://bucket/a@b/c",
        "tensorcas:///data/mlflow",
        "mail me@example.org about https://example.org/x",
        "models:/m-0a@champion",
        "/data/what?/x",
    ],
)
def test_text_without_a_secret_is_unchanged(text: str) -> None:
    assert without_secrets(text) == text


ERRORS: dict[str, Callable[[str], TensorCasError]] = {
    "BackendError": lambda uri: BackendError("read", uri, f"no answer from {uri}"),
    "BlobNotFoundError": BlobNotFoundError,
    "StoreNotFoundError": StoreNotFoundError,
    "WrongStoreError": lambda uri: WrongStoreError("a", "b", uri),
    "PendingSavesError": lambda uri: PendingSavesError(uri, ()),
    "DirectAccessError": lambda uri: DirectAccessError("collection", uri),
}


@pytest.mark.parametrize("name", ERRORS)
def test_no_error_of_ours_holds_a_secret(name: str) -> None:
    for uri in URIS:
        error = ERRORS[name](uri)
        copy = pickle.loads(pickle.dumps(error))

        assert SECRET not in f"{error} {error!r} {vars(error)} {copy} {to_mlflow(error)}"


CALLS: dict[str, Callable[[str], Any]] = {
    "Root.parse": Root.parse,
    "root_of": root_of,
    "Store.open": Store.open,
    "Store.find": Store.find,
    "repository": TensorCasArtifactRepository,
    "home_of": lambda uri: home_of(uri.replace("mlflow-artifacts:", "other:"), create=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_of_a_call_with_a_secret_does_not_show_the_secret(name: str) -> None:
    refused = 0
    for uri in URIS:
        try:
            CALLS[name](uri)
        except (TensorCasError, ValueError, MlflowException) as error:
            refused += 1
            assert SECRET not in "".join(traceback.format_exception(error))  # noqa: PT017

    assert refused >= 8


@pytest.mark.parametrize("command", ["list", "stats", "verify", "gc --yes", "init"])
def test_no_command_prints_a_secret(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for uri in URIS:
        if not uri.startswith("mlflow-artifacts:"):
            assert main(["--root", uri, *command.split()]) == 1
    printed = capsys.readouterr()

    assert SECRET not in printed.out + printed.err


def test_no_ref_and_no_view_of_a_ref_holds_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.init(tmp_path)
    for number, uri in enumerate(URIS):
        with store.write_checkpoint({"w": np.arange(9.0)}) as save:
            save.commit(RefTarget(uri=uri, run_id="r", step=number))
    pages = b"".join(render_page(store, ref) for ref in store.checkpoints())
    for words in (["list"], ["list", "--json"], ["show", "--run", "r", "--step", "1"]):
        assert main(["--root", str(tmp_path), *words]) == 0
    on_disk = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    assert SECRET.encode() not in on_disk + pages
    assert SECRET not in capsys.readouterr().out


@pytest.mark.usefixtures("store_of_files")
def test_secret_in_a_forged_ref_is_not_shown(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    with store.write_checkpoint({"w": np.arange(9.0)}) as save:
        save.commit(RefTarget(uri="ftp://host/x", run_id="r", step=1))
    [file] = tmp_path.glob(".tensorcas/refs/copies/*/@*")
    said = {name: value for name, value in json.loads(file.read_text()).items() if name != "check"}
    there = tmp_path / ".tensorcas" / copies_prefix(URIS[3]) / file.name
    there.parent.mkdir()
    there.write_bytes(record_bytes({**said, "uri": URIS[3]}))
    file.unlink()
    [ref] = Store.open(tmp_path).checkpoints()

    assert ref.uri == "ftp://…@host/artifacts/1"


# --- object stores


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place where nobody listens, named with a password; and keys."""
    monkeypatch.setattr(credentials, "_RETRIES", credentials._NO_RETRIES)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": f"aws-{SECRET}",
        "AWS_SESSION_TOKEN": f"token-{SECRET}",
        "AWS_REGION": "x",
        "AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint=http://127.0.0.1:9/acc;SharedAccessSignature=sig={SECRET}",
        "AZURE_STORAGE_ACCOUNT_NAME": "acc",
        "STORAGE_EMULATOR_HOST": f"http://user:{SECRET}@127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("uri", ["tensorcas-s3://bucket/x", "tensorcas-az://c/x", "tensorcas-gs://bucket/x"])
@pytest.mark.usefixtures("nobody")
def test_an_endpoints_password_and_signature_are_in_no_traceback(
    uri: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("tensorcas_mlflow.backends._buckets.GIVE_UP_S", 0.0)
    bucket = open_bucket(Root.parse(uri), "")
    with pytest.raises(BackendError) as caught:
        bucket.head("k")

    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLFLOW_S3_UPLOAD_EXTRA_ARGS", f'{{"SSEKMSKeyId": "{SECRET}'),
        ("MLFLOW_S3_UPLOAD_EXTRA_ARGS", f'{{"ServerSideEncryption": "{SECRET}"}}'),
        ("AWS_ENDPOINT_URL", f"http://user:{SECRET}@[::bad/"),
        ("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=a;AccountKey={SECRET}!!"),
        ("AZURE_STORAGE_SAS_TOKEN", f"{SECRET}"),
        ("STORAGE_EMULATOR_HOST", f"not a url {SECRET}://user:{SECRET}@"),
    ],
)
def test_error_about_a_wrong_setting_does_not_repeat_its_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    monkeypatch.setenv(name, value)
    scheme = {"AZURE": "tensorcas-az", "STORAGE": "tensorcas-gs"}.get(name.partition("_")[0], "tensorcas-s3")
    try:
        bucket = open_bucket(Root.parse(f"{scheme}://bucket/x"), "")
        bucket._reader  # noqa: B018
    except (ValueError, TensorCasError) as error:
        assert SECRET not in "".join(traceback.format_exception(error))  # noqa: PT017


# --- servers


def test_a_tracking_servers_password_is_in_no_error_of_a_carrier(tmp_path: Path) -> None:
    repository = HttpArtifactRepository(f"http://user:{SECRET}@127.0.0.1:9/api/2.0/mlflow-artifacts/artifacts/1")
    shelf = ArtifactShelf(repository, ".tensorcas")

    with pytest.raises(TensorCasError) as caught, shelf._translated("read", "format"):
        raise OSError("the disk is full")
    assert SECRET not in f"{caught.value} {caught.value.args}"
    assert "127.0.0.1:9" in str(caught.value)
