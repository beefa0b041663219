"""The carrier: a store inside an MLflow server's artifact root, reached through MLflow's own artifact API.

For servers that know nothing of this package. It keeps less than a backend promises, which `CarrierBackend` and
``docs/design/protocol.md`` (Carriers) say precisely.
"""

from tensorcas_mlflow.carrier._backend import CarrierBackend
from tensorcas_mlflow.carrier._open import find_carrier, is_carrier_uri, is_served_by_us, open_carrier, shelf_at
from tensorcas_mlflow.carrier._served import SERVED_BY, announcement
from tensorcas_mlflow.carrier._shelf import Entry, NoAnswerError, Shelf, UnreachableError

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
