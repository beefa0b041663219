"""All 256 ``%XX``: in a location, a name, a key, an address or a command each names one thing, or is refused."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from flask.testing import FlaskClient
from mlflow.exceptions import MlflowException

from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.backends import Root
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.integration.adoption._database import local_folder
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.layout import label_of
from tensorcas_mlflow.layout._keys import quote_segment, unquote_segment
from tests.integration.server_app.conftest import client, flask_app

__all__ = ["client", "flask_app"]

ESCAPES = [f"%{byte:02X}" for byte in range(256)]
FORMS = ["run{}", "{}", "{}run", "%C3{}"]
"""With two bytes in a row, some are UTF-8."""


def names_in(form: str) -> list[str]:
    return [form.format(escape) for escape in ESCAPES]


def is_utf8(quoted: str) -> bool:
    try:
        unquote_to_bytes(quoted).decode()
    except UnicodeDecodeError:
        return False
    return True


def may_be_refused(name: str) -> bool:
    """Tell whether a name is not UTF-8, has control characters, or is no name."""
    decoded = unquote_to_bytes(name)
    return not is_utf8(name) or min(decoded) < 32 or 127 in decoded or b"/" in decoded or decoded in (b".", b"..")


@pytest.mark.parametrize("name", ["run%80", "run%FF", "%C3%28", "run%2F", "%2F", "%2E", "%2E%2e", "a/%2e/b", "%2e%2fx"])
@pytest.mark.parametrize("top", ["tensorcas:///d", "file:///d", "tensorcas-s3://bucket/d"])
def test_location_that_the_file_system_would_take_for_another_is_refused(top: str, name: str) -> None:
    with pytest.raises(ValueError, match="percent-encodes"):
        Root.parse(f"{top}/{name}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top", ["tensorcas:///d", "file:///d", "tensorcas-s3://bucket/d"])
def test_no_two_locations_are_one_place(top: str, form: str) -> None:
    named: dict[str, str] = {}
    for name in names_in(form):
        if may_be_refused(name):
            with suppress(ValueError):
                named[Root.parse(f"{top}/{name}").path] = name
            continue
        root = Root.parse(f"{top}/{name}")

        assert Root.parse(root.uri) == root
        named[root.path] = name
    assert all(os.fsencode(path) == b"/d/" + unquote_to_bytes(name) for path, name in named.items())


@pytest.mark.long
def test_what_is_logged_to_a_location_is_there_alone(tmp_path: Path) -> None:
    kept = {}
    for name in names_in("run{}"):
        (tmp_path / "note.txt").write_text(name)
        if not is_utf8(name) or name in ("run%00", "run%2F"):
            with pytest.raises(MlflowException, match=name):
                TensorCasArtifactRepository(f"tensorcas://{tmp_path}/top/{name}")
            continue
        repository = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/top/{name}")
        repository.log_artifact(tmp_path / "note.txt")
        kept[name] = repository

    assert len(kept) == 126  # ASCII but for NUL and the slash
    assert len(list((tmp_path / "top").iterdir())) == len(kept)
    for name, repository in kept.items():
        assert Path(repository.download_artifacts("note.txt")).read_text() == name
        assert [info.path for info in repository.list_artifacts()] == ["note.txt"]


@pytest.mark.long
def test_artifact_names_keep_apart(tmp_path: Path) -> None:
    repository = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/top")
    for name in ESCAPES:
        source = tmp_path / name
        source.write_bytes(b"\0" + name.encode() * 400)  # no text, so no plain file
        repository.log_artifact(source, name)

    assert sorted(info.path for info in repository.list_artifacts()) == sorted(ESCAPES)
    for name in ESCAPES:
        assert [info.path for info in repository.list_artifacts(name)] == [f"{name}/{name}"]
        assert Path(repository.download_artifacts(f"{name}/{name}")).read_bytes() == b"\0" + name.encode() * 400


@pytest.mark.parametrize("name", ["run\ufffd", "a/\ufffd/b"])
def test_server_refuses_a_name_that_was_decoded_with_replacement(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/top")
    (tmp_path / "note.txt").write_text("text")
    repository.log_artifact(tmp_path / "note.txt", name)  # a client names what it means
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", f"tensorcas://{tmp_path}/top")

    with pytest.raises(MlflowException, match="bytes that are not UTF-8"):
        repository.log_artifact(tmp_path / "note.txt", name)
    with (tmp_path / "note.txt").open("rb") as stream, pytest.raises(MlflowException, match="bytes that are not UTF-8"):
        repository.log_artifact_from_stream(stream, "note.txt", name)


def test_segments_of_keys_decode_to_what_they_encode() -> None:
    texts = [os.fsdecode(b"r" + bytes([byte])) for byte in range(256)] + names_in("r{}")
    segments = [quote_segment(text) for text in texts]

    assert len(set(segments)) == len(texts)
    assert [unquote_segment(segment) for segment in segments] == texts
    assert len({label_of(f"refs/runs/{segment}/@1") for segment in segments}) == len(texts)


def test_runs_of_a_store_keep_apart(tmp_path: Path) -> None:
    runs = ["r\udc80", "r\udc81", "r\ufffd", "r%80", "r%EF%BF%BD", "r%2F", "r%41", "rA"]
    for number, run in enumerate(runs):
        TensorCasStore(tmp_path / "store", run).save({"w": np.full(3, number)}, step=0)

    for number, run in enumerate(runs):
        assert TensorCasStore(tmp_path / "store", run).load()["w"].tolist() == [number] * 3


@pytest.mark.parametrize("scheme", ["tensorcas", "file"])
def test_adoption_takes_no_location_for_the_folder_of_another(scheme: str) -> None:
    folders = [local_folder(f"{scheme}:///d/{name}") for name in names_in("run{}")]

    # MLflow itself takes two file: locations that are not UTF-8 for one folder.
    found = [folder for folder in folders if folder is not None and "\ufffd" not in str(folder)]
    assert len(set(found)) == len(found) >= 126
    assert scheme == "file" or None in folders


@pytest.mark.long
def test_commands_look_where_they_are_told_to_or_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names_in("run{}"):
        status = main(["init", f"tensorcas://{tmp_path}/{name}"])
        said = capsys.readouterr()
        folder = os.fsencode(tmp_path) + b"/" + unquote_to_bytes(name)
        assert (status == 0) == (folder in folders_in(tmp_path)), said
        if status:
            assert "Traceback" not in said.err
            assert name in said.err
    assert len(folders_in(tmp_path)) == 126


def folders_in(folder: Path) -> set[bytes]:
    return {entry.path for entry in os.scandir(os.fsencode(folder))}


def test_folder_whose_name_is_no_utf8_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not UTF-8, so no URI names it: rename it"):
        TensorCasStore(os.fsdecode(os.fsencode(tmp_path) + b"/\x80"), "r")


@pytest.mark.long
@pytest.mark.parametrize("page", ["run?id=", "checkpoint?store=x&key=", "diff?b=x&a=models:/", "experiment?id="])
def test_addresses_of_pages_that_are_not_utf8_are_refused(page: str, client: FlaskClient) -> None:
    for escape in ESCAPES:
        answer = client.get(f"/tensorcas/{page}x{escape}")
        assert (answer.status_code == 400) == (not is_utf8(escape)), escape
