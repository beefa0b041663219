"""What people type for runs, models, experiments and stores: names, ids, beginnings of ids, URIs and paths."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np
import pytest

from tensorcas_mlflow.integration.directory import open_directory
from tensorcas_mlflow.integration.directory._directory import _MlflowDirectory
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas
from tests.file_formats.arrays import ArrayTensors, write
from tests.tracking import active_experiment, empty_database, no_stray_settings

__all__ = ["empty_database", "no_stray_settings"]

pytestmark = pytest.mark.xdist_group("names")

N_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Three runs of an experiment in a store: two have one name."""

    root: Path
    uri: str
    base: str
    twins: tuple[str, str]
    model: str
    """Id of the model of the base, registered as ``digits``."""

    @property
    def step(self) -> str:
        return f"{self.base}/artifacts/checkpoints/checkpoint/step-00000002.arrow"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Logged:
    """The runs, logged once; a copy of the store is kept beside it."""
    folder = tmp_path_factory.mktemp("names")
    shutil.copy(empty_database, folder / "mlflow.db")
    before, uri = mlflow.get_tracking_uri(), f"sqlite:///{folder}/mlflow.db"
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORCAS_DATABASE", "false")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        mlflow.set_tracking_uri(uri)
        with active_experiment("vision", f"tensorcas://{folder}/root"):
            for seed, name in enumerate(("base", "twin", "twin")):
                with mlflow.start_run(run_name=name) as run:
                    for step in range(1, N_STEPS + 1):
                        mlflow.tensorcas.log_checkpoint({"w": np.arange(5000.0) * seed + step}, step=step)
                    if name == "base":
                        info = mlflow.tensorcas.log_model({"m": np.ones(50)}, name="model", step=2)
                runs.append(run.info.run_id)
        client = mlflow.MlflowClient()
        client.create_registered_model("digits")
        client.create_model_version("digits", info.model_uri, model_id=info.model_id)
        client.set_registered_model_alias("digits", "champion", 1)
        mlflow.set_tracking_uri(before)
    shutil.copytree(folder / "root", folder / "kept")
    base, first, second = runs
    return Logged(root=folder / "root", uri=uri, base=base, twins=(first, second), model=info.model_id)


@pytest.fixture
def logged(built: Logged, monkeypatch: pytest.MonkeyPatch, no_stray_settings: None) -> Iterator[Logged]:
    """The runs, with their store as it was, and MLflow's database in the working directory. No variable names it."""
    shutil.rmtree(built.root)
    shutil.copytree(built.root.parent / "kept", built.root)
    monkeypatch.chdir(built.root.parent)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(built.uri)
    yield built
    mlflow.set_tracking_uri(before)


def names_of_the_base(logged: Logged) -> list[str]:
    return ["base", logged.base, logged.base[:7], f"runs:/{logged.base}"]


def names_of_its_second_step(logged: Logged) -> list[str]:
    return [
        f"runs:/{logged.base}/checkpoints/checkpoint/step-00000002.arrow",
        f"tensorcas://{logged.root}/{logged.step}",
        f"{logged.root}/{logged.step}",
        f"root/{logged.step}",
        f"./root/{logged.step}",
    ]


def names_of_the_model(logged: Logged) -> list[str]:
    return ["models:/digits/1", "models:/digits@champion", f"models:/{logged.model}", f"runs:/{logged.base}/model"]


# --- checkpoints


@pytest.mark.long
@pytest.mark.parametrize("command", ["show", "explain", "lineage"])
def test_a_run_is_named_by_its_name_its_id_a_beginning_or_a_uri(
    tensorcas: Tensorcas, logged: Logged, command: str
) -> None:
    for nth, place in enumerate(([], ["--root", str(logged.root)], ["--root", "vision"])):
        for mth, word in enumerate(names_of_the_base(logged)):
            words = [word] if (nth + mth) % 2 == 0 else ["--run", word]  # each name and each place in both ways
            done = tensorcas(command, *words, *place, "--json")
            shown = done.json["model" if command == "lineage" else "checkpoint"]

            assert (done.status, shown["run_id"], shown["step"]) == (0, logged.base, N_STEPS), done.err


def test_one_checkpoint_is_named_by_its_uri_or_its_path(tensorcas: Tensorcas, logged: Logged) -> None:
    for word in names_of_its_second_step(logged):
        shown = tensorcas("show", word, "--json").json["checkpoint"]

        assert (shown["run_id"], shown["step"], shown["model_id"]) == (logged.base, 2, None)
    for word in (logged.step, f"refs/artifacts/{logged.base}/artifacts/checkpoints/checkpoint/@step-00000002.arrow"):
        assert tensorcas("show", word, "--root", "root", "--json").json["checkpoint"]["step"] == 2


def test_a_model_is_named_by_version_alias_or_id(tensorcas: Tensorcas, logged: Logged) -> None:
    for word in names_of_the_model(logged):
        for place in ([], ["--root", str(logged.root)]):
            assert tensorcas("show", word, *place, "--json").json["checkpoint"]["model_id"] == logged.model
    for place in ([], ["--root", "root"]):
        assert tensorcas("show", logged.model, *place, "--json").json["checkpoint"]["model_id"] == logged.model


def test_diff_export_and_delete_take_names(tensorcas: Tensorcas, logged: Logged, tmp_path: Path) -> None:
    same = tensorcas("diff", "base", logged.base[:8], "--step", "2", "--json")
    other = tensorcas("diff", "models:/digits@champion", f"runs:/{logged.twins[0]}", "--json")
    written = tensorcas("export", "base", "--step", "1", tmp_path / "out.npz")
    deleted = tensorcas("delete", "base", "--step", "1", "--yes", "--json")
    alone = tensorcas("delete", names_of_its_second_step(logged)[0], "--yes", "--json")

    assert (same.status, other.status, written.status) == (0, 5, 0)
    assert (other.json["before"]["model_id"], other.json["after"]["run_id"]) == (logged.model, logged.twins[0])
    with np.load(tmp_path / "out.npz") as arrays:
        assert np.array_equal(arrays["w"], np.arange(5000.0) * 0 + 1)
    assert [each["step"] for done in (deleted, alone) for each in done.json["checkpoints"]] == [1, 2]


def test_delete_of_a_run_without_a_step_is_refused(tensorcas: Tensorcas, logged: Logged) -> None:
    before = len(Store.open(logged.root).checkpoints())
    done = tensorcas("delete", "base", "--yes")

    assert (done.status, "give --step as well" in done.err) == (2, True)
    assert len(Store.open(logged.root).checkpoints()) == before


def test_delete_says_how_many_bytes_a_collection_frees(tensorcas: Tensorcas, logged: Logged) -> None:
    done = tensorcas("delete", "base", "--step", "1", typed="y\n")
    tensorcas("gc", "vision", "--yes", "--max-waste", "0", "--grace", "0")

    assert "? A collection then frees up to " in done.err
    assert " frees 0 B" not in done.err


# --- stores


COMMANDS = [
    ["list"],
    ["stats"],
    ["du"],
    ["verify"],
    ["gc", "--dry-run"],
    ["repair", "--dry-run"],
    ["optimize", "--dry-run"],
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_store_is_named_by_an_experiment_a_run_or_a_model(
    tensorcas: Tensorcas, logged: Logged, command: list[str]
) -> None:
    words = ["vision", mlflow.get_experiment_by_name("vision").experiment_id, "base", *names_of_the_model(logged)]  # type: ignore[union-attr]
    for nth, word in enumerate([*words, f"runs:/{logged.base}", f"tensorcas://{logged.root}/below"]):
        # Each command takes both ways, and each name is taken in both.
        place = [word] if (nth + COMMANDS.index(command)) % 2 == 0 else ["--root", word]
        done = tensorcas(*command, *place, "--json")

        assert (done.status, done.json["store"]) == (0, Store.open(logged.root).uri), done.err


def test_a_run_as_a_place_limits_the_listing_to_it(tensorcas: Tensorcas, logged: Logged) -> None:
    listed = tensorcas("list", f"runs:/{logged.base}", "--json").json["runs"]
    shares = tensorcas("du", "base", "--json").json["shares"]

    assert [run["run_id"] for run in listed] == [share["run_id"] for share in shares] == [logged.base]


def test_copy_and_import_take_names(tensorcas: Tensorcas, logged: Logged, tmp_path: Path) -> None:
    write(ArrayTensors({"w": np.ones(3)}), tmp_path / "file.npz")
    copied = tensorcas("copy", "vision", tmp_path / "copy", "--run", "base")
    imported = tensorcas("import", tmp_path / "file.npz", "--run", "base", "--step", "9", "--json")

    assert copied.status == 0, copied.out
    assert {ref.run_id for ref in Store.open(tmp_path / "copy").checkpoints()} == {logged.base}
    assert imported.json["checkpoint"]["run_id"] == logged.base
    assert imported.json["store"] == Store.open(logged.root).uri


def test_adopt_takes_names_of_experiments_and_runs(tensorcas: Tensorcas, logged: Logged, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    with active_experiment("plain", plain.as_uri()), mlflow.start_run(run_name="old") as run:
        (tmp_path / "weights.bin").write_bytes(np.random.default_rng(0).bytes(100_000))
        mlflow.log_artifact(str(tmp_path / "weights.bin"))
    done = tensorcas("adopt", "plain", "--run", "old", "--yes", "--tracking-uri", logged.uri, "--json")

    assert [folder["path"] for folder in done.json["plan"]["folders"]] == [f"{run.info.run_id}/artifacts"]
    assert done.json["report"]["n_units"] == 1


def test_adopt_finds_the_database_above_the_artifact_root(tensorcas: Tensorcas, logged: Logged) -> None:
    folder = logged.root.parent / "mlruns" / "7"
    with active_experiment("default place", folder.as_uri()), mlflow.start_run() as run:
        mlflow.log_text("text", "a.txt")
    done = tensorcas("adopt", "default place", "--dry-run", "--json")
    shutil.rmtree(folder.parent)

    assert [each["path"] for each in done.json["plan"]["folders"]] == [f"{run.info.run_id}/artifacts"]


@pytest.mark.parametrize("words", [[], ["--revert"], ["--dry-run"]])
def test_adopt_refuses_a_folder_that_does_not_exist_before_it_asks(tensorcas: Tensorcas, words: list[str]) -> None:
    done = tensorcas("adopt", "/nowhere/mlruns", *words, typed="y\n")

    assert done.status == 1
    assert done.err.startswith("tensorcas: error: there is no folder '/nowhere/mlruns'")


# --- listings


def test_list_shows_the_names_that_mlflow_knows(tensorcas: Tensorcas, logged: Logged) -> None:
    done = tensorcas("list", "--root", "root")
    [base, *_] = tensorcas("list", "--root", "root", "--json").json["runs"]

    assert f"run {logged.base}  base, of vision\n" in done.out
    assert (base["run_name"], base["experiment"]) == ("base", "vision")


def test_list_works_without_a_tracking_store_that_answers(
    tensorcas: Tensorcas, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    done = tensorcas("list", "--root", "root")

    assert done.status == 0
    assert f"run {logged.base}\n" in done.out
    assert "runs are listed without names" in done.err
    assert len(done.err.splitlines()) == 1


# --- errors


def test_a_database_that_does_not_exist_is_an_error_and_is_not_made(
    tensorcas: Tensorcas, logged: Logged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{missing}")
    shown = tensorcas("show", "base")
    listed = tensorcas("list", "--root", "root")
    by_uri = [tensorcas("show", word) for word in ("models:/digits/1", f"runs:/{logged.base}")]
    monkeypatch.chdir(tmp_path)
    by_id = tensorcas("show", logged.model)

    assert [done.status for done in (*by_uri, by_id)] == [1, 1, 1]
    assert shown.status == 1
    assert f"could not read 'sqlite:///{missing}': there is no such database" in shown.err
    assert listed.status == 0
    assert "runs are listed without names" in listed.err
    assert not missing.exists()


def test_a_name_of_several_runs_is_refused_with_all_of_them(tensorcas: Tensorcas, logged: Logged) -> None:
    for words in (["show"], ["list"], ["delete", "--step", "1", "--yes"], ["explain", "--root", "root"]):
        done = tensorcas(*words, "twin")

        assert done.status == 1
        assert "2 runs are named 'twin': give the id of one of " in done.err
        for run_id in logged.twins:
            assert f"{run_id} (of 'vision', 20" in done.err
        assert logged.base not in done.err


def test_an_unknown_name_is_answered_by_the_one_that_was_meant(tensorcas: Tensorcas, logged: Logged) -> None:
    shown = tensorcas("show", "bsae")
    listed = tensorcas("list", "visoin")

    assert (shown.status, listed.status) == (1, 1)
    assert "MLflow knows no run 'bsae'" in shown.err
    assert "did you mean 'base'?" in shown.err
    assert "MLflow knows no experiment or run of this name" in listed.err
    assert "did you mean 'vision'?" in listed.err


@pytest.mark.parametrize("word", ["models:/digits/9", "models:/nobody@champion", "runs:/" + "0" * 32, "models:/x"])
def test_a_uri_that_mlflow_does_not_know_is_an_error_in_one_line(
    tensorcas: Tensorcas, logged: Logged, word: str
) -> None:
    for command in ("show", "list", "lineage"):
        done = tensorcas(command, word)

        assert (done.status, done.out) == (1, "")
        assert len(done.err.splitlines()) == 1
        assert word.removeprefix("runs:/") in done.err


def test_a_run_with_nothing_in_the_store_is_reported_with_its_place(
    tensorcas: Tensorcas, logged: Logged, tmp_path: Path
) -> None:
    Store.init(tmp_path / "other")
    done = tensorcas("show", "base", "--root", tmp_path / "other")

    assert done.status == 1
    assert f"{logged.base} (of 'vision', " in done.err
    assert "has its artifacts at 'tensorcas:" in done.err


def test_a_uri_of_mlflow_needs_a_tracking_store(tensorcas: Tensorcas, tmp_path: Path, no_stray_settings: None) -> None:
    (tmp_path / "alone").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "alone")
        done = tensorcas("show", "models:/digits@champion")

    assert done.status == 1
    assert "only MLflow knows 'models:/digits@champion': name its tracking store in MLFLOW_TRACKING_URI" in done.err
    assert list((tmp_path / "alone").iterdir()) == []


# --- the two ways to ask


def test_the_tables_of_a_database_answer_as_mlflow_does(logged: Logged, tmp_path: Path) -> None:
    quick, slow = open_directory(logged.uri), _MlflowDirectory(logged.uri)
    mlflow.delete_run(logged.twins[0])
    experiment = mlflow.create_experiment("it's", artifact_location=f"{tmp_path}/x")
    mlflow.MlflowClient().create_run(experiment, run_name="it's")

    assert type(quick) is not type(slow)
    for word in (
        "base",
        "twin",
        "it's",
        "nobody",
        "\udc80",
        logged.base,
        logged.base[:6],
        logged.twins[0],
        "both ' and \"",
    ):
        assert quick.runs(word) == slow.runs(word)
    for word in ("vision", "it's", "0", experiment, "99", "nobody", "\udc80"):
        assert quick.experiments(word) == slow.experiments(word)
    ids = [logged.base, *logged.twins, "0" * 32, "no id", "\udc80"]
    assert quick.runs_of(ids) == slow.runs_of(ids)
    assert set(quick.runs_of(ids)) == {logged.base, *logged.twins}
    assert quick.names() == slow.names()
    mlflow.MlflowClient().restore_run(logged.twins[0])


@pytest.mark.long
def test_a_database_with_other_tables_is_left_to_mlflow(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"")

    assert isinstance(open_directory(f"sqlite:///{tmp_path}/mlflow.db"), _MlflowDirectory)
