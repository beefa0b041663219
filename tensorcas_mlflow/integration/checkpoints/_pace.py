"""Choice of the thread of a save: a thread of its own, or the caller's."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from statistics import fmean, median

from tensorcas_mlflow.base.threads import Lock

_N_NEAR = 12
"""A trial is compared with so many steps before it."""
_N_STEPS = 4
"""Number of steps of a trial."""
_LEAST_TRIALS = 3
_MOST_TRIALS = 5
"""The last trials decide together, once there are enough of them."""
_LEAST_GAP = 4
_MOST_GAP = 256
"""Bounds of the number of steps between two trials: each lost trial quadruples it, and a won one makes it the least."""
_CLEARLY_FASTER = 0.9
"""Saves in the caller win only if their steps take less than this share of steps with saves on the thread."""
_OUTLIER = 2.5
"""A longer step counts as so many medians: an evaluation of the model says nothing about saves."""


class Pace:
    """Choice between two ways to run the saves of a loop, by the time of its steps: on the thread, or in the caller.

    The thread makes a loop faster that works between its saves, and the choice begins with it. A loop that does little
    else than save gains nothing: its calls wait for the earlier save, and the threads of its training compete with the
    save for the cores. A step is the time from one save's submission to the next one's: it contains the save, or
    everything that the save slows down, and the wait for it.

    Now and then a few saves run in the other way, as a trial, less and less often. Means are compared, not medians: the
    competition for the cores makes some steps of a loop much longer, and leaves most as they are. The caller must win
    clearly, and the thread returns once it is as fast, so the choice does not flap. For one thread at a time.
    """

    def __init__(self, *, is_here: bool = False) -> None:
        """Begin without any times.

        Args:
            is_here: Whether saves run in the caller, except for trials.
        """
        self._is_here = is_here
        self._is_trial = False
        self._began_s: float | None = None
        self._near: deque[float] = deque(maxlen=_N_NEAR)
        """The last steps without a trial."""
        self._trial: list[float] = []
        """The steps of the trial under way."""
        self._trials: deque[tuple[float, float]] = deque(maxlen=_MOST_TRIALS)
        """Mean step of each trial, and of the steps before it."""
        self._gap = self._n_left = _LEAST_GAP

    def next(self, now_s: float) -> bool:
        """Return whether the next save is to run in the caller.

        Args:
            now_s: The time of the submission, once the earlier save is finished.
        """
        if self._began_s is not None:
            self._note(now_s - self._began_s)
        self._began_s = now_s
        self._is_trial = self._n_left <= 0 and len(self._near) == _N_NEAR
        self._n_left -= 1
        return self._is_here != self._is_trial

    def _note(self, step_s: float) -> None:
        if not self._is_trial:
            self._near.append(step_s)
            return
        self._trial.append(step_s)
        if len(self._trial) < _N_STEPS:
            return
        most_s = _OUTLIER * median(self._near)
        tried_s, near_s = (fmean(min(each, most_s) for each in steps) for steps in (self._trial, self._near))
        self._trial.clear()
        self._trials.append((tried_s, near_s))
        self._gap = self._n_left = _LEAST_GAP if tried_s < near_s else min(4 * self._gap, _MOST_GAP)
        all_tried_s, all_near_s = map(sum, zip(*self._trials, strict=True))
        share = 1 if self._is_here else _CLEARLY_FASTER
        if len(self._trials) >= _LEAST_TRIALS and all_tried_s < share * all_near_s:
            self._is_here = not self._is_here
            self._trials.clear()
            self._near.clear()


_MOST_PACES = 16
_paces: OrderedDict[Hashable, Pace] = OrderedDict()
"""The paces of the loops that saved last, by series."""
_lock = Lock()


def pace_of(series: Hashable) -> Pace:
    """Return the pace of a series; if there are too many, the least recently used one is forgotten."""
    with _lock:
        pace = _paces.setdefault(series, Pace())
        _paces.move_to_end(series)
        if len(_paces) > _MOST_PACES:
            _paces.popitem(last=False)
        return pace
