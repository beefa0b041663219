"""The collector's side of the save/collect protocol: first a plan one can print, then its execution.

```python
plan = plan_gc(store)
print(plan)  # 12 checkpoints and files keep 840 chunks, 3 packs to delete (1.2 MB), …
report = plan.execute()
```

Any number of collectors and writers may run at once. Clocks decide only when somebody is taken for dead, never whether
something may be deleted; ``docs/design/protocol.md`` gives the argument for every step.
"""

from tensorcas_mlflow.gc._plan import (
    DEFAULT_GRACE_S,
    DEFAULT_MAX_WASTE,
    DEFAULT_QUARANTINE_S,
    GcPlan,
    GcReport,
    plan_gc,
)

__all__ = ["DEFAULT_GRACE_S", "DEFAULT_MAX_WASTE", "DEFAULT_QUARANTINE_S", "GcPlan", "GcReport", "plan_gc"]
