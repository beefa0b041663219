"""Work on a whole store: collect garbage, verify, repair, optimize, copy, and count what it keeps.

```python
plan = plan_gc(store)
print(plan)  # 12 checkpoints and files keep 840 chunks, 3 packs to delete (1.2 MB), …
report = plan.execute()
```

In comes an open `Store`, or two. Out comes a report: a frozen value that prints itself in words. What deletes or
rewrites makes a plan first: ``plan_x(store, …)`` changes nothing, and the plan's ``execute()`` returns the report. What
takes long tells a `Watcher` its `Progress`. Others may save, load and collect meanwhile (``docs/design/protocol.md``).

The room imports the store and everything below it. It knows no MLflow, no command line and no reader.

| module | holds |
|---|---|
| ``_inventory``, ``_census`` | the inventory of a store, and its copy on disk |
| ``_chunks`` | the check of chunks, in shards that merge |
| ``_gc``, ``_gc_survey``, ``_gc_copy`` | garbage collection |
| ``_verify`` | verification |
| ``_repair``, ``_repair_packs``, ``_repair_records``, ``_checked_packs`` | repair |
| ``_quarantine``, ``_salvage``, ``_sources`` | places a repair takes lost bytes from |
| ``_optimize``, ``_optimize_done``, ``_optimize_tracks``, ``_optimize_tree``, ``_optimize_encode`` | optimization |
| ``_copy``, ``_copy_refs``, ``_copy_chunks``, ``_copy_plain`` | copies between stores |
| ``_stats`` | figures |

A new command goes into a module ``_x`` of its own. It takes an `Inventory` or a `PackTables`, and never lists and reads
packs by itself; it checks chunks by `check_chunks`; it deletes only by a collection, or by its rules. Name its function
here, and call that from a module of ``cli/``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorcas_mlflow.maintenance._census import Census as Census
    from tensorcas_mlflow.maintenance._census import census_bytes as census_bytes
    from tensorcas_mlflow.maintenance._census import read_census as read_census
    from tensorcas_mlflow.maintenance._chunks import Checked as Checked
    from tensorcas_mlflow.maintenance._chunks import Shard as Shard
    from tensorcas_mlflow.maintenance._chunks import check_chunks as check_chunks
    from tensorcas_mlflow.maintenance._chunks import merge_checks as merge_checks
    from tensorcas_mlflow.maintenance._copy import Copied as Copied
    from tensorcas_mlflow.maintenance._copy import CopyEnd as CopyEnd
    from tensorcas_mlflow.maintenance._copy import copy_all as copy_all
    from tensorcas_mlflow.maintenance._copy import end_of as end_of
    from tensorcas_mlflow.maintenance._copy import open_destination as open_destination
    from tensorcas_mlflow.maintenance._copy_plain import PlainReport as PlainReport
    from tensorcas_mlflow.maintenance._copy_plain import copy_plain as copy_plain
    from tensorcas_mlflow.maintenance._copy_refs import CopyPlan as CopyPlan
    from tensorcas_mlflow.maintenance._copy_refs import CopyReport as CopyReport
    from tensorcas_mlflow.maintenance._copy_refs import Failure as Failure
    from tensorcas_mlflow.maintenance._copy_refs import copy_refs as copy_refs
    from tensorcas_mlflow.maintenance._copy_refs import plan_copy as plan_copy
    from tensorcas_mlflow.maintenance._copy_refs import read_source as read_source
    from tensorcas_mlflow.maintenance._gc import DEFAULT_GRACE_S as DEFAULT_GRACE_S
    from tensorcas_mlflow.maintenance._gc import DEFAULT_MAX_WASTE as DEFAULT_MAX_WASTE
    from tensorcas_mlflow.maintenance._gc import DEFAULT_QUARANTINE_S as DEFAULT_QUARANTINE_S
    from tensorcas_mlflow.maintenance._gc import GcPlan as GcPlan
    from tensorcas_mlflow.maintenance._gc import GcReport as GcReport
    from tensorcas_mlflow.maintenance._gc import plan_gc as plan_gc
    from tensorcas_mlflow.maintenance._inventory import Inventory as Inventory
    from tensorcas_mlflow.maintenance._inventory import inventory_of_manifests as inventory_of_manifests
    from tensorcas_mlflow.maintenance._inventory import inventory_of_packs as inventory_of_packs
    from tensorcas_mlflow.maintenance._inventory import merge_inventories as merge_inventories
    from tensorcas_mlflow.maintenance._optimize import OptimizePlan as OptimizePlan
    from tensorcas_mlflow.maintenance._optimize import OptimizeReport as OptimizeReport
    from tensorcas_mlflow.maintenance._optimize import plan_optimize as plan_optimize
    from tensorcas_mlflow.maintenance._repair import Finding as Finding
    from tensorcas_mlflow.maintenance._repair import Loss as Loss
    from tensorcas_mlflow.maintenance._repair import RepairPlan as RepairPlan
    from tensorcas_mlflow.maintenance._repair import RepairReport as RepairReport
    from tensorcas_mlflow.maintenance._repair import plan_repair as plan_repair
    from tensorcas_mlflow.maintenance._repair_records import FormatFix as FormatFix
    from tensorcas_mlflow.maintenance._repair_records import open_damaged as open_damaged
    from tensorcas_mlflow.maintenance._repair_records import open_damaged_backend as open_damaged_backend
    from tensorcas_mlflow.maintenance._stats import By as By
    from tensorcas_mlflow.maintenance._stats import DiskUsage as DiskUsage
    from tensorcas_mlflow.maintenance._stats import RefOwner as RefOwner
    from tensorcas_mlflow.maintenance._stats import RunStats as RunStats
    from tensorcas_mlflow.maintenance._stats import Shares as Shares
    from tensorcas_mlflow.maintenance._stats import StoreStats as StoreStats
    from tensorcas_mlflow.maintenance._stats import disk_usage as disk_usage
    from tensorcas_mlflow.maintenance._stats import find_shares as find_shares
    from tensorcas_mlflow.maintenance._stats import run_stats as run_stats
    from tensorcas_mlflow.maintenance._stats import store_stats as store_stats
    from tensorcas_mlflow.maintenance._verify import Problem as Problem
    from tensorcas_mlflow.maintenance._verify import VerifyReport as VerifyReport
    from tensorcas_mlflow.maintenance._verify import verify as verify

# A save imports `plan_gc` and the figures by way of `TensorCasStore`. It does not wait for repairs and copies to load.
_NAMES = {
    "_census": "Census census_bytes read_census",
    "_chunks": "Checked Shard check_chunks merge_checks",
    "_copy": "Copied CopyEnd copy_all end_of open_destination",
    "_copy_plain": "PlainReport copy_plain",
    "_copy_refs": "CopyPlan CopyReport Failure copy_refs plan_copy read_source",
    "_gc": "DEFAULT_GRACE_S DEFAULT_MAX_WASTE DEFAULT_QUARANTINE_S GcPlan GcReport plan_gc",
    "_inventory": "Inventory inventory_of_manifests inventory_of_packs merge_inventories",
    "_optimize": "OptimizePlan OptimizeReport plan_optimize",
    "_repair": "Finding Loss RepairPlan RepairReport plan_repair",
    "_repair_records": "FormatFix open_damaged open_damaged_backend",
    "_stats": "By DiskUsage RefOwner RunStats Shares StoreStats disk_usage find_shares run_stats store_stats",
    "_verify": "Problem VerifyReport verify",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
