"""Tables of a run, as MLflow logs them, and cut so that their versions share rows in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import Run

from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration.checkpoints._series import run_to_write

if TYPE_CHECKING:
    import pandas

_PARQUET = ".parquet"
_FIRST_RELEASE = 21
"""The first major release of pyarrow that ends pages by their content."""


@translate_errors()
def log_table(data: dict[str, Any] | pandas.DataFrame, artifact_file: str, run_id: str | Run | None = None) -> None:
    """Log a table as `mlflow.log_table` does, with pages of Parquet that end by their content.

    Two versions of such a table have most pages in common, wherever rows were put in or taken away, and a store keeps a
    page once. MLflow's own tables end their pages after a number of rows, so a row in front changes all of them.

    The rest is as in MLflow: an existing table is continued, images are saved beside it, and `mlflow.load_table` reads
    it. A table in JSON is logged as MLflow does. With a pyarrow below 21, so is one in Parquet.

    Args:
        data: The rows: a data frame, or a dict of columns.
        artifact_file: The artifact path of the table, such as ``eval/results.parquet``; it ends in ``.parquet`` or
            ``.json``.
        run_id: The run; by default the active one, else a new one.

    Raises:
        TensorCasError: There is no such run, or the storage failed.
        MlflowException: MLflow cannot log the data.
    """
    _Client().log_table(run_to_write(run_id).run_id, data, artifact_file)


class _Client(MlflowClient):
    """A client that logs files of Parquet cut by content. All of `log_table` but the file is MLflow's."""

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file, which is this client's own copy."""
        if local_path.endswith(_PARQUET):
            _cut_by_content(local_path)
        super().log_artifact(run_id, local_path, artifact_path)


def _cut_by_content(path: str) -> None:
    """Write a file of Parquet anew, with the same rows, types and metadata."""
    import pyarrow
    from pyarrow import parquet

    if int(pyarrow.__version__.partition(".")[0]) >= _FIRST_RELEASE:
        # A data set would take folders like `a=1` in the path for columns.
        with parquet.ParquetFile(path) as file:
            table = file.read()
        parquet.write_table(table, path, use_content_defined_chunking=True)
