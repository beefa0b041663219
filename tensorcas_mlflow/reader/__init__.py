"""Reader: any part of one checkpoint; import and export."""

from tensorcas_mlflow.reader._diff import CheckpointDiff, ValueChange, diff
from tensorcas_mlflow.reader._exchange import (
    PreparedImport,
    convert,
    export_checkpoint,
    import_checkpoint,
    plan_convert,
    plan_export,
    prepare_import,
)
from tensorcas_mlflow.reader._open import open_listed, open_manifest, open_path, open_ref
from tensorcas_mlflow.reader._outline import Naming
from tensorcas_mlflow.reader._reader import CheckpointReader
from tensorcas_mlflow.reader._rebuild import Reader, check_call, given, rebuild
from tensorcas_mlflow.reader._safe_open import SafeOpen
from tensorcas_mlflow.reader._summary import Node, Summary

__all__ = [
    "CheckpointDiff",
    "CheckpointReader",
    "Naming",
    "Node",
    "PreparedImport",
    "Reader",
    "SafeOpen",
    "Summary",
    "ValueChange",
    "check_call",
    "convert",
    "diff",
    "export_checkpoint",
    "given",
    "import_checkpoint",
    "open_listed",
    "open_manifest",
    "open_path",
    "open_ref",
    "plan_convert",
    "plan_export",
    "prepare_import",
    "rebuild",
]
