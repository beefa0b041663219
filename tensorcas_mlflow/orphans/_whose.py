"""Which experiments' folders in a store are shown to be those of a tracking store.

A tracking store may be asked in error: a staging server's, one of two that share a root, one begun anew. An id is 128
random bits, so where it knows one and keeps the artifacts at this very place, the folder is its own; and so it is where
one of its experiments, deleted or not, has the folder as its artifact location. Locations like ``mlflow-artifacts:/7``
say nothing by themselves, since every server has a 7; they count once a run, model or trace has shown which folder they
are relative to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.orphans._tracker import Asked, Tracker
from tensorcas_mlflow.store import Store

_PROXIED = "mlflow-artifacts"


def shown_folders(
    store: Store, trackers: Sequence[Tracker], asked: Mapping[str, Sequence[Asked]]
) -> tuple[set[str], bool]:
    """Find the folders that are the tracking stores' own.

    Args:
        store: Which.
        trackers: Those that were asked.
        asked: All holdings, by the folder of their experiment.

    Returns:
        The folders, as keys of ``asked``; and whether the tracking stores keep anything in this store at all.
    """
    top = _in_one_form(store.uri)
    shown: set[str] = set()
    servers_roots: set[str] = set()
    for experiment, each in asked.items():
        for one in each:
            place = _place(store, one.holding.root, is_elsewhere=one.holding.is_elsewhere)
            for root in one.roots:
                path = _proxied_path(root)
                if path is not None and place.endswith(f"/{path}"):
                    servers_roots.add(place.removesuffix(f"/{path}"))
                    shown.add(experiment)
                elif _in_one_form(root) == place:
                    shown.add(experiment)
    locations: set[str] = set()
    for location in (each.location for tracker in trackers for each in tracker.experiments()):
        path = _proxied_path(location)
        locations.update([_in_one_form(location)] if path is None else [f"{root}/{path}" for root in servers_roots])
    for experiment, each in asked.items():
        if _place(store, experiment, is_elsewhere=each[0].holding.is_elsewhere) in locations:
            shown.add(experiment)
    return shown, bool(shown) or any(PurePosixPath(location).is_relative_to(top) for location in locations)


def _place(store: Store, place: str, *, is_elsewhere: bool) -> str:
    if is_elsewhere:
        return _in_one_form(place)
    root = Root.parse(store.uri)
    return os.path.join(_in_one_form(root.uri), place).rstrip("/") if root.is_local else root.joined(place).uri


def _in_one_form(uri: str) -> str:
    """Write a place as places are compared: the real path of a folder of ours, or a URI."""
    if is_ours(uri):
        try:
            root = Root.parse(uri)
        except ValueError:
            return uri.rstrip("/")
        return os.path.realpath(root.folder) if root.is_local else root.uri
    return uri.rstrip("/")


def _proxied_path(uri: str) -> str | None:
    """Give the path of a URI of a server's artifacts, relative to where that server keeps them; None for other URIs."""
    parts = urlsplit(uri)
    path = unquote(parts.path).strip("/")
    return path if parts.scheme == _PROXIED and path else None
