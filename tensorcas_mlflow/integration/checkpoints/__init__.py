"""Checkpoints of a training loop: states of a run by step, light enough to log at every step.

A live state comes in, and a `CheckpointInfo` goes out; a run and a step come in, and the state goes out. A checkpoint
is no logged model: it has no environment, no signature and no row in MLflow's database. The room also logs tables of a
run. It imports `models` and `server_store`, and the rooms below the integration. Users import these functions from
``tensorcas_mlflow``.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration._background import wait
    from tensorcas_mlflow.integration._policy import pickle_forbidden_by
    from tensorcas_mlflow.integration.checkpoints._exchange import export_checkpoint, import_checkpoint
    from tensorcas_mlflow.integration.checkpoints._load import (
        CheckpointRecord,
        delete_checkpoint,
        list_before_logging,
        list_checkpoints,
        load_checkpoint,
    )
    from tensorcas_mlflow.integration.checkpoints._log import (
        CheckpointInfo,
        Keep,
        SaveOptions,
        check_options,
        log_checkpoint,
        would_be_refused,
    )
    from tensorcas_mlflow.integration.checkpoints._open import diff, lineage, open_checkpoint, safe_open
    from tensorcas_mlflow.integration.checkpoints._plots import plot_diff, plot_history
    from tensorcas_mlflow.integration.checkpoints._sharded import (
        ShardedStep,
        ShardPlace,
        StoredPart,
        find_whole_step,
        open_whole_step,
    )
    from tensorcas_mlflow.integration.checkpoints._tables import log_table
    from tensorcas_mlflow.integration.checkpoints._uris import is_artifact_root, parse_checkpoint_uri

_NAMES = {
    "tensorcas_mlflow.integration._background": "wait",
    "tensorcas_mlflow.integration._policy": "pickle_forbidden_by",
    "_exchange": "export_checkpoint import_checkpoint",
    "_load": "CheckpointRecord delete_checkpoint list_before_logging list_checkpoints load_checkpoint",
    "_log": "CheckpointInfo Keep SaveOptions check_options log_checkpoint would_be_refused",
    "_open": "diff lineage open_checkpoint safe_open",
    "_plots": "plot_diff plot_history",
    "_sharded": "ShardPlace ShardedStep StoredPart find_whole_step open_whole_step",
    "_tables": "log_table",
    "_uris": "is_artifact_root parse_checkpoint_uri",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
