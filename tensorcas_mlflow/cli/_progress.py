"""Progress: a bar on standard error for whatever takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from tensorcas_mlflow.base import config, threads
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.base.text import size_text

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PATIENCE_S = 1.0
"""Shorter work shows no bar."""
_PAUSE_S = 0.1
_TICK_S = 1.0
"""A bar is drawn again after this long, also if the work says nothing."""
_PARTS = 1000


class ProgressBar:
    """Progress of a command at a terminal: the share, the rate, and the time left. A `Watcher` and a context manager.

    It shows nothing in the first second, in a pipe, at a terminal that only prints characters, or with ``--quiet``.
    """

    def __init__(self, what: str, *, is_quiet: bool) -> None:
        """Show nothing yet.

        Args:
            what: The work in one word, such as ``verifying``.
            is_quiet: Whether to show nothing at all.
        """
        self._what = what
        self._is_shown = not is_quiet and sys.stderr.isatty() and config.moves_cursor()
        self._begun = self._shown = time.monotonic()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._last: Progress | None = None
        self._drawing = threads.Lock()
        self._ended = threading.Event()
        self._ticks: Future[None] | None = None

    def __enter__(self) -> ProgressBar:
        if self._is_shown:
            self._ticks = threads.start(self._tick, "progress bar")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._ticks is not None:
            self._ticks.result()
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the state of the work."""
        self._last = progress
        now = time.monotonic()
        if self._is_shown and now - self._begun >= _PATIENCE_S and now - self._shown >= _PAUSE_S:
            self._draw(now)

    def _tick(self) -> None:
        """Draw the bar while the work says nothing, such as before its first bytes are done."""
        while not self._ended.wait(_TICK_S):
            self._draw(time.monotonic())

    def _draw(self, now: float) -> None:
        with self._drawing:
            self._shown = now
            if self._bar is None or self._task is None:
                self._bar = _bar()
                self._task = self._bar.add_task(self._what, total=_PARTS, figures="")
                self._bar.start()
            elapsed_s, last = now - self._begun, self._last
            share = None if last is None else share_of(last)
            self._bar.update(
                self._task,
                total=None if share is None else _PARTS,
                completed=_PARTS * (share or 0.0),
                figures=f"{time_text(elapsed_s)} so far" if last is None else figures_text(last, elapsed_s),
            )
            self._bar.refresh()

    def bytes(self, n_done: int, n_all: int) -> None:
        """Show the bytes done, and in all."""
        self(Progress(done_bytes=n_done, n_bytes=n_all))


def share_of(progress: Progress) -> float | None:
    """Return the share of the work done, from 0 to 1: by bytes, else by items; None if there is no total."""
    if progress.n_bytes:
        return min(1.0, progress.done_bytes / progress.n_bytes)
    return min(1.0, progress.n_done / progress.n) if progress.n else None


def figures_text(progress: Progress, elapsed_s: float) -> str:
    """Write the progress of some work after a time: done, share, rate, and time left at this rate."""
    share = share_of(progress)
    done = size_text(progress.done_bytes)
    said = [f"{done} of {size_text(progress.n_bytes)}" if progress.n_bytes else done]
    if progress.n:
        said.insert(0, f"{progress.n_done} of {progress.n}")
    if share is not None:
        said.append(f"{share:.0%}")
    if elapsed_s > 0:
        said.append(f"{size_text(progress.done_bytes / elapsed_s)}/s")
    if share:
        said.append(f"{time_text(elapsed_s * (1 - share) / share)} left")
    return ", ".join(said)


def time_text(seconds: float) -> str:
    """Write a duration as minutes and seconds, or with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar() -> RichProgress:
    # Work that takes a second waits for this import, others do not.
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True, highlight=False, no_color=not config.has_colors()),
        auto_refresh=False,  # `_tick` draws it again, in a thread of `base.threads`
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
