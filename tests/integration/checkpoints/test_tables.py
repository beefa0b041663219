"""Tables of a run: those of MLflow, cut by content."""

from __future__ import annotations

import datetime
import io
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from mlflow.exceptions import MlflowException

from tests.stored_bytes import bytes_below

DRAW = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "number": [1, 2, 3],
        "value": [1.5, None, float("inf")],
        "text": ["a", "é", None],
        "flag": [True, False, True],
        "when": pd.to_datetime(["2026-01-01", "2026-01-02", None]).tz_localize("UTC"),
        "day": [datetime.date(2026, 1, nth) for nth in (1, 2, 3)],
        "list": [[1.0], [], [2.0, 3.0]],
        "dict": [{"a": 1}, {"a": 2}, {"a": 3}],
        "kind": pd.Categorical(["x", "y", "x"]),
        "bytes": [b"\0", b"", b"\xff"],
    }
)


def content(path: str) -> bytes:
    """Read an artifact of the active run."""
    run = mlflow.active_run()
    assert run is not None
    return Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=path)).read_bytes()


def cut_by_content(frame: pd.DataFrame) -> bytes:
    out = io.BytesIO()
    frame.to_parquet(out, index=False, use_content_defined_chunking=True)
    return out.getvalue()


def many(n: int) -> pd.DataFrame:
    return pd.DataFrame({"a": DRAW.integers(0, 1 << 60, n), "b": DRAW.normal(size=n)})


@pytest.mark.long
@pytest.mark.parametrize("path", ["table.parquet", "a/day=1/table.parquet", "table.json"])
def test_table_is_the_one_that_mlflow_logs(experiment: str, path: str) -> None:
    frame = FRAME if path.endswith(".parquet") else FRAME[["number", "text"]]
    with mlflow.start_run() as own:
        mlflow.tensorcas.log_table(frame, path)
    with mlflow.start_run() as theirs:
        mlflow.log_table(frame, path)
    mine, wanted = (mlflow.load_table(path, run_ids=[run.info.run_id]) for run in (own, theirs))

    pd.testing.assert_frame_equal(mine, wanted)
    mine_tags, wanted_tags = (mlflow.get_run(run.info.run_id).data.tags for run in (own, theirs))
    assert mine_tags["mlflow.loggedArtifacts"] == wanted_tags["mlflow.loggedArtifacts"]


def test_schema_is_the_one_that_mlflow_writes(experiment: str) -> None:
    found = []
    for log in (mlflow.tensorcas.log_table, mlflow.log_table):
        with mlflow.start_run():
            log(FRAME, "table.parquet")
            found.append(pyarrow.parquet.read_schema(io.BytesIO(content("table.parquet"))))

    assert found[0].equals(found[1], check_metadata=True)


@pytest.mark.long
def test_pages_end_by_their_content(experiment: str) -> None:
    frame = many(200_000)
    with mlflow.start_run():
        mlflow.tensorcas.log_table(frame, "eval/table.parquet")
        logged = content("eval/table.parquet")
        mlflow.log_table(frame, "theirs.parquet")

        assert logged == cut_by_content(frame)
        assert logged != content("theirs.parquet")


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_existing_table_is_continued(experiment: str, first: str) -> None:
    frame = many(1000)
    with mlflow.start_run() as run:
        (mlflow.tensorcas.log_table if first == "ours" else mlflow.log_table)(frame[:600], "table.parquet")
        mlflow.tensorcas.log_table(frame[600:], "table.parquet", run_id=f"runs:/{run.info.run_id}")
        table = mlflow.load_table("table.parquet", run_ids=[run.info.run_id])

        pd.testing.assert_frame_equal(table, frame)
        assert content("table.parquet") == cut_by_content(frame)


@pytest.mark.long
def test_continued_table_stores_little_again(cas_experiment: str, tmp_path: Path) -> None:
    frame = many(400_000)
    with mlflow.start_run():
        mlflow.tensorcas.log_table(frame, "table.parquet")
        before = bytes_below(tmp_path / "artifacts/.tensorcas")
        mlflow.tensorcas.log_table(many(10), "table.parquet")

        assert before > 5 << 20
        assert bytes_below(tmp_path / "artifacts/.tensorcas") - before < 0.06 * before


def test_table_may_be_a_dict_and_begins_a_run(experiment: str) -> None:
    mlflow.tensorcas.log_table({"a": [1, 2], "b": ["x", "y"]}, "table.parquet")
    run = mlflow.active_run()

    assert run is not None
    assert mlflow.load_table("table.parquet", run_ids=[run.info.run_id])["b"].tolist() == ["x", "y"]


def test_table_of_another_format_is_refused(experiment: str) -> None:
    with mlflow.start_run(), pytest.raises(MlflowException, match=r"csv"):
        mlflow.tensorcas.log_table(FRAME, "table.csv")


@pytest.mark.long
def test_table_is_logged_by_a_pyarrow_that_cannot_cut_by_content(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = many(200_000)
    monkeypatch.setattr(pyarrow, "__version__", "20.0.0")
    with mlflow.start_run():
        mlflow.tensorcas.log_table(frame, "table.parquet")
        logged = content("table.parquet")

    out = io.BytesIO()
    frame.to_parquet(out, index=False)
    assert logged == out.getvalue()
