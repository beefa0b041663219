"""Engines of two workers on this machine, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tensorcas_mlflow.base.engines import DaskCluster, Engine, LocalProcesses, RayCluster


@contextmanager
def cluster_of_two(name: str) -> Iterator[Engine]:
    """Start two workers of an engine, and end them."""
    if name == "local":
        yield LocalProcesses(2)
    elif name == "ray":
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
        try:
            yield RayCluster()
        finally:
            ray.shutdown()
    else:
        distributed = pytest.importorskip("distributed")
        with (
            distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
            distributed.Client(cluster),
        ):
            yield DaskCluster()
