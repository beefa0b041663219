"""``copy``: what it says, what it ends with, and what it chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Root, open_bucket
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs

Tensorcas = Callable[..., Any]

RUN = "8" * 32
MODEL = f"m-{'9' * 32}"


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def save(store: Store, value: float, **target: Any) -> None:
    with store.write_checkpoint({"w": np.full((10, 3), value)}) as pending:
        pending.commit(RefTarget(**target))


def write(store: Store, path: str) -> None:
    root = Root.parse(store.uri)
    if not root.is_local:
        open_bucket(root, "").put(path, path.encode())
        return
    file = root.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(path)


def plain_files(root: Path) -> set[str]:
    found = (file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file())
    return {path for path in found if not path.startswith(".tensorcas/")}


def test_copy_makes_a_backup_and_reports_its_steps(tensorcas: Tensorcas, store: Store, backup: Path) -> None:
    write(store, "MLmodel")
    done = tensorcas("copy", store.uri, backup)

    assert done.status == 0
    made, refs, plain = done.out.splitlines()
    assert made == f"made a store of the same id, {store.id}, at {Store.open(backup).uri}"
    assert refs.startswith("copied 6 checkpoints and files, 0 there already; read")
    assert plain == "copied 1 plain file (7 B), 0 there already"
    assert done.err == ""
    assert tensorcas("verify", "--full", "--root", backup).status == 0


def test_a_second_copy_finds_everything_there(tensorcas: Tensorcas, store: Store, backup: Path) -> None:
    tensorcas("copy", store.uri, backup)
    done = tensorcas("copy", store.uri, backup, "--json")

    assert done.status == 0
    assert done.json == {
        "source": store.uri,
        "destination": Store.open(backup).uri,
        "made": False,
        "plan": None,
        "report": {"n_copied": 0, "n_there": 6, "read_bytes": 0, "written_bytes": 0},
        "plain": {"n_copied": 0, "bytes": 0, "n_there": 0, "skipped": []},
        "kept": [],
        "deleted": [],
        "failed": [],
    }


@pytest.mark.long
def test_copy_dry_run_prints_what_would_move_and_makes_nothing(
    tensorcas: Tensorcas, store: Store, backup: Path
) -> None:
    write(store, "MLmodel")
    told = tensorcas("copy", store.uri, backup, "--dry-run")
    found = tensorcas("copy", store.uri, backup, "--dry-run", "--json").json

    assert not backup.exists()
    assert told.out.splitlines()[0].startswith("would make a store of the same id")
    assert told.out.splitlines()[-1] == "to copy: 1 plain file (7 B), 0 there already"
    assert (found["made"], found["report"]) == (False, None)
    assert (found["plan"]["n_new"], found["plan"]["n_there"]) == (6, 0)
    tensorcas("copy", store.uri, backup)
    held = sum(size for _, size in list_packs(Store.open(backup).backend))
    assert 0 < found["plan"]["bytes"] < held


@pytest.mark.long
def test_copy_keeps_what_differs_at_the_destination_and_exits_with_4(
    tensorcas: Tensorcas, store: Store, backup: Path
) -> None:
    write(store, "MLmodel")
    other = Store.init(backup)
    save(other, 7, run_id="train", step=1)
    (backup / "MLmodel").write_text("another")
    done = tensorcas("copy", store.uri, backup)
    found = tensorcas("copy", store.uri, backup, "--json")

    assert (done.status, found.status) == (4, 4)
    assert "kept: run train step 1: the destination has another one" in done.out
    assert found.json["kept"] == ["run train step 1", "MLmodel"]
    assert tensorcas("copy", store.uri, backup, "--overwrite").status == 0
    assert (backup / "MLmodel").read_text() == "MLmodel"


def test_copy_reports_damage_and_exits_with_1(tensorcas: Tensorcas, store: Store, backup: Path) -> None:
    [ref] = [ref for ref in store.checkpoints() if ref.name == "ema"]
    shared = [each for each in store.checkpoints() if each.manifest[:64] == ref.manifest[:64]]
    for each in shared:
        store.backend.delete(f"manifests/{each.manifest}")
        store.backend.put_new(f"manifests/{each.manifest}", [b"damaged"])
    store.backend.put_new("refs/runs/train/@9", [b"damaged"])
    done = tensorcas("copy", store.uri, backup)
    found = tensorcas("copy", store.uri, backup, "--json")

    assert (done.status, found.status) == (1, 1)
    assert "failed: run other ema step 1" in done.out
    assert "refs/runs/train/@9" in [each["what"] for each in found.json["failed"]]
    assert found.json["report"]["n_there"] == 6 - len(shared)


# --- what is chosen


@pytest.fixture
def laid(tmp_path: Path) -> Store:
    """A store as MLflow lays artifacts: a run with a checkpoint and a model, and another run."""
    store = Store.init(tmp_path / "laid")
    save(store, 1, run_id=RUN, step=1, path=f"1/{RUN}/artifacts/checkpoints/step-1.arrow")
    save(store, 2, run_id=RUN, model_id=MODEL, path=f"1/models/{MODEL}/artifacts/data/checkpoint.arrow")
    save(store, 3, run_id="other", step=1, path="2/other/artifacts/checkpoints/step-1.arrow")
    for path in (
        f"1/{RUN}/artifacts/notes.txt",
        f"1/models/{MODEL}/artifacts/MLmodel",
        f"1/models/m-{'7' * 32}/artifacts/MLmodel",
        "2/other/artifacts/notes.txt",
        "readme.txt",
    ):
        write(store, path)
    return store


@pytest.mark.long
def test_copy_of_a_run_takes_its_models_and_their_plain_files(tensorcas: Tensorcas, laid: Store, backup: Path) -> None:
    done = tensorcas("copy", laid.uri, backup, "--run", RUN)

    assert done.status == 0
    assert {ref.run_id for ref in Store.open(backup).checkpoints()} == {RUN}
    assert plain_files(backup) == {f"1/{RUN}/artifacts/notes.txt", f"1/models/{MODEL}/artifacts/MLmodel"}


def test_copy_takes_several_runs_at_once(tensorcas: Tensorcas, laid: Store, backup: Path) -> None:
    tensorcas("copy", laid.uri, backup, "--run", RUN, "--run", "other")

    assert len(Store.open(backup).checkpoints()) == 3
    assert "2/other/artifacts/notes.txt" in plain_files(backup)


def test_copy_of_an_artifact_path_takes_everything_below_it(tensorcas: Tensorcas, laid: Store, backup: Path) -> None:
    tensorcas("copy", laid.uri, backup, "--path", "2/")

    assert [ref.run_id for ref in Store.open(backup).checkpoints()] == ["other"]
    assert plain_files(backup) == {"2/other/artifacts/notes.txt"}


def test_copy_of_an_unknown_run_is_an_error(tensorcas: Tensorcas, laid: Store, backup: Path) -> None:
    done = tensorcas("copy", laid.uri, backup, "--run", "nobody")

    assert done.status == 1
    assert "there is no checkpoint of run 'nobody'" in done.err
    assert not backup.exists()


# --- the rest


def test_copy_with_new_id_makes_a_store_with_its_own_id(tensorcas: Tensorcas, store: Store, backup: Path) -> None:
    done = tensorcas("copy", store.uri, backup, "--new-id")

    assert done.status == 0
    assert Store.open(backup).id != store.id
    assert tensorcas("verify", "--full", "--root", backup).status == 0


def test_copy_with_quiet_prints_no_progress(tensorcas: Tensorcas, store: Store, backup: Path) -> None:
    assert tensorcas("copy", store.uri, backup, "--quiet").err == ""


@pytest.mark.parametrize("words", [["copy"], ["copy", "a"], ["copy", "a", "b", "--root", "c"]])
def test_wrong_usage_of_copy_exits_with_2(tensorcas: Tensorcas, words: list[str]) -> None:
    assert tensorcas(*words).status == 2


def test_a_source_without_a_store_is_an_error_and_makes_nothing(
    tensorcas: Tensorcas, tmp_path: Path, backup: Path
) -> None:
    done = tensorcas("copy", tmp_path, backup)

    assert (done.status, done.out) == (1, "")
    assert not backup.exists()
