"""Steps of a run."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def as_step(step: SupportsIndex) -> int:
    """Read a step as MLflow's database can hold it.

    Raises:
        ValueError: It is no whole number, or one that does not fit into 64 bits.
    """
    try:
        # A NumPy integer would be written into files as a Python object.
        whole = operator.index(step)
    except TypeError as error:
        raise ValueError(f"step must be a whole number, not {step!r}") from error
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"step must fit MLflow's database, in 64 bits: {whole}")
    return whole
