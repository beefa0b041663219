"""A cache of packs on local disk, so the next load reads only the changes.

Packs never change and their names never come back, so a cached extent can be old but never wrong. The cache knows
extents of packs and nothing of chunks, stores or MLflow. It never fails: after a miss the reader asks the storage.
"""

from tensorcas_mlflow.extent_cache._cache import ExtentCache
from tensorcas_mlflow.extent_cache._cached_pack import CachedPack, CachedRead, Found
from tensorcas_mlflow.extent_cache._filling import Filling

__all__ = ["CachedPack", "CachedRead", "ExtentCache", "Filling", "Found"]
