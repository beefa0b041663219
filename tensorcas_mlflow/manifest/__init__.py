"""Manifests: the Arrow table of one checkpoint or file (``docs/format.md``, Manifests)."""

from tensorcas_mlflow.manifest._by_name import Numbers
from tensorcas_mlflow.manifest._checks import row_cuts
from tensorcas_mlflow.manifest._columns import Columns
from tensorcas_mlflow.manifest._manifest import Manifest
from tensorcas_mlflow.manifest._row import Row, Rows
from tensorcas_mlflow.manifest._specs import Specs
from tensorcas_mlflow.manifest._stream import MANIFEST_SCHEMA, MAX_BYTES

__all__ = ["MANIFEST_SCHEMA", "MAX_BYTES", "Columns", "Manifest", "Numbers", "Row", "Rows", "Specs", "row_cuts"]
