"""Engines: processes of this machine or of a cluster that apply a function to items.

The only module that starts processes. An engine gives each item to one worker. A worker that dies is replaced, and its
item is tried again, so a function must give the same result each time. A worker uses its share of the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import StarvedError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

T = TypeVar("T")
R = TypeVar("R")

MOST_DEATHS = 3
"""An item is given up when so many workers have died of it."""
_ENDS_S = 5.0
"""A worker told to end is killed after this long."""


class Engine(Protocol):
    """Workers that apply a function to items."""

    @property
    def n_workers(self) -> int:
        """Items that are worked on at once."""

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        """Apply a function to items, in no order.

        Args:
            function: Picklable, as are its items and results. It may be called more than once for an item.
            items: Consumed as workers become free, so memory stays bounded.

        Yields:
            For each item its number, from 0, and its result, as soon as it is there.

        Raises:
            Exception: The exception of a call. The other calls are stopped.
            StarvedError: An item was given up, since its workers died again and again.
        """

    def kept(self) -> AbstractContextManager[None]:
        """Let the calls of `map` in this context use the same workers."""


class _Outcome(NamedTuple):
    """Result of a call, or its error."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the result.

        Raises:
            Exception: The error, if there is one.
        """
        if self.error is not None:
            raise self.error
        return self.value


def _attempt(function: Callable[[Any], Any], item: Any, n_threads: int) -> _Outcome:
    """Call a function in a worker. Errors travel as values, since clusters wrap what a call raises."""
    import pickle
    import traceback

    config.set_threads(n_threads)
    try:
        return _Outcome(function(item))
    except Exception as error:  # noqa: BLE001 -- it is raised where the result is taken
        said = f"in a worker:\n{traceback.format_exc()}"
        error.add_note(said)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 -- another program's error may refuse it in any way
            return _Outcome(error=RuntimeError(said))
        return _Outcome(error=error)


def _given_up(reason: str) -> StarvedError:
    return StarvedError(
        "finish", "a part of the work", f"{reason}, most likely for want of memory; use fewer workers, or none"
    )


def in_order(results: Iterable[tuple[int, R]]) -> Iterator[R]:
    """Yield the results of an engine in the order of the items, holding those that come early."""
    early: dict[int, R] = {}
    wanted = 0
    for number, result in results:
        early[number] = result
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1


def map_in_order(engine: Engine, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function to items, and yield the results in the order of the items.

    Twice as many items as there are workers are under way or held, so memory stays bounded. See `Engine.map`.
    """
    waiting = iter(items)
    with engine.kept():
        while some := list(islice(waiting, 2 * engine.n_workers)):
            yield from in_order(engine.map(function, some))


# --- processes of this machine


class LocalProcesses:
    """New processes of this machine, for the time of each `map`, or of `kept`."""

    def __init__(self, n_workers: int) -> None:
        """Start nothing yet.

        Args:
            n_workers: Processes at once, from 1 on.

        Raises:
            ValueError: It is less than 1.
        """
        if n_workers < 1:
            raise ValueError(f"the number of processes is from 1 on, not {n_workers}")
        self._n_workers = n_workers
        self._n_keeping = 0
        self._kept: list[_Worker] = []

    @property
    def n_workers(self) -> int:
        return self._n_workers

    @contextmanager
    def kept(self) -> Iterator[None]:
        self._n_keeping += 1
        try:
            yield
        finally:
            self._n_keeping -= 1
            if self._n_keeping == 0:
                while self._kept:
                    self._kept.pop().end()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        from multiprocessing.connection import wait

        waiting = (_Job(number, item) for number, item in enumerate(items))
        again: list[_Job] = []
        idle, self._kept = self._kept, []
        busy: dict[Any, _Worker] = {}
        n_threads = max(1, config.n_threads() // self.n_workers)
        try:
            while True:
                while len(busy) < self.n_workers and (job := again.pop() if again else next(waiting, None)) is not None:
                    worker = idle.pop() if idle else _Worker(n_threads)
                    busy[worker.pipe] = worker
                    worker.give(function, job)
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    worker = busy.pop(pipe)
                    job, outcome = worker.take()
                    if outcome is not None:
                        idle.append(worker)
                        yield job.number, outcome.get()
                        continue
                    if job.n_deaths + 1 == MOST_DEATHS:
                        raise _given_up(f"{MOST_DEATHS} processes died of it, the last one {worker.end()}")
                    worker.end()
                    again.append(_Job(job.number, job.item, job.n_deaths + 1))
        finally:
            # Also at an interrupt: workers ignore it, so that none of them prints a traceback.
            for worker in busy.values():
                worker.end()
            if self._n_keeping:
                self._kept += idle
            else:
                for worker in idle:
                    worker.end()


class _Job(NamedTuple):
    """One item."""

    number: int
    item: Any
    n_deaths: int = 0
    """Workers that have died of it."""


class _Worker:
    """One process, and the job it has."""

    def __init__(self, n_threads: int) -> None:
        from multiprocessing import get_context

        # A forked child has the locks of threads that do not exist there.
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, n_threads), daemon=True)
        self._process.start()
        theirs.close()  # so that its death ends the pipe
        self._job: _Job | None = None

    def give(self, function: Callable[[Any], Any], job: _Job) -> None:
        """Give it a job. If it is dead, `take` says so."""
        self._job = job
        with suppress(OSError):
            self.pipe.send((function, job.item))

    def take(self) -> tuple[_Job, _Outcome | None]:
        """Return its job and the outcome; None if it has died."""
        if self._job is None:
            raise RuntimeError("a worker without a job has no outcome")
        job, self._job = self._job, None
        try:
            return job, self.pipe.recv()
        except (EOFError, OSError):
            return job, None

    def end(self) -> str:
        """End it, and return how it has ended, in words."""
        self.pipe.close()
        if self._job is not None:
            self._process.terminate()
        self._process.join(_ENDS_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        self._process.close()
        return f"by signal {-code}" if code < 0 else f"with exit status {code}"


def _work(pipe: Connection, n_threads: int) -> None:
    """Apply the functions to the items that come through a pipe, until it ends."""
    import pickle
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            function, item = pipe.recv()
            outcome = _attempt(function, item, n_threads)
            try:
                answer = pickle.dumps(outcome)
            except Exception as error:  # noqa: BLE001 -- the caller has to learn why there is no answer
                failed = RuntimeError(f"a worker's result cannot be sent: {error}; it is {outcome!r:.1000}")
                answer = pickle.dumps(_Outcome(error=failed))
            pipe.send_bytes(answer)


# --- clusters


class RayCluster:
    """Workers of a Ray cluster: the one this program is connected to, else that of RAY_ADDRESS, else a new local one.

    Each task takes one CPU. The package has to be installed on all nodes, and they have to reach the store by its URI.
    """

    def __init__(self) -> None:
        """Connect.

        Raises:
            ImportError: Ray is not installed.
        """
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False, configure_logging=False)

    @property
    def n_workers(self) -> int:
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def kept(self) -> AbstractContextManager[None]:
        return nullcontext()

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[int, R]]:
        import ray

        call = ray.remote(num_cpus=1, max_retries=MOST_DEATHS - 1)(_attempt)
        numbers: dict[Any, int] = {}

        def take() -> tuple[int, R]:
            [done], _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(done)
            try:
                outcome: _Outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                raise _given_up(f"Ray gave up its task: {error}") from error
            return number, outcome.get()

        try:
            for number, item in enumerate(items):
                # Twice as many as there are workers, so that none waits for its next item.
                if len(numbers) >= 2 * self.n_workers:
                    yield take()
                numbers[call.remote(function, item, 1)] = number
            while numbers:
                yield take()
        finally:
            for task in numbers:
                ray.cancel(task)


ENGINES: Sequence[str] = ("local", "ray")


def open_engine(name: str, n_workers: int | None = None) -> Engine | None:
    """Open an engine by its name.

    Args:
        name: One of `ENGINES`.
        n_workers: Processes of the engine ``local``; a cluster has its own number.

    Returns:
        None for one local process, which is this one: its threads use all cores.

    Raises:
        ImportError: The package of the engine is not installed.
        ValueError: There is no such engine, or ``n_workers`` is given to a cluster.
    """
    if name == "local":
        return None if n_workers is None or n_workers == 1 else LocalProcesses(n_workers)
    if n_workers is not None:
        raise ValueError(f"the number of workers of {name} is that of its cluster: leave out the number (CLI: --jobs)")
    if name == "ray":
        return RayCluster()
    raise ValueError(f"there is no engine {name!r}: choose one of {', '.join(ENGINES)}")
