"""The index, compared with the tables of packs and made anew where it differs: every byte of it can be."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, StarvedError
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Table, make_table, read_segment, segment_bytes
from tensorcas_mlflow.pack import ENTRY, Entries
from tensorcas_mlflow.repair._holdings import Holdings
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFaults:
    """What is wrong with an index."""

    bad: Mapping[str, str]
    """Keys of segments that cannot be read or say other than the packs, and why."""
    missing: frozenset[str]
    """Packs that it does not name and should."""


def check_index(backend: Backend, holdings: Holdings) -> IndexFaults:
    """Compare the index of a store with its packs."""
    bad: dict[str, str] = {}
    named: set[str] = set()
    of_bad: set[str] = set()
    for info in list(list_blobs(backend, "index")):
        name, _, ending = info.key.removeprefix("index/").partition(".")
        if ending == "loose":
            named.add(name)
        elif ending == "arrow":
            try:
                table = read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
            except BlobNotFoundError:
                continue
            except StarvedError:
                raise
            except (CorruptError, BackendError) as error:
                bad[info.key] = error.reason
                continue
            if _is_true(table, holdings):
                named.update(table.packs)
            else:
                bad[info.key] = "it says other than the packs' own tables"
                of_bad.update(table.packs)
    whole = {name for name, pack in holdings.packs.items() if not pack.damage and pack.failure is None}
    if backend.is_remote and not bad:
        return IndexFaults(bad={}, missing=frozenset())  # packs are listed there, and need no entry of their own
    return IndexFaults(bad=bad, missing=frozenset(whole - named))


def rebuild_index(backend: Backend, holdings: Holdings, faults: IndexFaults) -> None:
    """Put in what an index lacks, and then take out what is wrong."""
    tables = {name: holdings.packs[name].entries for name in sorted(faults.missing & holdings.packs.keys())}
    if tables:
        backend.put_new(f"index/{uuid.uuid4().hex}.arrow", [segment_bytes(make_table(tables))])
    for key in faults.bad:
        backend.delete(key)
    p.tidy_index(backend, holdings.packs.keys())


def _is_true(table: Table, holdings: Holdings) -> bool:
    for number, name in enumerate(table.packs):
        pack = holdings.packs.get(name)
        if pack is None or pack.damage or pack.failure is not None:
            continue  # it is gone, or will be
        if not np.array_equal(_rows(table.entries[table.pack == number]), _rows(pack.entries)):
            return False
    return True


def _rows(entries: Entries) -> Any:
    rows = entries.copy()
    rows["effort"] = 0  # an index does not say it
    return np.sort(rows.view(f"V{ENTRY.itemsize}").ravel())
