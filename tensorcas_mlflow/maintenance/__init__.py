"""Work on a whole store.

collect garbage, verify, repair, optimize, copy, and count what it keeps.
"""

from tensorcas_mlflow._progress import Progress, Watcher
from tensorcas_mlflow.maintenance._census import Census, census_bytes, read_census
from tensorcas_mlflow.maintenance._copy import Copied, Place, copy_all, open_destination, place_of
from tensorcas_mlflow.maintenance._copy_chunks import ChunkReader
from tensorcas_mlflow.maintenance._copy_refs import copy_refs, plan_copy, read_source
from tensorcas_mlflow.maintenance._copy_report import CopyPlan, CopyReport, Failure
from tensorcas_mlflow.maintenance._gc import (
    DEFAULT_GRACE_S,
    DEFAULT_MAX_WASTE,
    DEFAULT_QUARANTINE_S,
    GcPlan,
    GcReport,
    plan_gc,
)
from tensorcas_mlflow.maintenance._inventory import (
    NO_BASE,
    Inventory,
    RefSeen,
    inventory_of_manifests,
    inventory_of_packs,
    merge_inventories,
)
from tensorcas_mlflow.maintenance._optimize import OptimizePlan, OptimizeReport, plan_optimize
from tensorcas_mlflow.maintenance._optimize_encode import Spent
from tensorcas_mlflow.maintenance._plain_files import (
    LocalPlainFiles,
    ObjectPlainFiles,
    PlainFile,
    PlainFiles,
    PlainReport,
    copy_plain,
)
from tensorcas_mlflow.maintenance._repair import Finding, Loss, RepairPlan, RepairReport, plan_repair
from tensorcas_mlflow.maintenance._repair_records import FormatFix, open_damaged, open_damaged_backend
from tensorcas_mlflow.maintenance._stats import (
    By,
    DiskUsage,
    Owner,
    RunStats,
    Share,
    Shares,
    StoreStats,
    disk_usage,
    find_shares,
    run_stats,
    store_stats,
)
from tensorcas_mlflow.maintenance._verify import Problem, VerifyReport, verify

__all__ = [
    "DEFAULT_GRACE_S",
    "DEFAULT_MAX_WASTE",
    "DEFAULT_QUARANTINE_S",
    "NO_BASE",
    "By",
    "Census",
    "ChunkReader",
    "Copied",
    "CopyPlan",
    "CopyReport",
    "DiskUsage",
    "Failure",
    "Finding",
    "FormatFix",
    "GcPlan",
    "GcReport",
    "Inventory",
    "LocalPlainFiles",
    "Loss",
    "ObjectPlainFiles",
    "OptimizePlan",
    "OptimizeReport",
    "Owner",
    "Place",
    "PlainFile",
    "PlainFiles",
    "PlainReport",
    "Problem",
    "Progress",
    "RefSeen",
    "RepairPlan",
    "RepairReport",
    "RunStats",
    "Share",
    "Shares",
    "Spent",
    "StoreStats",
    "VerifyReport",
    "Watcher",
    "census_bytes",
    "copy_all",
    "copy_plain",
    "copy_refs",
    "disk_usage",
    "find_shares",
    "inventory_of_manifests",
    "inventory_of_packs",
    "merge_inventories",
    "open_damaged",
    "open_damaged_backend",
    "open_destination",
    "place_of",
    "plan_copy",
    "plan_gc",
    "plan_optimize",
    "plan_repair",
    "read_census",
    "read_source",
    "run_stats",
    "store_stats",
    "verify",
]
