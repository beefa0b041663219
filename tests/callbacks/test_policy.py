"""The policy of a save, given beside its other options, and options that do not exist."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import xgboost
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from tensorcas_mlflow.callbacks import autolog
from tensorcas_mlflow.callbacks.sklearn import fit_with_checkpoints
from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback as XGBoostCallback
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.callbacks.loops import FEATURES, LABELS, PARAMETERS, data, make_module, make_trainer

AS_THEY_ARE_AND_TEXT = {0, 1}


def codecs(root: Path) -> set[int]:
    """Numbers of the codecs in a store."""
    backend = Store.open(root).backend
    return {int(codec) for name, _ in list_packs(backend) for codec in read_pack_table(backend, name)["codec"]}


def fit(**options: Any) -> None:
    network = MLPClassifier((64, 64), random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit_with_checkpoints(network, FEATURES, LABELS, steps=[2], parameter="max_iter", **options)


def boost(**options: Any) -> None:
    xgboost.train({**PARAMETERS, "max_depth": 4}, data(), 40, callbacks=[XGBoostCallback(**options)])


def boost_with_autolog(**options: Any) -> None:
    autolog(log_models=False, blocking=True, **options)
    xgboost.train({**PARAMETERS, "max_depth": 4}, data(), 40)


def lightning_callback(**options: Any) -> Any:
    from tensorcas_mlflow.callbacks.lightning import TensorCasCheckpoint

    return TensorCasCheckpoint(**options)


def transformers_callback(**options: Any) -> Any:
    from tensorcas_mlflow.callbacks.transformers import TensorCasCallback

    return TensorCasCallback(**options)


def fit_a_module(**options: Any) -> None:
    import lightning.pytorch

    module = make_module(lightning.pytorch)
    module.wide = torch.nn.Linear(64, 64)
    make_trainer(lightning.pytorch, Path("lightning"), max_epochs=1, callbacks=[lightning_callback(**options)]).fit(
        module
    )


def fit_a_language_model(**options: Any) -> None:
    import transformers

    from tests.callbacks.tokens import Tokens

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=64, n_positions=8, vocab_size=32)
    args = transformers.TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
    )
    model = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(model, args, train_dataset=Tokens(), callbacks=[transformers_callback(**options)]).train()


def storage_writer(**options: Any) -> Any:
    from tensorcas_mlflow.distributed import TensorCasStorageWriter

    return TensorCasStorageWriter(step=1, **options)


Train = Callable[..., None]
QUICK = [fit, boost, boost_with_autolog]
SLOW = [pytest.param(each, marks=pytest.mark.long) for each in (fit_a_module, fit_a_language_model)]


@pytest.mark.parametrize("train", [*QUICK, *SLOW])
def test_with_the_policy_fast_tensors_are_stored_as_they_are(train: Train, tmp_path: Path) -> None:
    with mlflow.start_run():
        train(policy="fast")

    assert codecs(tmp_path / "artifacts") <= AS_THEY_ARE_AND_TEXT


@pytest.mark.parametrize("train", [*QUICK, *SLOW])
def test_callback_without_a_policy_compresses_tensors_that_shrink(train: Train, tmp_path: Path) -> None:
    with mlflow.start_run():
        train()

    assert not codecs(tmp_path / "artifacts") <= AS_THEY_ARE_AND_TEXT


def test_environment_sets_the_policy_of_a_callback_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_POLICY", "fast")
    with mlflow.start_run():
        fit()

    assert codecs(tmp_path / "artifacts") <= AS_THEY_ARE_AND_TEXT


MAKERS = [
    XGBoostCallback,
    *(pytest.param(each, marks=pytest.mark.long) for each in (lightning_callback, transformers_callback)),
    storage_writer,
    fit,
    autolog,
]


@pytest.mark.parametrize("make", MAKERS)
def test_option_of_an_unknown_name_is_refused_before_any_training(make: Any) -> None:
    with pytest.raises(TypeError, match="polcy"):
        make(polcy="fast")


@pytest.mark.parametrize("make", MAKERS)
def test_a_policy_that_does_not_exist_is_refused_before_any_training(make: Any) -> None:
    with pytest.raises(ValueError, match="a policy is one of 'fast', 'balanced', 'small', not 'quick'"):
        make(policy="quick")
