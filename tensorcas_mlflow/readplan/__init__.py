"""The read plan: which bytes of packs to read, and in which way.

`plan_reads` joins places of chunks into extents. `choose` picks one of the `WAYS` by a `Rule`. Its numbers are
measured: by us, or on this machine by `calibrate`.
"""

from tensorcas_mlflow.readplan._calibrate import Calibration, Measured, calibrate
from tensorcas_mlflow.readplan._choose import (
    LEAST_ASKED_BYTES,
    WAYS,
    Choice,
    Situation,
    Way,
    choose,
    way_named,
    way_of_environment,
)
from tensorcas_mlflow.readplan._extents import MAX_GAP_BYTES, MAX_READ_BYTES, Extent, plan_reads
from tensorcas_mlflow.readplan._plan import PackRead, ReadPlan
from tensorcas_mlflow.readplan._rule import Rule, keep_rule, rule_of_machine

__all__ = [
    "LEAST_ASKED_BYTES",
    "MAX_GAP_BYTES",
    "MAX_READ_BYTES",
    "WAYS",
    "Calibration",
    "Choice",
    "Extent",
    "Measured",
    "PackRead",
    "ReadPlan",
    "Rule",
    "Situation",
    "Way",
    "calibrate",
    "choose",
    "keep_rule",
    "plan_reads",
    "rule_of_machine",
    "way_named",
    "way_of_environment",
]
