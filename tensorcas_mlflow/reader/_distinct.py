"""The different numbers among some."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.chunking import Offsets


def distinct(numbers: Any) -> Offsets:
    """Give the different ones of whole numbers, ascending.

    `numpy.unique` does the same, but imports masked arrays the first time, which takes longer than to read a manifest.
    """
    ordered = np.sort(numbers, axis=None)
    found: Offsets = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found
