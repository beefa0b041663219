"""Steps and series of a run: their values and their text form."""

from __future__ import annotations

import operator
from typing import SupportsIndex

DEFAULT_NAME = "checkpoint"
"""Name of a series without a name."""


def as_step(step: SupportsIndex) -> int:
    """Convert a step to an integer MLflow's database can hold.

    Raises:
        ValueError: It is no whole number, or does not fit into 64 bits.
    """
    try:
        # A NumPy integer would reach files as a Python object.
        whole = operator.index(step)
        if isinstance(step, bool):
            raise TypeError
    except TypeError as error:
        raise ValueError(f"step must be a whole number, not {step!r}") from error
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"step must fit MLflow's database, in 64 bits: {whole}")
    return whole


STEP_TEXT = r"minus-\d+|-?\d+"
"""Pattern of the texts accepted by `step_of_text`."""


def step_text(step: int) -> str:
    """Return a step's text for the name of a file: padded, so names sort like steps from 0 on."""
    return f"{step:08d}" if step >= 0 else f"minus-{-step:08d}"


def step_of_text(text: str) -> int:
    """Parse a step written by `step_text`, or a whole number."""
    return int(text.replace("minus-", "-"))
