"""Steps and series of a run."""

from __future__ import annotations

import operator
from typing import SupportsIndex

DEFAULT_NAME = "checkpoint"
"""What a series is called that nobody has given a name."""


def as_step(step: SupportsIndex) -> int:
    """Read a step as MLflow's database can hold it.

    Raises:
        ValueError: It is no whole number, or one that does not fit into 64 bits.
    """
    try:
        # A NumPy integer would be written into files as a Python object.
        whole = operator.index(step)
        if isinstance(step, bool):
            raise TypeError
    except TypeError as error:
        raise ValueError(f"step must be a whole number, not {step!r}") from error
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"step must fit MLflow's database, in 64 bits: {whole}")
    return whole


STEP_TEXT = r"minus-\d+|-?\d+"
"""Matches what `step_of_text` reads."""


def step_text(step: int) -> str:
    """Write a step for the name of a file: padded, so that names sort as steps do from 0 on."""
    return f"{step:08d}" if step >= 0 else f"minus-{-step:08d}"


def step_of_text(text: str) -> int:
    """Read a step as `step_text` writes it, or as a whole number."""
    return int(text.replace("minus-", "-"))
