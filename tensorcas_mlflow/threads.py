"""The threads of this package: one pool a process, shared by hashing, encoding and reading."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import ClassVar, TypeVar

from tensorcas_mlflow import config

T = TypeVar("T")
R = TypeVar("R")


class Lock:
    """A re-entrant lock that a child made by fork finds open.

    The thread that held it is not in the child, where nobody would ever open it.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        Lock._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @classmethod
    def open_all(cls) -> None:
        """Replace every lock by an open one."""
        for lock in list(cls._all):
            lock._lock = threading.RLock()


_lock = Lock()
_pool: ThreadPoolExecutor | None = None


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(config.n_threads(), thread_name_prefix="tensorcas")
        return _pool


def _begin_anew() -> None:
    # A child made by fork has the pool's object but none of its threads: work given to it would wait for ever.
    global _pool
    _pool = None
    Lock.open_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def ordered_map(function: Callable[[T], R], items: Iterable[T], *, window: int | None = None) -> Iterator[R]:
    """Apply a function on the pool and yield its results in the order of the items.

    Args:
        function: Must not itself use this pool: the pool's threads do not wait for each other.
        items: Drawn from only as results are taken, so that memory stays bounded.
        window: How many items may be under way at once; by default twice the number of threads.

    Raises:
        Exception: The first exception of a call, at its place in the order. Calls not yet begun are dropped, and those
            under way are over when it is raised.
    """
    n_threads = config.n_threads()
    if n_threads == 1:
        yield from map(function, items)
        return
    pool = _shared_pool()
    ahead = window or 2 * n_threads
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except GeneratorExit:
        # Perhaps in one of the pool's own threads, by the garbage collector: waiting here could be for oneself.
        for future in waiting:
            future.cancel()
        raise
    except BaseException:
        # A call under way may still write into a buffer that the caller is about to use again.
        wait([future for future in waiting if not future.cancel()])
        raise


def run_all(function: Callable[[T], None], items: Iterable[T]) -> None:
    """Apply a function on the pool to every item and wait for all of it; raises as `ordered_map` does."""
    for _ in ordered_map(function, items):
        pass
