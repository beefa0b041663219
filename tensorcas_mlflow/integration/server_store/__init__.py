"""The carrier: a store inside an MLflow server's artifact root, reached through MLflow's own artifact API.

For servers that know nothing of this package. It keeps less than a backend promises, which `CarrierBackend` and
``docs/design/protocol.md`` (Carriers) say precisely.
"""

from tensorcas_mlflow.integration.server_store._backend import CarrierBackend
from tensorcas_mlflow.integration.server_store._open import (
    SERVED_BY,
    announcement,
    find_carrier,
    is_carrier_uri,
    is_served_by_us,
    open_carrier,
    shelf_at,
)
from tensorcas_mlflow.integration.server_store._shelf import Entry, NoAnswerError, Shelf, UnreachableError

__all__ = [
    "SERVED_BY",
    "CarrierBackend",
    "Entry",
    "NoAnswerError",
    "Shelf",
    "UnreachableError",
    "announcement",
    "find_carrier",
    "is_carrier_uri",
    "is_served_by_us",
    "open_carrier",
    "shelf_at",
]
