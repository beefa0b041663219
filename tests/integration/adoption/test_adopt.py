"""``tensorcas adopt`` on roots that MLflow wrote: everything loads before, during and after, and comes back."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import fluent
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.errors import ConflictError, CorruptError
from tensorcas_mlflow.integration.adoption import AdoptionReport, Database, plan_adoption, revert
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas, tensorcas

__all__ = ["tensorcas"]

TABLES = {
    "experiments": "experiment_id, artifact_location",
    "runs": "run_uuid, artifact_uri",
    "logged_models": "model_id, artifact_location",
    "model_versions": "name, version, source, storage_location",
}
BIG = 100_000


class Killed(BaseException):
    """The process ends here."""


def killed_at(step: int) -> Callable[[str, str, int], None]:
    """Return a watch that ends the work at its n-th step."""
    left = [step]

    def watch(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return watch


class Echo(mlflow.pyfunc.PythonModel):
    def predict(self, model_input: list[str]) -> list[str]:
        return model_input


@dataclass
class Place:
    """An artifact root with MLflow's database beside it, and its state when it was made."""

    folder: Path
    kept: Path

    @property
    def root(self) -> Path:
        return self.folder / "mlruns"

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    def reset(self) -> None:
        """Put everything back as it was when the place was made."""
        shutil.rmtree(self.root)
        shutil.copytree(self.kept / "mlruns", self.root)
        # MLflow keeps the database open.
        with sqlite3.connect(self.kept / "mlflow.db") as source, sqlite3.connect(self.folder / "mlflow.db") as copy:
            source.backup(copy)

    def rows(self) -> dict[str, list[Any]]:
        """Read all locations from the database."""
        with sqlite3.connect(self.folder / "mlflow.db") as connection:
            return {name: connection.execute(f"select {what} from {name}").fetchall() for name, what in TABLES.items()}

    def locations(self) -> list[str]:
        """List the artifact locations of all runs, models and versions."""
        rows = self.rows()
        return [row[-1] for table in ("runs", "logged_models", "model_versions") for row in rows[table]]

    def files(self) -> dict[str, bytes]:
        """Read the plain files."""
        return {
            str(file.relative_to(self.root)): file.read_bytes()
            for file in self.root.rglob("*")
            if file.is_file() and ".tensorcas" not in str(file)
        }

    def loaded(self, tmp: Path) -> list[dict[str, bytes]]:
        """Read all artifacts through MLflow, of all that has a location."""
        found = []
        for number, location in enumerate(self.locations()):
            out = tmp / str(number)
            out.mkdir(parents=True)
            repository = get_artifact_repository(location)
            folders, files = [None], []
            while folders:
                for info in repository.list_artifacts(folders.pop()):
                    (folders if info.is_dir else files).append(info.path)
            found.append({path: self._read(repository, path, out / "file") for path in files})
        shutil.rmtree(tmp)
        return found

    @staticmethod
    def _read(repository: Any, path: str, out: Path) -> bytes:
        repository._download_file(path, str(out))
        return out.read_bytes()

    def adopt(self, watch: Callable[[str, str, int], None] = lambda *_: None) -> AdoptionReport:
        return plan_adoption(self.root, [Database(self.uri)]).execute(watch)

    def revert(self, watch: Callable[[str, str, int], None] = lambda *_: None) -> Any:
        return revert(self.root, [Database(self.uri)], watch=watch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Runs with models of MLflow's own flavors, and two runs of one checkpoint's files."""
    folder = tmp_path_factory.mktemp("mlflow") / "here"
    folder.mkdir()
    place = Place(folder, folder.parent / "kept")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(place.uri)
    experiment = mlflow.create_experiment("plain", artifact_location=str(place.root / "1"))
    mlflow.set_experiment(experiment_id=experiment)
    data = np.random.default_rng(0).normal(size=(50, 3))
    mlflow.sklearn.autolog(registered_model_name="Sk", log_model_signatures=False, silent=True)
    LinearRegression().fit(data, data[:, 0])
    mlflow.sklearn.autolog(disable=True)
    mlflow.pyfunc.log_model(name="py", python_model=Echo(), pip_requirements=[])
    net = torch.nn.Linear(200, 200)
    mlflow.pytorch.log_model(net, name="net", serialization_format="pickle", pip_requirements=[])
    mlflow.end_run()
    client = MlflowClient()
    for number in range(2):
        run = client.create_run(experiment).info.run_id
        weights = folder / "weights.pt"
        torch.save(net.state_dict(), weights)
        client.log_artifact(run, str(weights), "sub folder ü")
        client.log_text(run, f"note {number}", "note.txt")
        client.log_dict(run, {"a": 1}, "größe 1.json")
        client.set_terminated(run)
    mlflow.set_tracking_uri(before)
    fluent._active_experiment_id = None
    shutil.copytree(folder, place.kept)
    return place


@pytest.fixture
def place(made: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("TENSORCAS_STORE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made.reset()
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(made.uri)
    yield made
    mlflow.set_tracking_uri(before)


def run_with_file(place: Place, *, ended: bool = True) -> Path:
    """Log one binary file to a new run; return it."""
    client = MlflowClient()
    run = client.create_run("1")
    file = place.folder / "more.bin"
    file.write_bytes(os.urandom(BIG))
    client.log_artifact(run.info.run_id, str(file))
    if ended:
        client.set_terminated(run.info.run_id)
    return place.root / "1" / run.info.run_id / "artifacts" / "more.bin"


@pytest.mark.long
def test_models_of_mlflows_flavors_load_after_adoption_and_come_back_byte_for_byte(
    place: Place, tmp_path: Path, tensorcas: Tensorcas
) -> None:
    files, rows, loaded = place.files(), place.rows(), place.loaded(tmp_path / "a")

    dry = tensorcas("adopt", place.root, "--dry-run", "--json", "-q")
    assert (place.files(), place.rows()) == (files, rows)
    assert not (place.root / ".tensorcas").exists()
    done = tensorcas("adopt", place.root, "--yes", "--json", "-q")

    assert (dry.status, done.status) == (0, 0), dry.err + done.err
    report = done.json["report"]
    assert dry.json["estimate"]["plain_bytes"] == report["plain_bytes"]
    # The checkpoint lies in two runs and in a model.
    assert report["stored_bytes"] < 0.6 * report["plain_bytes"]
    assert abs(dry.json["estimate"]["stored_bytes"] - report["stored_bytes"]) < 0.1 * report["plain_bytes"]
    assert not [path for path in place.files() if path.endswith((".pt", ".pth", ".skops", ".pkl"))]
    assert all(location.startswith("tensorcas:") for location in place.locations())
    assert place.loaded(tmp_path / "b") == loaded
    model = mlflow.sklearn.load_model("models:/Sk/1")
    assert mlflow.pyfunc.load_model("models:/Sk/1").predict(np.ones((1, 3))) == model.predict(np.ones((1, 3)))

    back = tensorcas("adopt", place.root, "--revert", "--yes", "--json", "-q")

    assert back.status == 0, back.err
    assert (place.files(), place.rows()) == (files, rows)
    assert Store.open(place.root).walk_artifacts() == []


@pytest.mark.long
def test_everything_loads_wherever_adoption_and_reversal_are_killed(place: Place, tmp_path: Path) -> None:
    files, rows, loaded = place.files(), place.rows(), place.loaded(tmp_path / "a")
    step = 0
    while True:
        place.reset()
        try:
            place.adopt(killed_at(step))
            break
        except Killed:
            assert place.loaded(tmp_path / "a") == loaded
        if step % 2:
            place.adopt()
            assert place.loaded(tmp_path / "a") == loaded
            assert not [path for path in place.files() if path.endswith((".pt", ".pth"))]
            with pytest.raises(Killed):
                place.revert(killed_at(step % 13))
            assert place.loaded(tmp_path / "a") == loaded
        place.revert()
        assert (place.files(), place.rows()) == (files, rows)
        assert Store.open(place.root).walk_artifacts() == []
        step += 3  # another phase of each folder
    assert step > 20


@pytest.mark.long
def test_file_that_changes_during_adoption_is_left_alone_and_named(place: Place, tmp_path: Path) -> None:
    file = run_with_file(place)
    new = os.urandom(BIG)

    for at in ("stored", "compared", "switched"):

        def watch(step: str, path: str, _: int, at: str = at) -> None:
            if step == at and file.is_relative_to(place.root / path):
                file.write_bytes(new)

        report = place.adopt(watch)

        assert [each.path for each in report.left_alone] == [str(file.relative_to(place.root))], at
        assert file.read_bytes() == new
        assert {"more.bin": new} in place.loaded(tmp_path / "a")
    place.adopt()
    assert not file.exists()
    assert {"more.bin": new} in place.loaded(tmp_path / "a")


def test_runs_of_a_server_are_left_alone_and_counted(place: Place, tensorcas: Tensorcas) -> None:
    with sqlite3.connect(place.folder / "mlflow.db") as connection:
        connection.execute("update runs set artifact_uri = 'mlflow-artifacts:/1/' || run_uuid || '/artifacts'")
    before = place.rows()["runs"]

    done = tensorcas("adopt", place.root, "--yes", "-q")

    assert "mlflow-artifacts: (3)" in done.out
    assert place.rows()["runs"] == before


def test_running_runs_are_adopted_only_if_asked(place: Place) -> None:
    file = run_with_file(place, ended=False)

    report = place.adopt()

    assert "running" in report.left_alone[0].reason
    assert file.exists()
    plan_adoption(place.root, [Database(place.uri)], with_running=True).execute()
    assert not file.exists()


@pytest.mark.long
def test_new_runs_of_an_adopted_experiment_log_into_the_store_and_stay_there(place: Place, tmp_path: Path) -> None:
    place.adopt()
    file = run_with_file(place)
    data = (place.folder / "more.bin").read_bytes()
    assert not file.exists()

    report = place.revert()

    assert [each.reason for each in report.left_alone] == ["it was logged into the store"]
    assert {"more.bin": data} in place.loaded(tmp_path / "a")


@pytest.mark.parametrize("kind", ["link out", "link inside", "link to it", "pipe", "bad name", "store", "hard link"])
def test_folders_with_strange_content_are_left_alone(place: Place, tmp_path: Path, kind: str) -> None:
    file = run_with_file(place)
    strange = file.parent / "strange"
    outside = tmp_path / "outside"
    outside.write_bytes(b"\0" * BIG)
    if kind == "link out":
        strange.symlink_to(outside)
    elif kind == "link inside":
        strange.symlink_to(file)
    elif kind == "link to it":
        (place.root / "latest").symlink_to(file)
    elif kind == "pipe":
        os.mkfifo(strange)
    elif kind == "bad name":
        Path(os.fsdecode(os.fsencode(strange) + b"\xff")).write_bytes(b"\0" * BIG)
    elif kind == "store":
        Store.init(file.parent)
    else:
        os.link(file, strange)
    before = file.read_bytes()

    report = place.adopt()

    assert file.read_bytes() == before
    assert outside.read_bytes() == b"\0" * BIG
    assert kind == "hard link" or [each.path for each in report.left_alone] == [
        str(file.parent.relative_to(place.root))
    ]


@pytest.mark.long
def test_journal_that_was_tampered_with_is_refused(place: Place) -> None:
    place.adopt()
    journal = place.root / ".tensorcas-adopted"
    whole = journal.read_bytes()
    first = json.loads(whole.splitlines()[0])
    from tensorcas_mlflow.layout import record_bytes

    forged = [
        whole.replace(b"begun", b"stole", 1),
        whole + b"[]\n",
        whole + b'{"format": 1, "unit": "1", "state": "done"}\n',
        whole + record_bytes({"format": 1, "unit": "../x", "state": "done"}) + b"\n",
        whole
        + record_bytes({"format": 1, "unit": "1", "state": "begun", "old": [{"id": ["a"], "old": "/etc"}]})
        + b"\n",
        whole + record_bytes({"format": 1, "unit": "1", "state": "stored", "times": {"1/../../x": 1}}) + b"\n",
        whole + record_bytes({"format": 1, "unit": 7, "state": "done"}) + b"\n",
    ]
    rows = place.rows()
    for data in forged:
        journal.write_bytes(data)
        with pytest.raises(CorruptError):
            place.revert()
        assert place.rows() == rows

    journal.unlink()
    journal.symlink_to(place.folder / "elsewhere")
    with pytest.raises(ValueError, match="not a file"):
        place.revert()
    journal.unlink()
    # A process died while it wrote its line.
    journal.write_bytes(whole + record_bytes(first)[:20])
    place.revert()
    assert not any(location.startswith("tensorcas:") for location in place.locations())


@pytest.mark.long
def test_reversal_without_the_right_database_changes_nothing(place: Place, tmp_path: Path) -> None:
    loaded = place.loaded(tmp_path / "a")
    place.adopt()
    other = place.folder / "other.db"
    with sqlite3.connect(place.folder / "mlflow.db") as source, sqlite3.connect(other) as copy:
        source.backup(copy)
        copy.execute("delete from model_versions")
        copy.execute("delete from runs")
        copy.execute("delete from logged_models")

    report = revert(place.root, [Database(f"sqlite:///{other}")])

    assert report.n_units == 0
    assert all("pass all databases" in each.reason for each in report.left_alone)
    assert place.loaded(tmp_path / "a") == loaded


def test_two_adoptions_of_one_root_do_not_run_at_once(place: Place) -> None:
    def watch(*_: object) -> None:
        with pytest.raises(ConflictError, match="another"):
            place.revert()
        raise Killed

    with pytest.raises(Killed):
        place.adopt(watch)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tracking-uri", "http://mlflow:5000"], "is no database"),
        (["--tracking-uri", "sqlite:////nowhere/mlflow.db"], "there is no database"),
        (["--revert"], "nothing was adopted"),
        (["--run", "abc"], "no run or logged model"),
    ],
)
def test_wrong_words_are_refused(place: Place, tensorcas: Tensorcas, words: list[str], reason: str) -> None:
    done = tensorcas("adopt", place.root, "--yes", *words)

    assert done.status == 1
    assert reason in done.err
