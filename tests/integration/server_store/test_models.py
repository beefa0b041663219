"""Models logged through a server that knows nothing of this package: deduplicated, whole, and readable without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import xgboost
from mlflow.exceptions import MlflowException
from sklearn.ensemble import RandomForestClassifier

from tensorcas_mlflow.cli import main
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import verify
from tests.deploy.servers import environment, free_port
from tests.integration.server_store.conftest import Experiment

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(400, 800), torch.nn.ReLU(), torch.nn.Linear(800, 400))


def log(model: Any, **options: Any) -> Any:
    return mlflow.tensorcas.log_model(model, name="model", pip_requirements=[], **options)


def payload_bytes(model: torch.nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


@pytest.mark.long
def test_a_torch_model_comes_back_bit_for_bit(carried: Experiment) -> None:
    model = network()
    info = log(model, step=1)
    loaded = mlflow.tensorcas.load_model(info.model_uri)

    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert mlflow.models.Model.load(info.model_uri).flavors["tensorcas"]["store"] == carried.uri


@pytest.mark.long
def test_an_estimator_predicts_the_same_through_pyfunc(carried: Experiment) -> None:
    model = RandomForestClassifier(n_estimators=5, random_state=0).fit(X, Y)
    info = log(model)

    assert (mlflow.pyfunc.load_model(info.model_uri).predict(X) == model.predict(X)).all()


def test_a_booster_comes_back_byte_for_byte(carried: Experiment) -> None:
    model = xgboost.train({"max_depth": 2}, xgboost.DMatrix(X, label=Y), num_boost_round=3)
    info = log(model)

    assert mlflow.tensorcas.load_model(info.model_uri).save_raw("ubj") == model.save_raw("ubj")


@pytest.mark.long
def test_carried_registered_version_loads(carried: Experiment) -> None:
    model = network()
    log(model, registered_model_name=f"carried-{carried.id}")
    loaded = mlflow.tensorcas.load_model(f"models:/carried-{carried.id}/1")

    assert torch.equal(loaded[0].weight, model[0].weight)


@pytest.mark.long
def test_figures_of_a_carried_model_and_checkpoint_are_logged(carried: Experiment) -> None:
    with mlflow.start_run() as run:
        info = log(network(5), step=3)
        mlflow.tensorcas.log_checkpoint(network(6), step=3)
    mlflow.tensorcas.wait()
    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics

    assert metrics["tensorcas/new_bytes"] >= payload_bytes(network(6))
    assert metrics["tensorcas/stored_bytes"] > payload_bytes(network(6)) / 2
    tags = mlflow.MlflowClient().get_logged_model(info.model_id).tags
    assert int(tags["tensorcas.new_bytes"]) >= payload_bytes(network(5))
    assert int(tags["tensorcas.stored_bytes"]) > payload_bytes(network(5)) / 2


@pytest.mark.long
def test_carried_model_loads_in_another_process(carried: Experiment) -> None:
    info = log(network(3))
    code = "import sys, mlflow; print(mlflow.tensorcas.load_model(sys.argv[1])[0].weight.detach().sum().item())"
    command = [sys.executable, "-c", code, info.model_uri]
    settings = environment(plugin=True, MLFLOW_TRACKING_URI=carried.server.uri)
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == network(3)[0].weight.detach().sum().item()


def test_a_model_whose_server_is_gone_says_where_its_store_is(
    carried: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mlflow.artifacts.download_artifacts(log(network()).model_uri, dst_path=str(tmp_path))
    store_id = carried.store().id
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    gone = f"http://127.0.0.1:{free_port()}"
    mlflow.set_tracking_uri(gone)

    with pytest.raises(MlflowException, match=f"in store {store_id}, and its place '{carried.uri}'") as caught:
        mlflow.tensorcas.load_model(folder)
    assert gone in str(caught.value)
    assert caught.value.error_code == "TEMPORARILY_UNAVAILABLE"


@pytest.mark.long
def test_ten_identical_models_cost_little_more_than_one(carried: Experiment) -> None:
    model = network()
    with mlflow.start_run():
        for step in range(10):
            log(model, step=step)

    assert carried.n_bytes() <= 0.11 * 10 * payload_bytes(model)


@pytest.mark.long
def test_ten_half_frozen_models_cost_at_most_six_tenths(carried: Experiment) -> None:
    model = network()
    with mlflow.start_run():
        for step in range(10):
            with torch.no_grad():
                model[2].weight.copy_(torch.randn_like(model[2].weight))
            log(model, step=step)

    assert carried.n_bytes() <= 0.6 * 10 * payload_bytes(model)


@pytest.mark.long
def test_servers_folder_opens_as_an_ordinary_store(carried: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    info = log(model)
    store = carried.store()
    [ref] = store.checkpoints()

    assert verify(store, full=True).problems == ()
    assert (store.read_tensors(store.manifest(ref))["0.weight"] == model[0].weight.detach().numpy()).all()
    assert ref.copy_path == f"models/{info.model_id}/artifacts/data/checkpoint.arrow"
    assert main(["list", "--root", str(carried.folder)]) == 0
    assert main(["list", "--root", carried.uri]) == 0
    assert capsys.readouterr().out.count(f"model {info.model_id}") == 2


@pytest.mark.long
def test_direct_and_carried_saves_share_chunks(carried: Experiment) -> None:
    model = network()
    log(model)
    weights = {"w": model[0].weight.detach().numpy(), "v": network(1)[0].weight.detach().numpy()}
    with carried.store().write_checkpoint(weights) as save:
        new_bytes = save.n_new_bytes
        save.commit(RefTarget(run_id="run", step=1))
    with mlflow.start_run():
        info = mlflow.tensorcas.log_checkpoint({"v": weights["v"]}, step=1)

    assert new_bytes == weights["v"].nbytes
    assert info.new_bytes < 2_000


@pytest.mark.long
def test_two_processes_make_one_store_and_save_at_once(carried: Experiment) -> None:
    code = (
        "import sys, mlflow, numpy as np\n"
        "mlflow.set_experiment(experiment_id=sys.argv[1])\n"
        "with mlflow.start_run() as run:\n"
        "    for step in range(4):\n"
        "        mlflow.tensorcas.log_checkpoint({'same': np.arange(50_000.), 'step': step}, step=step)\n"
        "print(run.info.run_id)\n"
    )
    settings = environment(plugin=True, MLFLOW_TRACKING_URI=carried.server.uri)
    command = [sys.executable, "-c", code, carried.id]
    processes = [
        subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=180) for process in processes]

    assert [process.returncode for process in processes] == [0, 0], told
    for out, _ in told:
        for step in range(4):
            state = mlflow.tensorcas.load_checkpoint(out.split()[-1], step=step)
            assert state["step"] == step
            assert (state["same"] == np.arange(50_000.0)).all()
    assert verify(carried.store(), full=True).problems == ()
    assert not list((carried.folder / ".tensorcas/intents").iterdir())
