"""Why nothing needs a pack or a manifest, as far as that can be known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.census import Census
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError
from tensorcas_mlflow.gc._needed import in_order, learn, read_manifest
from tensorcas_mlflow.gc._survey import Survey
from tensorcas_mlflow.manifest import Manifest

Reason = Literal["dropped", "died", "uncommitted", "copied", "cut"]

IN_WORDS: dict[Reason, str] = {
    "dropped": "of dropped checkpoints",
    "died": "of dead saves",
    "uncommitted": "of saves never committed",
    "copied": "held elsewhere too",
    "cut": "cut short",
}
"""What is deleted for a reason; follows a number of bytes.

dropped: the ref is gone that named a manifest, or names another one by now. died: an intent that is given up relies on
it. uncommitted: nothing says whose it was; a save left it that was over before it committed. copied: all that is needed
of it lies in other packs too. cut: it cannot be read.
"""


def find_reasons(
    backend: Backend, census: Census, state: Survey, packs: Collection[str], manifests: Sequence[str]
) -> dict[str, Reason]:
    """Say of packs and manifests that nothing needs why that is so.

    Args:
        backend: Where they are.
        census: Comes to know what the manifests name.
        state: By which they were chosen.
        packs: Names.
        manifests: Names.
    """
    died = state.manifests_given_up
    reasons: dict[str, Reason] = {name: "died" if name in died else "dropped" for name in manifests}
    if not packs:
        return reasons
    unknown = [name for name in manifests if name not in census.manifests]
    learn(census, in_order(backend, partial(_read, backend), unknown))
    facts = census.facts
    of_dropped = facts.chunks_of([name for name in manifests if name not in died])
    of_died, live = facts.chunks_of(died), np.zeros(len(facts.digests), dtype=bool)
    given_up = facts.find(state.given_up)
    of_died[given_up[given_up >= 0]] = True
    live[facts.find(state.facts.digests[state.live])] = True
    number = {name: at for at, name in enumerate(facts.packs)}
    has = [_packs_with(mask, facts.entry_chunk, facts.entry_pack, len(number)) for mask in (live, of_died, of_dropped)]
    for name in packs:
        if name in state.unreadable:
            reasons[name] = "cut"
            continue
        kinds: tuple[Reason, ...] = ("copied", "died", "dropped")
        found = [kind for kind, mask in zip(kinds, has, strict=True) if mask[number[name]]]
        reasons[name] = found[0] if found else "uncommitted"
    return reasons


def _packs_with(chosen: np.ndarray, chunk: np.ndarray, pack: np.ndarray, n_packs: int) -> np.ndarray:
    """For each pack whether it holds one of some chunks."""
    return np.bincount(pack[chosen[chunk]], minlength=n_packs) > 0


def _read(backend: Backend, name: str) -> tuple[str, Manifest, int] | None:
    """Read a manifest that nobody needs; None if that cannot be done."""
    try:
        return read_manifest(backend, name, lambda: "nobody")
    except (BlobNotFoundError, CorruptError):
        return None
