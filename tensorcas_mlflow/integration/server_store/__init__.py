"""Carrier: a store inside an MLflow server's artifact root, reached through MLflow's own artifact API.

An ``mlflow-artifacts:`` URI comes in, and a `Store` over a `CarrierBackend` goes out, for servers that know nothing of
this package. A carrier keeps fewer promises than a backend; `CarrierBackend` and ``docs/design/protocol.md`` (Carriers)
list them. The room imports the store and everything below it, and no other room of the integration.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.server_store._backend import CarrierBackend
    from tensorcas_mlflow.integration.server_store._open import (
        SERVED_BY,
        announcement,
        find_carrier,
        is_served_by_us,
        open_carrier,
        shelf_at,
    )
    from tensorcas_mlflow.integration.server_store._shelf import Entry, NoAnswerError, Shelf, UnreachableError
    from tensorcas_mlflow.integration.server_store._uri import is_carrier_uri

_NAMES = {
    "_backend": "CarrierBackend",
    "_open": "SERVED_BY announcement find_carrier is_served_by_us open_carrier shelf_at",
    "_uri": "is_carrier_uri",
    "_shelf": "Entry NoAnswerError Shelf UnreachableError",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
