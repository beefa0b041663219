"""Checkpoints out of files of foreign formats, and into them: `import_checkpoint`, `export_checkpoint`, `convert`."""

from tensorcas_mlflow.exchange._export import convert, export_checkpoint, plan_convert, plan_export
from tensorcas_mlflow.exchange._import import PreparedImport, import_checkpoint, prepare_import

__all__ = [
    "PreparedImport",
    "convert",
    "export_checkpoint",
    "import_checkpoint",
    "plan_convert",
    "plan_export",
    "prepare_import",
]
