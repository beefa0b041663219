"""Subclasses of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


class Bare(np.ndarray[Any, Any]):
    """A subclass without code."""


class Noted(np.ndarray[Any, Any]):
    """A subclass with an attribute, which numpy's pickle loses."""

    note: Any

    def __array_finalize__(self, other: Any) -> None:
        self.note = getattr(other, "note", None)


class Unit(Noted):
    """A subclass that extends numpy's state of an array, as units do."""

    def __reduce__(self) -> Any:
        function, arguments, state = super().__reduce__()
        return function, arguments, (*state, self.note)

    def __setstate__(self, state: Any) -> None:
        self.note = state[-1]
        super().__setstate__(state[:-1])


class Odd(np.ndarray[Any, Any]):
    """A subclass that pickles in a way of its own."""

    def __reduce__(self) -> Any:
        return odd, (self.tolist(),)


def odd(values: Any) -> Odd:
    return np.array(values).view(Odd)


def noted(array: Any, note: Any, kind: type[Noted] = Noted) -> Noted:
    made = np.asarray(array).view(kind)
    made.note = note
    return made
