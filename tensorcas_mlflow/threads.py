"""The threads of this package: pools for computing and for waiting, and one for each kind of later work."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar, TypeVar

from tensorcas_mlflow import config

T = TypeVar("T")
R = TypeVar("R")


class Lock(_thread.RLock):  # type: ignore[misc]  # final for type checkers alone
    """A re-entrant lock that a child made by fork finds open.

    The thread that held it is not in the child, where nobody would ever open it. It is entered by the interpreter's own
    code and not by a method in Python, in which a KeyboardInterrupt could come when the lock is taken and nobody has
    promised to open it again yet: all other threads would wait for ever.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        Lock._all.add(self)

    @classmethod
    def open_all(cls) -> None:
        """Open every lock, whoever held it."""
        for lock in list(cls._all):
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the locks of `logging` and `threading` are


_N_WAITING = 16
"""Threads for jobs that wait for another machine most of their time; so many requests are under way at once."""

_lock = Lock()
_pools: dict[bool, ThreadPoolExecutor] = {}


def _shared_pool(*, waits: bool = False) -> ThreadPoolExecutor:
    with _lock:
        if waits not in _pools:
            n_threads, name = (_N_WAITING, "tensorcas-wait") if waits else (config.n_threads(), "tensorcas")
            _pools[waits] = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        return _pools[waits]


def _begin_anew() -> None:
    # A child made by fork has the pools' objects but none of their threads: work given to one would wait for ever.
    _pools.clear()
    Lock.open_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], *, window: int | None = None, waits: bool = False
) -> Iterator[R]:
    """Apply a function on the pool and yield its results in the order of the items.

    The caller takes part: what nobody has begun when its result is asked for is done in the calling thread.

    Args:
        function: Must not itself use this pool: the pool's threads do not wait for each other.
        items: Drawn from only as results are taken, so that memory stays bounded.
        window: How many items may be under way at once; by default twice the number of threads.
        waits: Whether the function waits for another machine most of its time: then a pool of more threads is used.

    Raises:
        Exception: The first exception of a call, at its place in the order. Calls not yet begun are dropped, and those
            under way are over when it is raised.
    """
    n_threads = _N_WAITING if waits else config.n_threads()
    if n_threads == 1:
        yield from map(function, items)
        return
    pool = _shared_pool(waits=waits)
    ahead = window or 2 * n_threads
    # Each item in a list of its own, out of which it is taken: what is cancelled stays in the pool's queue for a while,
    # and would keep its item.
    waiting: deque[tuple[Future[R], list[T]]] = deque()

    def call(box: list[T]) -> R:
        return function(box.pop())

    def next_result() -> R:
        future, box = waiting.popleft()
        return call(box) if future.cancel() else future.result()

    try:
        for item in items:
            box = [item]
            del item
            waiting.append((_submit(pool, call, box), box))
            if len(waiting) >= ahead:
                yield next_result()
        while waiting:
            yield next_result()
    except GeneratorExit:
        # Perhaps in one of the pool's own threads, by the garbage collector: waiting here could be for oneself.
        for future, box in waiting:
            if future.cancel():
                box.clear()
        raise
    except BaseException:
        # A call under way may still write into a buffer that the caller is about to use again.
        wait([future for future, _ in waiting if not future.cancel()])
        for _, box in waiting:
            box.clear()
        raise


def _submit(pool: ThreadPoolExecutor, function: Callable[[T], R], item: T) -> Future[R]:
    try:
        return pool.submit(function, item)
    except RuntimeError:
        # An interpreter that is ending lets no pool take work, but waits for threads: a save on one of those goes on.
        future: Future[R] = Future()
        try:
            future.set_result(function(item))
        except Exception as error:  # noqa: BLE001 -- as a pool does
            future.set_exception(error)
        return future


def run_all(function: Callable[[T], None], items: Iterable[T], *, waits: bool = False) -> None:
    """Apply a function to every item, on the pool and in the calling thread, and return when all is done.

    The caller takes part, which measures faster than waiting for the pool alone (``docs/design/decisions.md``).

    Args:
        function: Must not itself use this pool.
        items: Drawn from by one thread at a time.
        waits: Whether the function waits for another machine most of its time: then a pool of more threads is used.

    Raises:
        Exception: Of the calls that failed, what the first in the order of the items raised. Items not yet begun are
            dropped, and calls under way are over when it is raised.
        KeyboardInterrupt: It came meanwhile, whatever else has failed; the same holds.
    """
    n_threads = _N_WAITING if waits else config.n_threads()
    if isinstance(items, Sized):
        n_threads = min(n_threads, len(items))
    if n_threads <= 1:
        for item in items:
            function(item)
        return
    source = enumerate(items)
    lock = threading.Lock()
    errors: list[tuple[int, BaseException]] = []

    def work() -> None:
        at = -1
        try:
            while True:
                with lock:
                    entry = None if errors else next(source, None)
                if entry is None:
                    return
                at, item = entry
                function(item)
        except BaseException as error:  # noqa: BLE001 -- it is raised in the calling thread
            with lock:
                errors.append((at, error))

    pool = _shared_pool(waits=waits)
    helpers: list[Future[None]] = []
    try:
        helpers += (_submit(pool, _call, work) for _ in range(n_threads - 1))
        work()
        wait([helper for helper in helpers if not helper.cancel()])
    except BaseException as error:
        with lock:
            errors.append((-1, error))
        wait(helpers)
        raise
    if errors:
        # An interrupt is nobody's failure, and must not be lost behind one.
        raise min(errors, key=lambda each: (isinstance(each[1], Exception), each[0]))[1]


def start(job: Callable[[], T], name: str) -> Future[T]:
    """Do a job on a thread of its own, at once.

    The thread is a daemon: what waits for a client that is gone keeps no interpreter from ending.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001 -- it is raised where the job is waited for
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _call(job: Callable[[], None]) -> None:
    job()


class Background:
    """Does jobs one after the other, on a thread that lives as long as there are any.

    The thread is no daemon: an interpreter that ends waits for it. A child made by fork has none of its parent's jobs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin_anew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._open: list[Future[Any]] = []

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Do a job after those that were given before; here and now if no thread can be had for it.

        If a KeyboardInterrupt comes meanwhile the job may have been given all the same; then it is done, at the latest
        when somebody waits.
        """
        future: Future[T] = Future()
        with self._lock:
            self._open.append(future)
            self._jobs.append((job, future))
        self._see_to_it()
        return future

    def _see_to_it(self) -> None:
        """Have somebody do the jobs that are given: the thread, or else the caller."""
        with self._lock:
            if not self._jobs:
                return
            if not self._is_ending:
                if self._thread is not None and self._thread.is_alive():
                    return
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=False)
                with contextlib.suppress(RuntimeError):  # there are too many
                    self._thread.start()
                    return
                self._thread = None
        self._work()

    def end(self) -> None:
        """Do whatever comes from now on here and now: the interpreter is ending and waits for no more threads."""
        self._is_ending = True

    def result(self, future: Future[T]) -> T:
        """Wait for one job; raises what it raised, which `wait` then does not raise again.

        Raises:
            RuntimeError: The job is another process's, of which this one is a child.
        """
        with self._lock:
            if not future.done() and future not in self._open:
                raise RuntimeError("this is done by the process that began it; wait for it there")
        self._see_to_it()  # whoever gave it may have been interrupted before
        try:
            return future.result()
        finally:
            if future.done():
                self._forget(future)

    def wait(self) -> None:
        """Wait for all jobs given so far; raises what the first of them raised that nobody has seen yet."""
        with self._lock:
            waiting = list(self._open)
        for future in waiting:
            self.result(future)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            if future in self._open:
                self._open.remove(future)

    def _work(self) -> None:
        is_here = threading.current_thread() is not self._thread
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job, future = self._jobs.popleft()
            try:
                result = job()
            except BaseException as error:
                # It is raised where the job is waited for; but an interrupt of the caller is the caller's, at once.
                future.set_exception(error)
                if is_here and not isinstance(error, Exception):
                    self._forget(future)
                    raise
            else:
                future.set_result(result)
                self._forget(future)
            del job, future
