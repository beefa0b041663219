"""Chunk I/O: locate, read, decode and verify chunks."""

from tensorcas_mlflow.chunk_io._cache import CachedPack, CachedRead, ExtentCache, Filling, Found
from tensorcas_mlflow.chunk_io._calibrate import Calibration, Measured, calibrate, calibrate_on
from tensorcas_mlflow.chunk_io._catalog import MOST_SAVED_BYTES, Catalog
from tensorcas_mlflow.chunk_io._lookup import Places
from tensorcas_mlflow.chunk_io._read import ChunkReader, Owner, names_of
from tensorcas_mlflow.chunk_io._tensors_file import TensorsFile
from tensorcas_mlflow.chunk_io._ways import (
    LEAST_ASKED_BYTES,
    MAX_GAP_BYTES,
    MAX_READ_BYTES,
    WAYS,
    Choice,
    Extent,
    PackRead,
    ReadPlan,
    Rule,
    Situation,
    Way,
    choose,
    keep_rule,
    plan_reads,
    rule_of_machine,
    way_named,
    way_of_environment,
)

__all__ = [
    "LEAST_ASKED_BYTES",
    "MAX_GAP_BYTES",
    "MAX_READ_BYTES",
    "MOST_SAVED_BYTES",
    "WAYS",
    "CachedPack",
    "CachedRead",
    "Calibration",
    "Catalog",
    "Choice",
    "ChunkReader",
    "Extent",
    "ExtentCache",
    "Filling",
    "Found",
    "Measured",
    "Owner",
    "PackRead",
    "Places",
    "ReadPlan",
    "Rule",
    "Situation",
    "TensorsFile",
    "Way",
    "calibrate",
    "calibrate_on",
    "choose",
    "keep_rule",
    "names_of",
    "plan_reads",
    "rule_of_machine",
    "way_named",
    "way_of_environment",
]
