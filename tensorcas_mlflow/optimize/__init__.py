"""Everything in a store encoded anew in less room: first a plan one can print, then its execution.

```python
plan = plan_optimize(store)
print(plan)  # 12 of 12 checkpoints and files have 840 chunks of 220.1 MB, which take 170.3 MB, that are not optimized
print(plan.execute())
```

With all checkpoints at hand, one in the middle of a training can be the base of those before and behind it; a save
knows only what was before. Any number of writers, readers and collectors may be at work meanwhile.
"""

from tensorcas_mlflow.optimize._encode import Spent
from tensorcas_mlflow.optimize._plan import OptimizePlan, OptimizeReport, Progress, Watcher, plan_optimize

__all__ = ["OptimizePlan", "OptimizeReport", "Progress", "Spent", "Watcher", "plan_optimize"]
