"""Choice of the kind of series: a store, or files on a server."""

from __future__ import annotations

from pathlib import Path

from tensorcas_mlflow.backends import is_ours
from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import StoreLostError, StoreNotFoundError
from tensorcas_mlflow.integration._figures import FIGURES
from tensorcas_mlflow.integration._home import Home, find_store, home_of, local_folder, sends_files
from tensorcas_mlflow.integration.checkpoints._series import RunRoot, Series, check_name
from tensorcas_mlflow.integration.checkpoints._store_series import StoreSeries, names_in_store
from tensorcas_mlflow.integration.checkpoints._uris import FOLDER


def series_of(run: RunRoot, name: str, *, create: bool = False) -> Series:
    """Find the series of a name.

    Args:
        run: The run of the series.
        name: One segment of an artifact path.
        create: Whether to make a store if there is none.

    Raises:
        ValueError: The name cannot be a file's.
        StoreNotFoundError: There is no store, and ``create`` is False.
        StoreLostError: There is none any more, and ``create`` is False.
        MlflowException: MLflow keeps the run's artifacts in a place unsuitable for a store.
    """
    check_name(name)
    if sends_files(run.artifact_uri):
        from tensorcas_mlflow.integration.checkpoints._file_series import FileSeries  # of no use without a server

        return FileSeries(run=run, name=name)
    return StoreSeries(
        run=run, name=name, home=home_of(run.artifact_uri, create=True) if create else _home_to_read(run)
    )


def all_series_of(run: RunRoot) -> list[Series]:
    """List the series of a run, by name.

    Raises:
        StoreNotFoundError: There is no store.
        StoreLostError: There is none any more.
    """
    if sends_files(run.artifact_uri):
        from tensorcas_mlflow.integration.checkpoints._file_series import FileSeries, names_on_server

        return [FileSeries(run=run, name=name) for name in names_on_server(run)]
    home = _home_to_read(run)
    return [StoreSeries(run=run, name=name, home=home) for name in names_in_store(run, home)]


def _home_to_read(run: RunRoot) -> Home:
    """Find the store of a run.

    Raises:
        StoreNotFoundError: There is none; a `StoreLostError` if the run has logged to one.
    """
    try:
        return home_of(run.artifact_uri, create=False)
    except StoreNotFoundError as error:
        if _has_logged(run):
            raise StoreLostError(error.uri, run.run_id) from error
        raise


def check_not_lost(run: RunRoot) -> None:
    """Check that a run without a checkpoint in the store of TENSORCAS_STORE has not logged to a store of its own.

    Raises:
        StoreLostError: It has, and that store is gone.
    """
    if config.store_uri() is None or not is_ours(run.artifact_uri):
        return
    try:
        find_store(run.artifact_uri)
    except StoreNotFoundError as error:
        if _has_logged(run):
            raise StoreLostError(error.uri, run.run_id) from error


def _has_logged(run: RunRoot) -> bool:
    """Tell whether a run has logged checkpoints or models, as its metrics or the copies of manifests say."""
    from mlflow import MlflowClient

    folder = local_folder(run.artifact_uri)
    if folder is not None and any(Path(folder, FOLDER).glob("*/step-*")):
        return True
    metrics = MlflowClient().get_run(run.run_id).data.metrics
    return any(name.startswith(f"{FIGURES}/") for name in metrics)
