"""Choice of the kind of series: a store, or files on a server."""

from __future__ import annotations

from tensorcas_mlflow.integration._home import home_of, sends_files
from tensorcas_mlflow.integration.checkpoints._series import RunRoot, Series, check_name
from tensorcas_mlflow.integration.checkpoints._store_series import StoreSeries, names_in_store


def series_of(run: RunRoot, name: str, *, create: bool = False) -> Series:
    """Find the series of a name.

    Args:
        run: The run of the series.
        name: One segment of an artifact path.
        create: Whether to make a store if there is none.

    Raises:
        ValueError: The name cannot be a file's.
        StoreNotFoundError: There is no store, and ``create`` is False.
        MlflowException: MLflow keeps the run's artifacts in a place unsuitable for a store.
    """
    check_name(name)
    if sends_files(run.artifact_uri):
        from tensorcas_mlflow.integration.checkpoints._file_series import FileSeries  # of no use without a server

        return FileSeries(run=run, name=name)
    return StoreSeries(run=run, name=name, home=home_of(run.artifact_uri, create=create))


def all_series_of(run: RunRoot) -> list[Series]:
    """List the series of a run, by name.

    Raises:
        StoreNotFoundError: There is no store.
    """
    if sends_files(run.artifact_uri):
        from tensorcas_mlflow.integration.checkpoints._file_series import FileSeries, names_on_server

        return [FileSeries(run=run, name=name) for name in names_on_server(run)]
    home = home_of(run.artifact_uri, create=False)
    return [StoreSeries(run=run, name=name, home=home) for name in names_in_store(run, home)]
