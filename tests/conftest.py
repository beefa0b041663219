"""What every test needs."""

from __future__ import annotations

import os

# Each test worker has a core of its own. OpenMP threads that spin for the other one make XGBoost's tests take five
# times as long. Set before any framework is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
