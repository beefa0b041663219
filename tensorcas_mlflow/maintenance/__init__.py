"""Work on a whole store: collect garbage, verify, repair, optimize, copy, and count what it keeps.

```python
plan = plan_gc(store)
print(plan)  # 840 chunks kept by 12 checkpoints and files, 3 packs to delete (1.2 MB), …
report = plan.execute()
```

In comes an open `Store`, or two. Out comes a report: a frozen value that prints itself in words. What deletes or
rewrites makes a plan first: ``plan_x(store, …)`` changes nothing, and the plan's ``execute()`` returns the report. What
takes long tells a `Watcher` its `Progress`. Others may save, load and collect meanwhile (``docs/design/protocol.md``).

The room imports the store and everything below it. It knows no MLflow, no command line and no reader.

| module | holds |
|---|---|
| ``_inventory``, ``_census`` | the inventory of a store, and its copy on disk |
| ``_chunks``, ``_workers`` | the check of chunks, in shards that merge, and by several workers |
| ``_gc``, ``_gc_survey``, ``_gc_copy`` | garbage collection |
| ``_verify``, ``_verify_derived`` | verification |
| ``_repair``, ``_repair_packs``, ``_repair_records``, ``_checked_packs`` | repair |
| ``_salvage``, ``_sources`` | places a repair takes lost bytes from |
| ``_quarantine`` | damaged blobs that a repair puts aside |
| ``_optimize``, ``_optimize_done``, ``_optimize_relatives``, ``_optimize_tracks`` | optimization |
| ``_optimize_forms``, ``_made_chunks`` | derived rows of checkpoints that exist; chunks of derived rows |
| ``_optimize_tree``, ``_optimize_encode`` | encoding of optimized chunks, and choice of bases |
| ``_copy``, ``_copy_refs``, ``_copy_chunks``, ``_copy_plain`` | copies between stores |
| ``_stats`` | figures |
| ``_rounds`` | records and the lease of scheduled maintenance |

A new command goes into a module ``_x`` of its own. It takes an `Inventory` or a `PackTables`, and never lists and reads
packs by itself; it checks chunks by `check_chunks`; it deletes only by a collection, or by its rules. Name its function
here, and call that from a module of ``cli/``.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.maintenance._census import Census, census_bytes, read_census
    from tensorcas_mlflow.maintenance._chunks import Checked, Shard, check_chunks, merge_checks
    from tensorcas_mlflow.maintenance._copy import Copied, CopyEnd, copy_all, end_of, open_destination
    from tensorcas_mlflow.maintenance._copy_plain import PlainReport, copy_plain
    from tensorcas_mlflow.maintenance._copy_refs import CopyPlan, CopyReport, Failure, copy_refs, plan_copy, read_source
    from tensorcas_mlflow.maintenance._defaults import DEFAULT_GRACE_S, DEFAULT_MAX_WASTE, DEFAULT_QUARANTINE_S
    from tensorcas_mlflow.maintenance._gc import GcPlan, GcReport, plan_gc
    from tensorcas_mlflow.maintenance._inventory import (
        Inventory,
        disk_bytes,
        inventory_of_manifests,
        inventory_of_packs,
        merge_inventories,
    )
    from tensorcas_mlflow.maintenance._optimize import OptimizePlan, OptimizeReport, plan_optimize
    from tensorcas_mlflow.maintenance._repair import Finding, RepairPlan, RepairReport, plan_repair
    from tensorcas_mlflow.maintenance._repair_records import FormatFix, open_damaged, open_damaged_backend
    from tensorcas_mlflow.maintenance._rounds import (
        MOST_ROUNDS,
        Lease,
        Outcome,
        Round,
        read_rounds,
        record_round,
        round_since,
        running_round,
        utc_text,
    )
    from tensorcas_mlflow.maintenance._stats import (
        By,
        DiskUsage,
        Division,
        Encoded,
        OwnedBytes,
        PackFigures,
        RefOwner,
        RunStats,
        Shares,
        StoredBytes,
        StoreStats,
        bytes_freed_by,
        disk_usage,
        find_shares,
        pack_figures,
        run_stats,
        store_stats,
    )
    from tensorcas_mlflow.maintenance._verify import Problem, VerifyReport, verify

_NAMES = {
    "_census": "Census census_bytes read_census",
    "_chunks": "Checked Shard check_chunks merge_checks",
    "_copy": "Copied CopyEnd copy_all end_of open_destination",
    "_copy_plain": "PlainReport copy_plain",
    "_copy_refs": "CopyPlan CopyReport Failure copy_refs plan_copy read_source",
    "_defaults": "DEFAULT_GRACE_S DEFAULT_MAX_WASTE DEFAULT_QUARANTINE_S",
    "_gc": "GcPlan GcReport plan_gc",
    "_inventory": "Inventory disk_bytes inventory_of_manifests inventory_of_packs merge_inventories",
    "_optimize": "OptimizePlan OptimizeReport plan_optimize",
    "_repair": "Finding RepairPlan RepairReport plan_repair",
    "_repair_records": "FormatFix open_damaged open_damaged_backend",
    "_rounds": "MOST_ROUNDS Lease Outcome Round read_rounds record_round round_since running_round utc_text",
    "_stats": (
        "By DiskUsage Division Encoded OwnedBytes PackFigures RefOwner RunStats Shares StoredBytes StoreStats "
        "bytes_freed_by disk_usage find_shares pack_figures run_stats store_stats"
    ),
    "_verify": "Problem VerifyReport verify",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
