"""Measurement of this machine's speed at reading a store's packs."""

from __future__ import annotations

import contextlib

from tensorcas_mlflow.backends import Backend, BlobFile
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.readplan import Calibration, calibrate, keep_rule
from tensorcas_mlflow.store._packs import list_packs

_MOST_MEASURED = 16
"""Number of packs opened for the measurement."""


def calibrate_on(backend: Backend) -> Calibration:
    """Measure on the largest packs of a store, and keep the rule; see `Store.calibrate`."""
    with contextlib.ExitStack() as opened:
        files: list[BlobFile] = []
        for name, _ in sorted(list_packs(backend), key=lambda pack: -pack[1])[:_MOST_MEASURED]:
            file = backend.open_file(pack_key(name))
            if file is not None:
                files.append(opened.enter_context(file))
        found = calibrate(files)
    keep_rule(found.rule)
    return found
