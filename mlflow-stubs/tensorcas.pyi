from tensorcas_mlflow import (
    CheckpointInfo as CheckpointInfo,
)
from tensorcas_mlflow import (
    CheckpointReader as CheckpointReader,
)
from tensorcas_mlflow import (
    CheckpointRecord as CheckpointRecord,
)
from tensorcas_mlflow import (
    Keep as Keep,
)
from tensorcas_mlflow import (
    Naming as Naming,
)
from tensorcas_mlflow import (
    TensorCasStore as TensorCasStore,
)
from tensorcas_mlflow import (
    autolog as autolog,
)
from tensorcas_mlflow import (
    delete_checkpoint as delete_checkpoint,
)
from tensorcas_mlflow import (
    diff as diff,
)
from tensorcas_mlflow import (
    errors as errors,
)
from tensorcas_mlflow import (
    export_checkpoint as export_checkpoint,
)
from tensorcas_mlflow import (
    export_model as export_model,
)
from tensorcas_mlflow import (
    import_checkpoint as import_checkpoint,
)
from tensorcas_mlflow import (
    lineage as lineage,
)
from tensorcas_mlflow import (
    list_checkpoints as list_checkpoints,
)
from tensorcas_mlflow import (
    load_checkpoint as load_checkpoint,
)
from tensorcas_mlflow import (
    load_model as load_model,
)
from tensorcas_mlflow import (
    log_checkpoint as log_checkpoint,
)
from tensorcas_mlflow import (
    log_model as log_model,
)
from tensorcas_mlflow import (
    log_table as log_table,
)
from tensorcas_mlflow import (
    open_checkpoint as open_checkpoint,
)
from tensorcas_mlflow import (
    plot_diff as plot_diff,
)
from tensorcas_mlflow import (
    plot_history as plot_history,
)
from tensorcas_mlflow import (
    safe_open as safe_open,
)
from tensorcas_mlflow import (
    save_model as save_model,
)
from tensorcas_mlflow import (
    wait as wait,
)
