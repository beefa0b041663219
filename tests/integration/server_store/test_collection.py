"""Collection of a store that clients reach through a server: by direct access, and not while a save is under way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import mlflow
import numpy as np
import pytest
from click.testing import CliRunner
from mlflow.cli import gc as mlflow_gc
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import DirectAccessError, PendingSavesError
from tensorcas_mlflow.integration.forgotten import orphaned_refs
from tensorcas_mlflow.integration.server_store import find_carrier
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import PendingSave, Store
from tests.deploy.servers import environment
from tests.integration.server_store.conftest import Experiment
from tests.zygote import run_program

TENSORS = {"w": np.arange(20_000.0)}


def begin(experiment: Experiment) -> PendingSave:
    store, _ = find_carrier(experiment.uri, create=True)
    return store.write_checkpoint(TENSORS)


def intents(experiment: Experiment) -> list[Path]:
    return list((experiment.folder / ".tensorcas/intents").iterdir())


def test_a_collection_refuses_while_a_save_is_under_way_whatever_its_age(carried: Experiment) -> None:
    save = begin(carried)
    [intent] = intents(carried)
    os.utime(intent, (0, 0))

    with pytest.raises(PendingSavesError) as caught:
        plan_gc(carried.store(), grace_s=0)
    assert intent.name in str(caught.value)
    assert os.uname().nodename in str(caught.value)
    assert f"begun {time.gmtime().tm_year}" in str(caught.value)
    assert "--abandon" in str(caught.value)
    save.abandon()
    assert plan_gc(carried.store(), grace_s=0).execute().n_packs == 1


@pytest.mark.long
def test_a_save_that_is_dead_is_given_up_by_its_id(carried: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys, numpy as np, mlflow\n"
        "from tensorcas_mlflow.integration.server_store import find_carrier\n"
        "save = find_carrier(sys.argv[1], create=True)[0].write_checkpoint({'w': np.arange(20_000.)})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    settings = environment(plugin=True, MLFLOW_TRACKING_URI=carried.server.uri)
    done = run_program(code, carried.uri, env=settings, timeout=120)
    [intent] = intents(carried)
    root = str(carried.folder)

    assert done.returncode == -signal.SIGKILL
    assert main(["gc", "--root", root, "--yes"]) == 1
    assert "by a process that is gone" in capsys.readouterr().err
    assert main(["gc", "--root", root, "--yes", "--abandon", "0" * 32]) == 1
    assert intents(carried) == [intent]
    capsys.readouterr()
    assert main(["gc", "--root", root, "--yes", "--json", "--abandon", intent.name]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["n_withdrawn"], report["n_packs"]) == (1, 1)
    assert intents(carried) == []


@pytest.mark.long
def test_a_save_that_was_given_up_while_it_lived_begins_again(carried: Experiment) -> None:
    save = begin(carried)
    [intent] = intents(carried)
    plan_gc(carried.store(), grace_s=0, abandon=[intent.name]).execute()
    ref = save.commit(RefTarget(run_id="run", step=1))
    store = Store.open(carried.folder)

    assert (store.read_tensors(store.manifest(ref))["w"] == TENSORS["w"]).all()


def test_a_save_that_ends_is_no_hindrance(carried: Experiment) -> None:
    with begin(carried) as save:
        save.commit(RefTarget(run_id="run", step=1))

    assert plan_gc(carried.store(), grace_s=0).is_empty


def test_stand_in_of_a_checkpoint_is_never_shown_and_is_collected(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    ref = store.write_checkpoint(TENSORS).commit(RefTarget(run_id="run", step=1))
    left = f"refs/replacing/@{'0' * 32}"
    store.backend.put_new(left, [store.backend.get(ref.key)])
    store.backend.delete(ref.key)

    assert store.checkpoints() == []
    for grace_s in (3600, 0):
        assert store.backend.stat(left) is not None
        report = plan_gc(store, grace_s=grace_s).execute()
        assert report.n_packs == 0
    assert store.backend.stat(left) is None
    assert plan_gc(store, grace_s=0).execute().n_packs == 1


def test_a_collection_through_the_server_says_where_it_can_be_done(
    carried: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(carried).abandon()
    store, _ = find_carrier(carried.uri)

    with pytest.raises(DirectAccessError):
        plan_gc(store)
    assert main(["gc", "--root", carried.uri, "--yes"]) == 1
    assert "server's artifact folder" in capsys.readouterr().err


def test_files_that_a_server_left_half_written_are_no_blobs_and_are_swept(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put_new("refs/@a", [b"ref"])
    leftover = tmp_path / "refs/.artifact.uploading.k3x"
    leftover.write_bytes(b"half a ref")
    os.utime(leftover, (0, 0))

    assert [info.key for info in backend.list("refs")] == ["refs/@a"]
    assert backend.sweep(3600) == len(b"half a ref")
    assert not leftover.exists()


@pytest.mark.long
def test_direct_access_finds_runs_that_mlflow_gc_deleted_at_the_server(carried: Experiment) -> None:
    """The ref says where below the store's root MLflow keeps the copy, so it can be looked for there."""
    gone, kept = checkpoint(1), checkpoint(2)
    mlflow.delete_run(gone)
    before = orphaned_refs(carried.store(), grace_s=0)
    forget(carried, "--run-ids", gone)

    assert before == []
    assert [ref.run_id for ref in orphaned_refs(carried.store(), grace_s=0)] == [gone]
    assert main(["gc", "--root", str(carried.folder), "--orphans", "--yes", "--grace", "0"]) == 0
    assert [ref.run_id for ref in carried.store().checkpoints()] == [kept]
    assert (mlflow.tensorcas.load_checkpoint(kept)["w"] == np.arange(2_000.0)).all()


@pytest.mark.long
def test_a_model_of_an_experiment_that_mlflow_gc_deletes_goes_with_its_folder(
    carried: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id, model_id = checkpoint(1), log_model()
    collect = ["gc", "--root", str(carried.folder), "--orphans", "--yes", "--grace", "0"]
    mlflow.delete_experiment(carried.id)
    forget(carried, "--experiment-ids", carried.id)

    assert main(collect) == 0
    assert {ref.model_id for ref in carried.store().checkpoints()} == {model_id}
    assert main([*collect, "--tracking-uri", carried.server.uri, "--folder", "."]) == 1
    assert "MLflow keeps the artifacts in '.' in folders of its own: remove" in capsys.readouterr().err
    shutil.rmtree(carried.folder / "models" / model_id)
    assert main(collect) == 0

    assert not (carried.folder / run_id / "artifacts").exists()
    assert carried.store().checkpoints() == []


def checkpoint(step: int) -> str:
    """Log a checkpoint of a run, and give the run's id."""
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint({"w": np.arange(step * 1_000.0)}, step=step, log_metrics=False)
        mlflow.tensorcas.wait()
    return str(run.info.run_id)


def log_model() -> str:
    model = LinearRegression()
    model.coef_, model.intercept_ = np.arange(3_000.0), 0.0
    with mlflow.start_run():
        return str(mlflow.tensorcas.log_model(model, name="model", pip_requirements=[]).model_id)


def forget(experiment: Experiment, *words: str) -> None:
    """Run ``mlflow gc`` beside the server."""
    server = experiment.server
    options = ["--backend-store-uri", server.backend_store_uri, "--tracking-uri", server.uri]
    done = CliRunner().invoke(mlflow_gc, [*options, *words])
    assert done.exit_code == 0, done.output
