"""Mends a damaged store: rebuilds what can be, takes from elsewhere what is lost, puts the rest aside and names it.

```python
plan = plan_repair(store, sources=[backup])
print(plan)  # packs/0c5e….pack: 1 chunks are damaged: … (its 11 good chunks go to a new pack, the rest to quarantine)
report = plan.execute()
```

It may run while others save, load and collect; ``docs/design/protocol.md`` says why.
"""

from tensorcas_mlflow.repair._format import FormatFix, open_damaged, open_damaged_backend
from tensorcas_mlflow.repair._needs import Loss
from tensorcas_mlflow.repair._plan import RepairPlan, plan_repair
from tensorcas_mlflow.repair._report import Finding, RepairReport

__all__ = [
    "Finding",
    "FormatFix",
    "Loss",
    "RepairPlan",
    "RepairReport",
    "open_damaged",
    "open_damaged_backend",
    "plan_repair",
]
