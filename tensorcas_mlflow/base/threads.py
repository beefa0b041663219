"""Threads: ordered maps, background work, locks that survive a fork, and attributes computed at the first access."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from tensorcas_mlflow.base import config

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Value = TypeVar("Value")


class Lazy(Generic[Value]):
    """An attribute computed on first access.

    Before Python 3.12 `functools.cached_property` holds one lock for all instances during the computation: threads wait
    for each other, and a child forked meanwhile waits for ever.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Value:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


T = TypeVar("T")
R = TypeVar("R")


class Lock(_thread.RLock):  # type: ignore[misc]  # final for type checkers alone
    """A re-entrant lock that is free in a child made by fork.

    The thread holding the lock does not exist in the child, so nobody would ever release it there. The interpreter's
    own code acquires it, not a Python method. In a Python method a KeyboardInterrupt could arrive between acquiring the
    lock and promising to release it, and all other threads would wait for ever.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        Lock._all.add(self)

    @classmethod
    def open_all(cls) -> None:
        """Release every lock, whoever holds it."""
        for lock in list(cls._all):
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the locks of `logging` and `threading` are


N_WAITING = 16
"""Threads for jobs spending most of their time waiting for another machine; also the number of concurrent requests."""

_lock = Lock()
_pools: dict[bool, ThreadPoolExecutor] = {}


def _shared_pool(*, waits: bool = False) -> ThreadPoolExecutor | None:
    """Return the pool of a kind of job; None if the interpreter is ending, and makes no pools any more."""
    with _lock:
        if waits not in _pools:
            try:
                from concurrent.futures import ThreadPoolExecutor
            except RuntimeError:
                return None
            n_threads, name = (N_WAITING, "tensorcas-wait") if waits else (config.n_threads(), "tensorcas")
            _pools[waits] = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        return _pools[waits]


def _begin_anew() -> None:
    # A child made by fork has the pools' objects but none of their threads: a job given to one would wait for ever.
    _pools.clear()
    Lock.open_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], *, window: int | None = None, waits: bool = False
) -> Iterator[R]:
    """Apply a function on the pool and yield its results in the order of the items.

    The caller takes part: it runs a call itself if no thread has begun it when its result is needed.

    Args:
        function: Must not itself use this pool: the pool's threads do not wait for each other.
        items: Consumed only as the caller takes results, so memory stays bounded.
        window: Maximum number of items under way at once; by default twice the number of threads.
        waits: Whether the function spends most of its time waiting for another machine: selects the larger pool.

    Raises:
        Exception: The first exception of a call, at its place in the order. Calls not yet begun are dropped, and those
            under way are over when it is raised.
    """
    n_threads = N_WAITING if waits else config.n_threads()
    pool = None if n_threads == 1 else _shared_pool(waits=waits)
    if pool is None:
        yield from map(function, items)
        return
    ahead = window or 2 * n_threads
    # Each item is in a list of its own, and a call takes it out: a cancelled call stays in the pool's queue for a while
    # and would keep its item alive.
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
        # The garbage collector may run this in one of the pool's own threads, so waiting here could be for oneself.
        for future, box in waiting:
            if future.cancel():
                box.clear()
        raise
    except BaseException:
        # A call under way may still write into a buffer the caller is about to reuse.
        from concurrent.futures import wait

        wait([future for future, _ in waiting if not future.cancel()])
        for _, box in waiting:
            box.clear()
        raise


def _submit(pool: ThreadPoolExecutor, function: Callable[[T], R], item: T) -> Future[R]:
    try:
        return pool.submit(function, item)
    except RuntimeError:
        # At its end the interpreter's pools accept no work, but it waits for threads: a save on one of those goes on.
        from concurrent.futures import Future

        future: Future[R] = Future()
        try:
            future.set_result(function(item))
        except Exception as error:  # noqa: BLE001 -- as a pool does
            future.set_exception(error)
        return future


def run_all(function: Callable[[T], None], items: Iterable[T], *, waits: bool = False) -> None:
    """Apply a function to every item, on the pool and in the calling thread, and return when all calls are done.

    The caller takes part; this measures faster than waiting for the pool alone (``docs/design/decisions.md``).

    Args:
        function: Must not itself use this pool.
        items: Consumed by one thread at a time.
        waits: Whether the function spends most of its time waiting for another machine: selects the larger pool.

    Raises:
        Exception: The exception of the first failed call in the order of the items. Items not yet begun are
            dropped, and calls under way are over when it is raised.
        KeyboardInterrupt: It came meanwhile, whatever else has failed; the same holds.
    """
    n_threads = len(items) if isinstance(items, Sized) else sys.maxsize
    if n_threads > 1:
        n_threads = min(n_threads, N_WAITING if waits else config.n_threads())
    pool = None if n_threads <= 1 else _shared_pool(waits=waits)
    if pool is None:
        for item in items:
            function(item)
        return
    from concurrent.futures import wait

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
        # An interrupt is not a call's failure, and no such failure may hide it.
        raise min(errors, key=lambda each: (isinstance(each[1], Exception), each[0]))[1]


def start(job: Callable[[], T], name: str) -> Future[T]:
    """Run a job on a thread of its own, at once.

    The thread is a daemon: a job waiting for a vanished client keeps no interpreter from ending.
    """
    from concurrent.futures import Future

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


_Queued = tuple[Callable[[], Any], "Future[Any]", Callable[[], float]]


class Background:
    """Runner of jobs, one after the other, on a thread that lives as long as jobs come.

    The thread is no daemon: an interpreter at its end waits for it. A child made by fork has none of its parent's jobs.
    """

    _LINGERS_S = 1.0
    """The thread waits this long for another job: a caller waits for the interpreter's lock twice to start a thread."""
    _LOOKS_S = 0.02
    """The waiting thread checks this often whether the interpreter is ending."""
    _PAUSE_LOOKS_S = 0.1
    """The same, before a job that is to begin later."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin_anew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held while a job runs."""
        self._runner: int | None = None
        """The thread of the job that runs."""
        self._has_job = threading.Condition(self._lock)
        self._jobs: deque[_Queued] = deque()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._n_waiting = 0
        """Callers that wait for jobs."""
        self._open: dict[Future[Any], None] = {}
        """The jobs that are not done or whose error nobody has seen, oldest first."""

    def submit(
        self, job: Callable[[], T], *, begin_s: Callable[[], float] = float, runs_here: bool = False
    ) -> Future[T]:
        """Queue a job after the earlier ones; run it at once in the caller if no thread can be started.

        If a KeyboardInterrupt comes meanwhile, the job may be in the queue all the same; then it runs, at the latest
        when somebody waits.

        Args:
            job: The job.
            begin_s: Returns the earliest begin, by `time.monotonic`, of it and later jobs, once it is the next. It
                counts only while nobody waits.
            runs_here: Run the job in the caller unless an earlier one is open. Its error is raised by `result` and
                `wait` as that of any other job.
        """
        from concurrent.futures import Future

        future: Future[T] = Future()
        with self._lock:
            runs_here = runs_here and not self._open
            self._open[future] = None
            self._jobs.append((job, future, begin_s))
        if runs_here:
            self._work()
        else:
            self._see_to_it()
        return future

    def _see_to_it(self) -> None:
        """Make the thread, or else the caller, run the queued jobs."""
        with self._lock:
            if not self._jobs:
                return
            if not self._is_ending:
                if self._thread is not None and self._thread.is_alive():
                    self._has_job.notify()
                    return
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=False)
                with contextlib.suppress(RuntimeError):  # there are too many
                    self._thread.start()
                    return
                self._thread = None
        self._work()

    def end(self) -> None:
        """Run later jobs in their callers: the interpreter is ending and waits for no more threads."""
        self._is_ending = True

    def result(self, future: Future[T]) -> T:
        """Wait for one job; raise its exception, once: `wait` does not raise it again.

        Raises:
            RuntimeError: The job belongs to another process, the parent of this one; or a job waits for itself or a
                later one, as a signal handler does that comes while a job runs in the caller.
        """
        with self._lock:
            if not future.done() and future not in self._open:
                raise RuntimeError("this is done by the process that began it; wait for it there")
            if not future.done() and self._runner == threading.get_ident():
                raise RuntimeError(
                    "this thread is in the middle of an earlier job, and cannot wait for its end; "
                    "in a signal handler, set a flag, and do the work once the interrupted call has returned"
                )
            self._n_waiting += 1
        try:
            self._see_to_it()  # whoever gave it may have been interrupted before
            return future.result()
        finally:
            with self._lock:
                self._n_waiting -= 1
            if future.done():
                self._forget(future)

    def wait(self, *, most: int = 0) -> None:
        """Wait for jobs queued so far; raise the exception of the first failed one nobody has seen yet.

        Args:
            most: Number of the latest jobs not to wait for.
        """
        with self._lock:
            waiting = list(self._open)
            del waiting[max(0, len(waiting) - most) :]
        for future in waiting:
            self.result(future)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._open.pop(future, None)

    def _work(self) -> None:
        is_here = threading.current_thread() is not self._thread
        while True:
            with self._lock:
                until_s = time.monotonic() + (0 if is_here else self._LINGERS_S)
                while not self._jobs and time.monotonic() < until_s and threading.main_thread().is_alive():
                    self._has_job.wait(self._LOOKS_S)
                if not self._jobs:
                    if not is_here:
                        self._thread = None
                    return
                pause_s = self._jobs[0][2]() - time.monotonic()
                if pause_s > 0 and not (is_here or self._n_waiting) and threading.main_thread().is_alive():
                    self._has_job.wait(min(pause_s, self._PAUSE_LOOKS_S))
                    continue
                first = self._jobs[0]
            self._run(first, is_here=is_here)
            del first

    def _run(self, first: _Queued, *, is_here: bool) -> None:
        """Run the first job of the queue, unless another thread has.

        It stays in the queue until it is done: an interrupt of the caller between any two calls loses no job, so that
        nobody waits for one forever.
        """
        job, future, _ = first
        with self._turn:
            if not self._jobs or self._jobs[0] is not first:
                return
            try:
                if future.running():  # its caller was interrupted, and has raised that
                    future.set_exception(RuntimeError("the job was interrupted"))
                elif not future.done():
                    future.set_running_or_notify_cancel()
                    self._runner = threading.get_ident()
                    future.set_result(job())
                self._forget(future)
            except BaseException as error:
                # It is raised where the job is waited for; but an interrupt of the caller is the caller's, at once.
                if not future.done():
                    future.set_exception(error)
                if is_here and not isinstance(error, Exception):
                    self._forget(future)
                    raise
            finally:
                self._runner = None
                self._jobs.popleft()
