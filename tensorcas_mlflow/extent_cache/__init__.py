"""Keep on local disk what was read of packs, so that the next load reads only what changed.

Packs never change and their names never come back, so what is kept can be old but never wrong. The cache knows extents
of packs and nothing of chunks, stores or MLflow. It never fails: what it cannot keep is read from the storage again.
"""

from tensorcas_mlflow.extent_cache._cache import ExtentCache
from tensorcas_mlflow.extent_cache._cached_pack import CachedPack, CachedRead, Found
from tensorcas_mlflow.extent_cache._filling import Filling

__all__ = ["CachedPack", "CachedRead", "ExtentCache", "Filling", "Found"]
