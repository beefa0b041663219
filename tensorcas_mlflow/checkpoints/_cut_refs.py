"""Refs of which no whole copy has reached an MLflow server: their save has died, and nobody was told that it is saved.

A ref that was to take the place of another has left the same ref, whole, as its stand-in (``docs/design/protocol.md``,
Carriers). With any other storage a ref that cannot be read has been damaged, and that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tensorcas_mlflow.blob_names import list_dir
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.store import Ref, RefTarget, Store
from tensorcas_mlflow.store.protocol import STAND_INS
from tensorcas_mlflow.threads import Lock

_logger = logging.getLogger(__name__)

_MAX_TOLD = 4096
_told: set[tuple[str, str]] = set()
"""Refs of which this process has told, by store and key."""
_lock = Lock()


def stand_ins(store: Store) -> Iterator[Ref]:
    """Read the refs that stand in for another, those which are whole."""
    for info in list_dir(store.backend, STAND_INS)[0]:
        try:
            ref = store.ref(info.key)
        except CorruptError:
            continue
        if ref is not None:
            yield ref


def stand_ins_for(store: Store, target: RefTarget) -> list[Ref]:
    """Read the refs that stand in for that of a run's step, the latest last."""
    step = (target.run_id, target.name, target.step)
    found = [ref for ref in stand_ins(store) if (ref.run_id, ref.name, ref.step) == step]
    return sorted(found, key=lambda ref: ref.created)


def explained(error: CorruptError) -> CorruptError:
    """Say of a ref that cannot be read what it is, and what to do."""
    return CorruptError(error.key, f"{error.reason}; {_CAUSE}: delete the step, or save it again with overwrite=True")


def tell(store: Store, error: CorruptError, *, has_stand_in: bool = False) -> None:
    """Warn of a ref that cannot be read, once in the life of the process."""
    with _lock:
        if (store.uri, error.key) in _told:
            return
        if len(_told) >= _MAX_TOLD:
            _told.clear()
        _told.add((store.uri, error.key))
    if has_stand_in:
        _logger.warning("the ref %r is read from its stand-in, since %s", error.key, _CAUSE)
    else:
        _logger.warning("%s", explained(error))


_CAUSE = "its save has died while it sent this"
