"""The backend of a store in a bucket in memory, by the real code above obstore."""

from __future__ import annotations

from pathlib import Path

import obstore
from obstore.store import MemoryStore

from tensorcas_mlflow.backends import Bucket, ObjectBackend


def opened(memory: MemoryStore) -> ObjectBackend:
    bucket = Bucket(lambda: (memory, memory), uri="tensorcas-s3://golden", prefix=".tensorcas", has_versions=False)
    return ObjectBackend(bucket, uri="tensorcas-s3://golden")


def filled(folder: Path) -> MemoryStore:
    """A bucket with an object for each file of a folder."""
    memory = MemoryStore()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            obstore.put(memory, path.relative_to(folder).as_posix(), path.read_bytes())
    return memory
