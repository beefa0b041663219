"""Store: saves, loads and refs of one root, and the writer's side of the commit protocol.

Tensors, files and streams come in, and a ref goes out; a ref comes in, and tensors and bytes go out
(``docs/design/protocol.md``). The room imports `chunk_io`, `file_formats` and everything below them. It deletes
no pack and no manifest; a collection does (`tensorcas_mlflow.maintenance`).

| module | holds |
|---|---|
| `_store` | `Store`, which opens a root, and its refs |
| `_save`, `_batch`, `_pending` | one save, many in step, and saves that wait for their manifest |
| `_ingest`, `_sources` | bytes of a save: files, streams, arrays |
| `_bases`, `_choose`, `_encode` | bases of deltas, choice of codecs, encoding |
| `_recut`, `_shifts` | tables whose rows have moved |
| `_sketching` | sketches of the tensors of a save |
| `_sketches` | search for related checkpoints by sketches |
| `_relatives` | relatives of a model, for its lineage |
| `_shared` | refs that share chunks with a checkpoint |
| `_derivations`, `_stored_rows` | search for derived tensors, in saves and in stored checkpoints |
| `_shards` | shards of one checkpoint, stored by several processes |
| `_deltas` | deltas for maintenance |
| `_payload` | self-contained checkpoints |
| `protocol` | records, lists and tables that savers and collectors share |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.layout import Ref, RefTarget
    from tensorcas_mlflow.store._batch import PendingBatch
    from tensorcas_mlflow.store._choose import (
        CLEARLY_SMALLER,
        LEAST_DELTA_BYTES,
        MAX_PASSES,
        Policy,
        is_float,
        passes_of,
    )
    from tensorcas_mlflow.store._derivations import LEAST_DERIVED_BYTES, MOST_DERIVED_BYTES, Derived
    from tensorcas_mlflow.store._payload import (
        MANIFEST_FILE,
        PAYLOAD_FILE,
        copy_payload,
        payload_bytes,
        payload_pieces,
        read_payload,
        write_payload,
    )
    from tensorcas_mlflow.store._pending import abandon_pending, has_pending, hold_pending, take_pending
    from tensorcas_mlflow.store._relatives import Likely, find_likely, pairs_of
    from tensorcas_mlflow.store._save import PendingSave
    from tensorcas_mlflow.store._shards import (
        Box,
        JoinedRows,
        Shard,
        StoredShards,
        join_shards,
        store_shards,
        withdraw_shards,
    )
    from tensorcas_mlflow.store._shared import find_shared
    from tensorcas_mlflow.store._sketches import Sketched, Sketches, compute_sketches
    from tensorcas_mlflow.store._sources import TensorCopy
    from tensorcas_mlflow.store._store import Store, stores_below
    from tensorcas_mlflow.store._stored_rows import commit_form, find_derived

_NAMES = {
    "tensorcas_mlflow.layout": "Ref RefTarget",
    "_batch": "PendingBatch",
    "_choose": "CLEARLY_SMALLER LEAST_DELTA_BYTES MAX_PASSES Policy is_float passes_of",
    "_derivations": "LEAST_DERIVED_BYTES MOST_DERIVED_BYTES Derived",
    "_payload": ("MANIFEST_FILE PAYLOAD_FILE copy_payload payload_bytes payload_pieces read_payload write_payload"),
    "_pending": "abandon_pending has_pending hold_pending take_pending",
    "_relatives": "Likely find_likely pairs_of",
    "_save": "PendingSave",
    "_shards": "Box JoinedRows Shard StoredShards join_shards store_shards withdraw_shards",
    "_shared": "find_shared",
    "_sketches": "Sketched Sketches compute_sketches",
    "_sources": "TensorCopy",
    "_store": "Store stores_below",
    "_stored_rows": "commit_form find_derived",
}

if not TYPE_CHECKING:
    _look_up, __dir__ = lazy_names(__name__, _NAMES)

    def __getattr__(name: str) -> object:
        # Python turns an AttributeError in ``from … import`` into an error that does not name the new module.
        if name == "TensorCasStore":
            raise ImportError(
                "TensorCasStore is not in tensorcas_mlflow.store: from tensorcas_mlflow import TensorCasStore"
            )
        return _look_up(name)
