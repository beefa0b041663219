"""Directory: the names that MLflow gives to runs and experiments, and the places of their artifacts.

A word that somebody types comes in: a name, an id or the beginning of one, or a URI of MLflow. Runs, experiments and
artifact locations go out. The room changes nothing, and imports `models` and the rooms below the integration.

A tracking store in SQLite, MLflow's default, answers without the import of MLflow, which takes seconds.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.directory._directory import (
        Directory,
        NamedExperiment,
        NamedModel,
        NamedRun,
        database_beside,
        open_directory,
    )
    from tensorcas_mlflow.integration.directory._models import models_by_file, with_runs
    from tensorcas_mlflow.integration.directory._places import (
        artifact_location,
        is_uri_of_mlflow,
        local_folder_of,
        refs_at,
        store_at_artifacts,
    )

_NAMES = {
    "_directory": "Directory NamedExperiment NamedModel NamedRun database_beside open_directory",
    "_models": "models_by_file with_runs",
    "_places": "artifact_location is_uri_of_mlflow local_folder_of refs_at store_at_artifacts",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
