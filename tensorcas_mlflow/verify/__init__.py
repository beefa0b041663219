"""Is everything there that a store says it keeps? Looks at all of it and changes nothing.

```python
report = verify(store, full=True)
print(report)  # 40 checkpoints and files, 3 packs, 840 chunks, every one read: no problem found
```
"""

from tensorcas_mlflow.verify._report import Problem, Progress, VerifyReport, Watcher
from tensorcas_mlflow.verify._verify import verify

__all__ = ["Problem", "Progress", "VerifyReport", "Watcher", "verify"]
