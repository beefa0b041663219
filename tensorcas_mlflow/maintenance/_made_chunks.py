"""Chunks of derived rows, encoded in full for packs of another store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from tensorcas_mlflow.base.digest import Digests, as_keys, unique_rows
from tensorcas_mlflow.base.tensors import offsets_of
from tensorcas_mlflow.chunk_io import LastRow
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import Payload
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_BATCH_BYTES = 16 << 20


def made_payloads(
    store: Store, digests: Digests, faults: dict[bytes, str], forms: Iterable[Manifest]
) -> Iterator[Payload]:
    """Make chunks by the forms of a store, and encode each in full, none twice.

    Args:
        store: The store. Its reader compares each chunk with its digest.
        digests: The wanted chunks, distinct. Those that no form makes are left out.
        faults: Learns why a chunk of a form cannot be made, by its digest.
        forms: The manifests of the forms.
    """
    wanted = {digest.tobytes() for digest in digests}
    for form in forms:
        last = LastRow()
        for chunks in _batches(form, wanted):
            sizes = form.chunk_sizes[chunks]
            block = np.empty(int(sizes.sum()), np.uint8).data
            outs = [block[begin:end] for begin, end in pairwise(offsets_of(sizes).tolist())]
            names = [digest.tobytes() for digest in form.digests[chunks]]
            try:
                store.chunks.read_chunks(form, chunks, outs, verify=True, last=last)
            except (FormatError, NotFoundError, BackendError) as error:
                faults |= dict.fromkeys(names, str(getattr(error, "reason", error)))
                continue
            rows = form.columns.rows_of(chunks)
            typesizes = form.columns.codec_itemsizes[rows].tolist()
            begins = np.diff(rows, prepend=-1) != 0
            for name, raw, typesize, begins_row in zip(names, outs, typesizes, begins.tolist(), strict=True):
                wanted.discard(name)
                faults.pop(name, None)
                yield p.full_payload(name, raw, typesize, begins_row=begins_row)


def _batches(form: Manifest, wanted: set[bytes]) -> Iterator[np.ndarray]:
    """Yield the numbers of a form's chunks that are wanted, each different chunk once, ascending."""
    _, first, _ = unique_rows(form.digests)
    keys = np.frombuffer(b"".join(wanted), dtype="V32")
    chunks = np.sort(first[np.isin(as_keys(form.digests[first]), keys)]) if wanted else first[:0]
    ends = np.cumsum(form.chunk_sizes[chunks])
    rows = form.columns.rows_of(chunks)
    while len(chunks):
        # No batch has chunks of two rows: one of them may lack an input.
        n_of_row = int(np.searchsorted(rows, rows[0], side="right"))
        n = min(n_of_row, max(1, int(np.searchsorted(ends - ends[0], _BATCH_BYTES))))
        yield chunks[:n]
        chunks, ends, rows = chunks[n:], ends[n:], rows[n:]
