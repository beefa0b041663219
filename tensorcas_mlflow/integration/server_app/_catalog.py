"""The stores of this server: found at its artifact roots and at the artifact locations of experiments."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2s
from itertools import islice
from urllib.parse import urlsplit

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import NotFoundError, TensorCasError
from tensorcas_mlflow.integration._home import artifact_place
from tensorcas_mlflow.integration.server_store import is_carrier_uri
from tensorcas_mlflow.store import Store, stores_below

_log = logging.getLogger(__name__)

_MOST_STORES = 100
_MOST_FOLDERS = 2_000
"""Most local folders to search for stores below an artifact root without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store of this server."""

    id: str
    """Name of it in addresses: a digest of its root. Copies of a store have one id of the store, but two of these."""
    store: Store


def place_of(store: Store) -> Place:
    """Name a store."""
    return Place(id=blake2s(store.uri.encode(), digest_size=6).hexdigest(), store=store)


def own_stores() -> list[Place]:
    """Return the stores at this server's own artifact roots, or below them, and the store of TENSORCAS_STORE.

    Scheduled maintenance touches these and no others: a client can name any place as an experiment's location.
    """
    places: dict[str, Place] = {}
    for root in (*config.server_roots(), *filter(None, [config.store_uri()])):
        lookup = None if is_carrier_uri(root) else _lookup(root)
        if lookup is None:
            continue
        found = _find(lookup)
        if found is not None:
            places[found.id] = found
            continue
        try:
            for below in islice(stores_below(lookup, most_folders=_MOST_FOLDERS), _MOST_STORES):
                place = _find(below)
                if place is not None:
                    places[place.id] = place
        except (TensorCasError, ValueError) as error:
            _log.warning("no stores are found below %s: %s", root, error)
    return list(places.values())


def stores_of(locations: Iterable[str]) -> list[Place]:
    """Return the stores at artifact locations of experiments, each once; proxied ones are the server's own."""
    places: dict[str, Place] = {}
    has_proxied = False
    for location in dict.fromkeys(locations):
        if is_carrier_uri(location):
            has_proxied = True
            continue
        lookup = _lookup(location)
        found = None if lookup is None else _find(lookup)
        if found is not None:
            places[found.id] = found
    if has_proxied or config.store_uri() is not None:
        places |= {place.id: place for place in own_stores()}
    return list(places.values())


def _lookup(uri: str) -> Root | None:
    try:
        # A location in a scheme of another service is no place for a store of ours.
        if not is_ours(uri) and urlsplit(uri).scheme not in ("", "file"):
            return None
        found = artifact_place(uri)
        return None if found is None else found.root
    except ValueError:
        return None


def _find(lookup: Root) -> Place | None:
    try:
        return place_of(Store.find(lookup)[0])
    except (NotFoundError, ValueError):
        return None
    except TensorCasError as error:
        _log.warning("the store around %s cannot be opened: %s", lookup, error)
        return None
