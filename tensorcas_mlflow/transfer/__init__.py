"""Copying from one store to another: backup, restore, migration. Plain files beside the stores go along."""

from tensorcas_mlflow.transfer._all import Copied, copy_all
from tensorcas_mlflow.transfer._chunks import ChunkReader
from tensorcas_mlflow.transfer._compare import read_source
from tensorcas_mlflow.transfer._copy import copy_refs, plan_copy
from tensorcas_mlflow.transfer._local_plain import LocalPlainFiles
from tensorcas_mlflow.transfer._open import Place, open_destination, place_of
from tensorcas_mlflow.transfer._plain import PlainFile, PlainFiles, PlainReport, copy_plain
from tensorcas_mlflow.transfer._report import CopyPlan, CopyReport, Failure, Progress, Watcher

__all__ = [
    "ChunkReader",
    "Copied",
    "CopyPlan",
    "CopyReport",
    "Failure",
    "LocalPlainFiles",
    "Place",
    "PlainFile",
    "PlainFiles",
    "PlainReport",
    "Progress",
    "Watcher",
    "copy_all",
    "copy_plain",
    "copy_refs",
    "open_destination",
    "place_of",
    "plan_copy",
    "read_source",
]
