"""The store: saving and loading of checkpoints and files, and the refs keeping them alive."""

from tensorcas_mlflow.store._batch import PendingBatch
from tensorcas_mlflow.store._find import stores_below
from tensorcas_mlflow.store._format import is_carried
from tensorcas_mlflow.store._owner import Owner
from tensorcas_mlflow.store._payload import (
    MANIFEST_FILE,
    PAYLOAD_FILE,
    PAYLOAD_FILES,
    copy_payload,
    payload_bytes,
    payload_pieces,
    read_payload,
    write_payload,
)
from tensorcas_mlflow.store._pending import abandon_pending, has_pending, hold_pending, take_pending
from tensorcas_mlflow.store._policy import Policy
from tensorcas_mlflow.store._records import Ref, RefTarget
from tensorcas_mlflow.store._save import PendingSave
from tensorcas_mlflow.store._store import Store
from tensorcas_mlflow.store._tensors_file import TensorsFile

__all__ = [
    "MANIFEST_FILE",
    "PAYLOAD_FILE",
    "PAYLOAD_FILES",
    "Owner",
    "PendingBatch",
    "PendingSave",
    "Policy",
    "Ref",
    "RefTarget",
    "Store",
    "TensorsFile",
    "abandon_pending",
    "copy_payload",
    "has_pending",
    "hold_pending",
    "is_carried",
    "payload_bytes",
    "payload_pieces",
    "read_payload",
    "stores_below",
    "take_pending",
    "write_payload",
]


def __getattr__(name: str) -> object:
    # Python's own error for an AttributeError in ``from … import`` would not name the right module.
    if name == "TensorCasStore":
        raise ImportError(
            "TensorCasStore is not in tensorcas_mlflow.store: from tensorcas_mlflow import TensorCasStore"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
