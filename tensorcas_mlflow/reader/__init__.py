"""Readers for any part of any checkpoint, model or file."""

from tensorcas_mlflow.reader._diff import CheckpointDiff, diff
from tensorcas_mlflow.reader._naming import Naming
from tensorcas_mlflow.reader._open import open_listed, open_manifest, open_path, open_ref
from tensorcas_mlflow.reader._reader import CheckpointReader
from tensorcas_mlflow.reader._safe_open import SafeOpen
from tensorcas_mlflow.reader._stats import ReadStats
from tensorcas_mlflow.reader._summary import Node, StackSummary, Summary
from tensorcas_mlflow.reader._tensor_slice import TensorSlice
from tensorcas_mlflow.reader._value_diff import ValueChange

__all__ = [
    "CheckpointDiff",
    "CheckpointReader",
    "Naming",
    "Node",
    "ReadStats",
    "SafeOpen",
    "StackSummary",
    "Summary",
    "TensorSlice",
    "ValueChange",
    "diff",
    "open_listed",
    "open_manifest",
    "open_path",
    "open_ref",
]
