"""The page for users, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch
import mlflow
import pytest
import torch
import transformers
import xgboost
from sklearn.ensemble import RandomForestClassifier
from sklearn.neural_network import MLPClassifier

import tensorcas_mlflow
from tests.callbacks.loops import FEATURES, LABELS, PARAMETERS, data, make_module, steps_of
from tests.callbacks.tokens import Tokens, make_model

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "training-loops.md"


def run_section(title: str, **names: Any) -> dict[str, Any]:
    section = re.split(r"^#+ ", PAGE.read_text(encoding="utf-8").split(f"# {title}\n", 1)[1], flags=re.MULTILINE)[0]
    names |= {"mlflow": mlflow, "tensorcas": tensorcas_mlflow}
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(block, names)
    return names


def test_the_section_on_which_steps_stay_runs() -> None:
    with mlflow.start_run() as run:
        for step in range(1, 7):
            mlflow.tensorcas.log_checkpoint({"weights": FEATURES, "step": step}, step=step)
        run_section("Which steps stay", run_id=run.info.run_id)

    assert steps_of(run.info.run_id) == [1, 2, 3]


def test_the_lightning_section_runs(tmp_path: Path) -> None:
    names = run_section("Lightning", module=make_module(lightning.pytorch))

    assert Path(names["file"]).is_file()


def test_the_transformers_section_runs(tmp_path: Path) -> None:
    args = transformers.TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True)
    names = run_section("Transformers", Trainer=transformers.Trainer, model=make_model(), args=args, dataset=Tokens())

    assert names["trainer"].state.global_step == 4


def test_the_xgboost_section_runs() -> None:
    names = run_section("XGBoost", xgboost=xgboost, parameters=PARAMETERS, data=data(), X=FEATURES, y=LABELS)

    assert names["booster"].num_boosted_rounds() == 20


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_scikit_learn_section_runs() -> None:
    run_section(
        "scikit-learn",
        RandomForestClassifier=RandomForestClassifier,
        MLPClassifier=MLPClassifier,
        X=FEATURES,
        y=LABELS,
    )

    assert {record.name for record in mlflow.tensorcas.list_checkpoints()} == {"forest", "network"}


def test_the_section_on_a_loop_of_your_own_runs() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    names = run_section("A loop of your own", model=model, optimizer=optimizer, train=train)

    assert names["state"]["step"] == 3
