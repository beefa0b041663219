"""Casts whose writers save the states of one tensor, which the code itself stores as deltas against each other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._recent import RecentManifests
from tensorcas_mlflow.store.protocol import FORMAT, new_format
from tests.protocol.casts import CHUNK_BYTES, RUN_ID, STORE_ID, Cast, open_store
from tests.protocol.interleave import blobs_of


class EachItsOwn:
    """Recent manifests by actor: actors are threads of one process that stand for processes."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._of_thread, "recent"):
            self._of_thread.recent = RecentManifests()
        return getattr(self._of_thread.recent, name)


def state(letter: str) -> Array:
    """A tensor of one chunk, a few digits of which differ from that of the next letter."""
    start = np.random.default_rng(9).normal(0, 0.02, CHUNK_BYTES // 4).astype(np.float32)
    moved = np.random.default_rng(ord(letter)).normal(0, 1e-7, CHUNK_BYTES // 4).astype(np.float32)
    return start + moved


def save_state(store: Store, letter: str, step: int) -> None:
    with store.write_checkpoint({"w": state(letter)}) as pending:
        pending.commit(RefTarget(run_id=RUN_ID, step=step))


class Series(Cast):
    """A cast in which a step holds one state, named by a letter."""

    def begin(self, states: Mapping[int, str]) -> Series:
        """Save some states, one after the other; each is a delta against one before."""
        memory = MemoryBackend()
        memory.put_new(FORMAT, [new_format(CHUNK_BYTES, STORE_ID)])
        for step, letter in states.items():
            save_state(open_store(memory), letter, step)
            self.may_hold.setdefault(step, set()).add(letter)
        self.before, self.start = states, blobs_of(memory)
        return self

    def saver(self, name: str, letter: str, step: int) -> Series:
        """Add somebody who saves a state."""

        def program(backend: Backend) -> None:
            save_state(open_store(backend), letter, step)

        self.actors[name] = program
        self.may_hold.setdefault(step, set()).add(letter)
        self.saved_by[name] = step
        return self

    def trainer(self, name: str, letters: str, *steps: int) -> Series:
        """Add somebody who saves one state after the other, with one store object."""

        def program(backend: Backend) -> None:
            store = open_store(backend)
            for letter, step in zip(letters, steps, strict=True):
                save_state(store, letter, step)

        self.actors[name] = program
        for letter, step in zip(letters, steps, strict=True):
            self.may_hold.setdefault(step, set()).add(letter)
        self.saved_by[name] = steps[-1]
        return self

    def check_tensors(self, step: int, found: Mapping[str, Array]) -> None:
        held = {letter for letter in self.may_hold[step] if found["w"].tobytes() == state(letter).tobytes()}
        assert held, f"step {step} is not what was saved"
