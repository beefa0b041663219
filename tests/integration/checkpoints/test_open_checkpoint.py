"""Whatever MLflow has that holds tensors is opened by its URI."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.exceptions import MlflowException
from safetensors.numpy import save_file

from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tests.reader.checkpoints import moe, same

STATE = moe()


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2))


def arrays(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def log_steps(*steps: int, name: str = "checkpoint") -> str:
    run = mlflow.active_run() or mlflow.start_run()
    for step in steps:
        mlflow.tensorcas.log_checkpoint({**STATE, "step": np.full(100, step)}, step=step, name=name)
    return run.info.run_id


def step_of(reader: object) -> int:
    return int(reader.tensor("step")[0])


def test_a_step_of_a_run_is_opened_by_any_name(experiment: str) -> None:
    run_id = log_steps(1, 2, 10)

    for uri in (run_id, f"runs:/{run_id}", None):
        assert step_of(mlflow.tensorcas.open_checkpoint(uri)) == 10
        assert step_of(mlflow.tensorcas.open_checkpoint(uri, step=2)) == 2
    mlflow.end_run()
    assert step_of(mlflow.tensorcas.open_checkpoint(step=1)) == 1
    reader = mlflow.tensorcas.open_checkpoint(f"runs:/{run_id}/checkpoints/checkpoint/step-00000002.arrow")
    assert step_of(reader) == 2
    assert same(reader.expert(1, 1), {name: array for name, array in STATE.items() if ".1.mlp.experts.1." in name})


def local(uri: str) -> str:
    return uri.removeprefix("tensorcas:").removeprefix("file://")


def test_step_is_named_by_the_place_of_its_artifact(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlflow.start_run() as run:
        log_steps(1, 2)
    leaf = "checkpoints/checkpoint/step-00000001.arrow"
    place, uri = f"{local(run.info.artifact_uri)}/{leaf}", f"{run.info.artifact_uri}/{leaf}"
    monkeypatch.chdir(Path(place).parents[4])
    relative = os.path.relpath(place)
    mlflow.set_tracking_uri(f"sqlite:///{Path(place).parents[5] / 'another.db'}")  # the place alone names the step

    for source in (uri, place, Path(place), relative, *([] if uri.startswith("tensorcas") else [f"file://{place}"])):
        assert step_of(mlflow.tensorcas.open_checkpoint(source)) == 1
        assert mlflow.tensorcas.load_checkpoint(source)["step"][0] == 1
        assert mlflow.tensorcas.safe_open(source).get_tensor("step")[0] == 1
        assert mlflow.tensorcas.diff(source, place).is_equal
    with pytest.raises(MlflowException, match="is step 1, and step=2 was given"):
        mlflow.tensorcas.load_checkpoint(place, step=2)
    with pytest.raises(MlflowException, match="at step 9; there are steps 1, 2"):
        mlflow.tensorcas.open_checkpoint(place.replace("step-00000001", "step-00000009"))


def test_copy_of_a_manifest_is_opened_in_its_store_alone(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run() as run:
        log_steps(1, 2)
    folder = Path(local(mlflow.get_run(run.info.run_id).info.artifact_uri), "checkpoints/checkpoint")
    (tmp_path / "a").mkdir()
    copied = Path(
        mlflow.artifacts.download_artifacts(str(folder / "step-00000001.arrow"), dst_path=str(tmp_path / "a"))
    )

    with pytest.raises(MlflowException, match=r"is the manifest of a checkpoint.*no store is there: name the run"):
        mlflow.tensorcas.open_checkpoint(copied)
    Store.init(tmp_path / "a")
    with pytest.raises(MlflowException, match="is another one"):
        mlflow.tensorcas.open_checkpoint(copied)
    monkeypatch.setenv("TENSORCAS_STORE", str(Store.find(str(folder))[0].uri))
    assert step_of(mlflow.tensorcas.open_checkpoint(copied)) == 1
    with pytest.raises(MlflowException, match="2 files in 'checkpoint' hold tensors"):
        mlflow.tensorcas.open_checkpoint(folder)


@pytest.mark.parametrize("source", ["models:/m/1", "/no/such/file.npz", "runs:/abc/model", "tensorcas:///data/x.npz"])
def test_load_of_something_other_than_a_checkpoint_says_what_reads_it(experiment: str, source: str) -> None:
    with pytest.raises(MlflowException, match="is no run and no checkpoint of one: open_checkpoint reads models"):
        mlflow.tensorcas.load_checkpoint(source)


def test_a_series_is_opened_by_its_name(experiment: str) -> None:
    log_steps(1)
    run_id = log_steps(5, name="ema")

    assert step_of(mlflow.tensorcas.open_checkpoint(run_id, name="ema")) == 5


def test_series_that_the_source_does_not_have_is_refused(experiment: str, tmp_path: Path) -> None:
    run_id = log_steps(1, name="ema")
    save_file(STATE, tmp_path / "model.safetensors")

    assert step_of(mlflow.tensorcas.open_checkpoint(f"runs:/{run_id}/checkpoints/ema/step-00000001.arrow")) == 1
    with pytest.raises(MlflowException, match="of the series 'ema', and name='raw' was given"):
        mlflow.tensorcas.open_checkpoint(f"runs:/{run_id}/checkpoints/ema/step-00000001.arrow", name="raw")
    with pytest.raises(MlflowException, match="only runs have series"):
        mlflow.tensorcas.open_checkpoint(tmp_path / "model.safetensors", name="ema")


def test_a_save_in_the_background_is_waited_for(experiment: str) -> None:
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint(STATE, step=1, blocking=False)

        assert same(mlflow.tensorcas.open_checkpoint(run.info.run_id, step=1).full(), STATE)


@pytest.mark.long
def test_a_logged_model_is_opened(experiment: str) -> None:
    model = module()
    with mlflow.start_run() as run:
        info = mlflow.tensorcas.log_model(model, name="model", pip_requirements=[])

    for uri in (info.model_uri, f"runs:/{run.info.run_id}/model"):
        with mlflow.tensorcas.open_checkpoint(uri) as reader:
            assert same(reader.full(), arrays(model))
            assert same(reader.layer(2), {name: array for name, array in arrays(model).items() if name[0] == "2"})


def test_a_folder_that_brings_its_tensors_is_opened(experiment: str, tmp_path: Path) -> None:
    model = module()
    mlflow.tensorcas.save_model(model, tmp_path / "model", pip_requirements=[])

    assert same(mlflow.tensorcas.open_checkpoint(tmp_path / "model").full(), arrays(model))
    assert same(
        mlflow.tensorcas.open_checkpoint(tmp_path / "model/data/checkpoint.tensors").full(),
        arrays(model),
    )


@pytest.mark.long
def test_a_model_of_mlflows_own_flavor_is_opened(experiment: str) -> None:
    model = module()
    with mlflow.start_run() as run:
        info = mlflow.pytorch.log_model(model, name="plain", pip_requirements=[], serialization_format="pickle")

    for uri in (info.model_uri, f"runs:/{run.info.run_id}/plain/data/model.pth", f"runs:/{run.info.run_id}/plain"):
        reader = mlflow.tensorcas.open_checkpoint(uri)
        assert same(reader.full(), arrays(model))
        assert reader.get_slice("0.weight")[3:5].tobytes() == arrays(model)["0.weight"][3:5].tobytes()


def test_a_file_below_a_location_of_ours_is_opened_by_its_place(cas_experiment: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.arange(1000.0), tiny=np.arange(2))
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(tmp_path / "a.npz"), "files")
        uri = mlflow.get_artifact_uri("files/a.npz")

    assert uri.startswith("tensorcas:")
    for place in (uri, uri.removeprefix("tensorcas://"), f"runs:/{run.info.run_id}/files"):
        reader = mlflow.tensorcas.open_checkpoint(place)
        assert list(reader) == ["w", "tiny"]
        assert reader.tensor("tiny").tolist() == [0, 1]
        assert reader.digest() == mlflow.tensorcas.open_checkpoint(tmp_path / "a.npz").digest()


def test_folder_with_several_files_of_tensors_needs_the_name_of_one(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        for name in ("a", "b"):
            np.savez(tmp_path / f"{name}.npz", w=np.arange(1000.0))
            mlflow.log_artifact(str(tmp_path / f"{name}.npz"), "files")
        mlflow.log_text("no tensors", "files/notes.txt")

    assert list(mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/files/a.npz")) == ["w"]
    with pytest.raises(MlflowException, match=r"2 files .*a\.npz"):
        mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/files")
    with pytest.raises(MlflowException):
        mlflow.tensorcas.open_checkpoint(f"runs:/{run.info.run_id}/files/notes.txt")


def test_a_file_of_this_machine_is_opened(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")

    reader = mlflow.tensorcas.open_checkpoint(tmp_path / "model.safetensors")

    assert reader.digest() == mlflow.tensorcas.open_checkpoint(str(tmp_path / "model.safetensors")).digest()
    assert same({name: reader.tensor(name) for name in STATE}, STATE)
    assert list(mlflow.tensorcas.open_checkpoint(tmp_path).expert(0, 0)) == [
        name for name in reader if ".0.mlp.experts.0." in name
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"source": "0" * 32}, "not found"),
        ({"source": "models:/m-00000000000000000000000000000000"}, "not found"),
        ({"source": "/nowhere/model.safetensors"}, "nowhere"),
        ({"source": "models:/m-00000000000000000000000000000000", "step": 3}, "only runs have steps"),
    ],
)
def test_a_source_that_is_not_there_is_an_error(cas_experiment: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(MlflowException, match=reason):
        mlflow.tensorcas.open_checkpoint(**arguments)


def test_a_path_that_is_not_there_is_an_error_of_mlflow_and_of_files(tmp_path: Path) -> None:
    for opens in (mlflow.tensorcas.open_checkpoint, mlflow.tensorcas.safe_open):
        with pytest.raises(FileNotFoundError, match=r"absent\.safetensors") as caught:
            opens(tmp_path / "absent.safetensors")
        assert isinstance(caught.value, MlflowException)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.error_code) == (str(caught.value), "RESOURCE_DOES_NOT_EXIST")


def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "model.npz", w=np.zeros(3))
    monkeypatch.chdir(tmp_path)

    assert list(mlflow.tensorcas.open_checkpoint(".")) == ["w"]
    with pytest.raises(MlflowException, match="empty"):
        mlflow.tensorcas.open_checkpoint("")


def test_a_name_that_no_file_can_have_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        mlflow.tensorcas.open_checkpoint("n" * 300)


def test_a_folder_of_very_many_files_is_not_searched(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", w=np.zeros(3))
    for number in range(999):
        (tmp_path / str(number)).touch()
    assert list(mlflow.tensorcas.open_checkpoint(tmp_path)) == ["w"]
    (tmp_path / "one more").touch()

    with pytest.raises(MlflowException, match="more files than are tried"):
        mlflow.tensorcas.open_checkpoint(tmp_path)


def test_a_path_may_be_of_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", w=np.zeros(3))

    assert list(mlflow.tensorcas.open_checkpoint(os.fsencode(tmp_path / "model.npz"))) == ["w"]


def test_a_step_that_is_not_there_is_an_error_that_says_which_are(experiment: str) -> None:
    run_id = log_steps(1, 2)

    with pytest.raises(MlflowException, match="steps 1, 2"):
        mlflow.tensorcas.open_checkpoint(run_id, step=3)


def test_checkpoints_of_any_two_kinds_are_compared(experiment: str) -> None:
    run_id = log_steps(1, 2)
    with mlflow.start_run(nested=True) as other:
        mlflow.tensorcas.log_checkpoint(STATE, step=7)

    found = mlflow.tensorcas.diff((run_id, 1), (run_id, 2), values=True)
    assert (found.changed, len(found.equal)) == (("step",), len(STATE))
    assert found.values["step"].max_absolute == 1
    found = mlflow.tensorcas.diff(other.info.run_id, mlflow.tensorcas.open_checkpoint(run_id, step=2))
    assert (found.added, found.changed, len(found.equal)) == (("step",), (), len(STATE))


def test_code_for_safetensors_reads_from_a_run(experiment: str) -> None:
    run_id = log_steps(1)

    with mlflow.tensorcas.safe_open(run_id, framework="pt", device="cpu", step=1) as file:
        assert set(file.keys()) == {*STATE, "step"}
        assert file.get_slice("model.embed_tokens.weight")[5].shape == (64,)


def test_options_of_code_for_safetensors_are_accepted(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", w=np.zeros(3))
    with mlflow.tensorcas.safe_open(filename=tmp_path / "model.npz", framework="np", backend="pread") as file:
        assert file.get_tensors().keys() == {"w"}

    with pytest.raises(MlflowException, match="'mmap' or 'pread'"):
        mlflow.tensorcas.safe_open(tmp_path / "model.npz", backend="io_uring")


def test_folder_with_damage_is_refused_and_no_other_file_of_it_is_opened(tmp_path: Path) -> None:
    write_payload(tmp_path, STATE, flavor="pytorch")
    os.truncate(tmp_path / PAYLOAD_FILE, 5000)
    np.savez(tmp_path / "other.npz", w=np.arange(10.0))

    with pytest.raises(MlflowException, match="damaged"):
        mlflow.tensorcas.open_checkpoint(tmp_path)


def test_shard_of_a_checkpoint_is_not_opened_alone(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"layers.{number}.w": np.ones(100)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    assert len(mlflow.tensorcas.open_checkpoint(tmp_path)) == 2
    os.truncate(tmp_path / "model-00002-of-00002.safetensors", 200)

    with pytest.raises(MlflowException, match="model-00002-of-00002"):
        mlflow.tensorcas.open_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MlflowException, match="model-00002-of-00002"):
        mlflow.tensorcas.open_checkpoint(tmp_path)


def test_file_beside_a_damaged_one_is_not_opened_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "encoder.npz", w=np.arange(10.0))
    np.savez(tmp_path / "decoder.npz", w=np.arange(10.0))
    os.truncate(tmp_path / "decoder.npz", 200)

    with pytest.raises(MlflowException, match=r"decoder\.npz"):
        mlflow.tensorcas.open_checkpoint(tmp_path)


def test_folder_with_one_unreadable_file_raises_the_error_of_that_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", w=np.arange(10.0))
    os.truncate(tmp_path / "model.npz", 200)

    with pytest.raises(MlflowException, match=r"model\.npz"):
        mlflow.tensorcas.open_checkpoint(tmp_path)


@pytest.mark.long
def test_a_tensor_that_only_torch_has_is_named_as_left_out_wherever_it_was_logged(
    experiment: str, tmp_path: Path
) -> None:
    state = {"h": torch.arange(8, dtype=torch.uint8).view(torch.complex32), "w": torch.ones(2)}
    with mlflow.start_run():
        checkpoint = mlflow.tensorcas.log_checkpoint(state, step=1)
        model = mlflow.tensorcas.log_model(state, name="model")
    mlflow.tensorcas.save_model(state, tmp_path / "saved")

    for uri in (checkpoint.uri, model.model_uri, tmp_path / "saved"):
        with mlflow.tensorcas.open_checkpoint(uri) as reader:
            assert (list(reader), dict(reader.left_out)) == (["w"], {"h": "complex32"}), uri
    assert mlflow.tensorcas.load_checkpoint(checkpoint.uri, weights_only=True)["h"].dtype == torch.complex32


def test_lineage_of_a_run_names_the_run_it_was_made_from(experiment: str) -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, (200, 200)).astype(np.float32)
    with mlflow.start_run() as parent:
        mlflow.tensorcas.log_checkpoint({"layer.weight": weights}, step=7)
    with mlflow.start_run() as child:
        mlflow.tensorcas.log_checkpoint({"base_model.model.layer.weight": weights.astype(np.float16)}, step=1)
    found = mlflow.tensorcas.lineage(child.info.run_id)

    assert found.parent is not None
    assert (found.parent.run_id, found.parent.step, found.parent.kind) == (parent.info.run_id, 7, "cast")
    assert mlflow.tensorcas.lineage(parent.info.run_id).parent is None


def test_lineage_of_a_file_outside_of_stores_is_refused(tmp_path: Path) -> None:
    save_file({"w": np.zeros(5000, np.float32)}, tmp_path / "model.safetensors")

    with pytest.raises((MlflowException, ValueError), match="lies in no store"):
        mlflow.tensorcas.lineage(tmp_path / "model.safetensors")
