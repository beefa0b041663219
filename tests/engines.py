"""Engines of two workers on this machine, for tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tensorcas_mlflow.base.engines import MOST_DEATHS, Engine, LocalProcesses, RayCluster

T = TypeVar("T")
R = TypeVar("R")


class DyingProcesses(LocalProcesses):
    """Processes of this machine. One of them is killed after each result, until none is to be killed any more."""

    def __init__(self, n_workers: int, n_deaths: int) -> None:
        super().__init__(n_workers)
        self.n_left = n_deaths
        self._others = multiprocessing.active_children()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        for result in super().map(function, items):
            workers = [process for process in multiprocessing.active_children() if process not in self._others]
            if self.n_left and workers:
                self.n_left -= 1
                workers[self.n_left % len(workers)].kill()
            yield result


@contextmanager
def cluster_of_two(name: str) -> Iterator[Engine]:
    """Start two workers of an engine, and end them."""
    if name == "local":
        yield LocalProcesses(2)
    elif name == "dying":
        dying = DyingProcesses(2, MOST_DEATHS - 1)
        yield dying
        assert dying.n_left == 0
    else:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
        try:
            yield RayCluster()
        finally:
            ray.shutdown()
