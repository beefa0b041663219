"""Deletion of holdings that MLflow has forgotten: plan, then execute."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.base.notebook import PrintedPlan
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.integration.forgotten._holdings import Holding, drop_holding, folders_of_mlflow, look_again
from tensorcas_mlflow.integration.forgotten._mlflow import Asked, Registry, Tracker, ask
from tensorcas_mlflow.store import Store

_PROXIED = "mlflow-artifacts"


def shown_folders(
    store: Store, trackers: Sequence[Tracker], asked: Mapping[str, Sequence[Asked]]
) -> tuple[set[str], bool]:
    """Find the folders owned by the tracking stores.

    Args:
        store: The store to plan for.
        trackers: The tracking stores asked.
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
    for location in (each.location for tracker in trackers for each in tracker.experiments):
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
    """Return a place in comparable form: the real path of a folder of ours, or a URI."""
    if is_ours(uri):
        try:
            root = Root.parse(uri)
        except ValueError:
            return uri.rstrip("/")
        return os.path.realpath(root.folder) if root.is_local else root.uri
    return uri.rstrip("/")


def _proxied_path(uri: str) -> str | None:
    """Return the path in a URI of a server's artifacts, relative to the server's artifact root; None for other URIs."""
    parts = urlsplit(uri)
    path = unquote(parts.path).strip("/")  # as the server's framework decodes it
    return path if parts.scheme == _PROXIED and path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Unknown holdings of one experiment that are kept, with the reason."""

    experiment: str
    n_holdings: int
    reason: str
    can_be_named: bool
    """True if naming the experiment's folder makes them orphans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanPlan(PrintedPlan):
    """Plan for deleting orphans, as of its making."""

    store: Store = field(repr=False)
    trackers: Sequence[Tracker] = field(repr=False)
    registries: Sequence[Registry] = field(repr=False)
    holdings: tuple[Holding, ...] = ()
    kept: tuple[Kept, ...] = ()

    def __str__(self) -> str:
        if not self.holdings and not self.kept:
            return "MLflow knows everything that this store holds"
        lines = [
            f"delete {each.kind} {each.id}: {count_text(len(each.refs), 'ref')}, "
            f"{count_text(each.n_plain, 'plain file')} ({size_text(each.plain_bytes)})"
            for each in self.holdings
        ]
        lines += [f"keep {each.n_holdings} of experiment {each.experiment!r}: {each.reason}" for each in self.kept]
        return "\n".join(lines)

    def execute(self) -> tuple[Holding, ...]:
        """Drop the refs and remove the plain files of the orphans; the next collection frees their bytes.

        Each orphan is checked and asked about again just before its deletion. An orphan written to or known again since
        is spared.

        Returns:
            The dropped orphans.

        Raises:
            BackendError: A tracking store or registry did not answer, or the storage failed; the rest is as it was.
        """
        dropped = []
        registered = _registered(self.registries)
        for holding in self.holdings:
            is_unchanged = look_again(self.store, holding) == holding
            if is_unchanged and holding.id not in registered and not ask(self.trackers, holding).roots:
                drop_holding(self.store, holding)
                dropped.append(holding)
        return tuple(dropped)


def plan_orphans(
    store: Store,
    holdings: Sequence[Holding],
    *,
    trackers: Sequence[Tracker],
    registries: Sequence[Registry],
    grace_s: float,
    folders: Collection[str] = (),
) -> OrphanPlan:
    """Find the holdings of runs, logged models and traces unknown to MLflow.

    Args:
        store: The store to plan for.
        holdings: All holdings of the store; see `find_holdings`.
        trackers: All tracking stores with artifacts in it. A holding known to any of them stays.
        registries: All model registries with versions in it. A holding needed by a version stays.
        grace_s: More recently written holdings are left alone.
        folders: Experiments' folders, as in `Holding.experiment`, confirmed by the user as the tracking stores' own.

    Raises:
        ValueError: The tracking stores have nothing to do with this store, or a folder holds nothing of MLflow's.
        BackendError: A tracking store or registry did not answer, or the storage failed.
    """
    asked: dict[str, list[Asked]] = {}
    for holding in holdings:
        asked.setdefault(holding.experiment, []).append(ask(trackers, holding))
    for folder in folders:
        if folder not in asked:
            raise ValueError(_refusal_of_folder(store, folder))
    if all(one.roots for each in asked.values() for one in each):
        return OrphanPlan(store=store, trackers=trackers, registries=registries)
    shown, keeps_anything_here = shown_folders(store, trackers, asked)
    if not keeps_anything_here:
        # Plain files alone may also belong to another artifact root of MLflow.
        if folders or any(holding.refs for holding in holdings):
            raise ValueError(_refusal(store, trackers))
        return OrphanPlan(store=store, trackers=trackers, registries=registries)
    judge = _Judge(
        name=_names(trackers),
        oldest_s=min((each.made_s for tracker in trackers for each in tracker.experiments), default=0.0),
        before_s=time.time() - grace_s,
        registered=_registered(registries),
    )
    orphans: list[Holding] = []
    kept: list[Kept] = []
    for experiment, each in asked.items():
        gone, others = judge(experiment, each, is_shown=experiment in shown, is_named=experiment in folders)
        orphans += gone
        kept += (left for left in others if left.n_holdings)
    return OrphanPlan(store=store, trackers=trackers, registries=registries, holdings=tuple(orphans), kept=tuple(kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """Applies the rules of this module to the holdings of one experiment."""

    name: str
    oldest_s: float
    before_s: float
    registered: Collection[str]

    def __call__(
        self, experiment: str, asked: Sequence[Asked], *, is_shown: bool, is_named: bool
    ) -> tuple[list[Holding], list[Kept]]:
        """Return the orphans, and the unknown holdings to keep."""

        def keep(holdings: Sequence[Holding], reason: str, *, can_be_named: bool = True) -> Kept:
            return Kept(experiment=experiment, n_holdings=len(holdings), reason=reason, can_be_named=can_be_named)

        unknown = [one.holding for one in asked if not one.roots and one.holding.newest_s <= self.before_s]
        in_use = keep(
            [holding for holding in unknown if holding.id in self.registered],
            "registered model versions are loaded from there",
            can_be_named=False,
        )
        unknown = [holding for holding in unknown if holding.id not in self.registered]
        if is_named:
            return unknown, [in_use]
        if not is_shown:
            # Plain files alone may also belong to another artifact root of MLflow.
            ours = [holding for holding in unknown if holding.refs]
            return [], [in_use, keep(ours, f"no evidence links the folder to {self.name}")]
        knows = [bool(one.roots) for one in asked if one.holding.kind == "run"]
        if 2 * sum(knows) < len(knows):
            reason = f"{self.name} knows only {sum(knows)} of the {len(knows)} runs with artifacts there"
            return [], [in_use, keep(unknown, reason)]
        older = [holding for holding in unknown if holding.newest_s < self.oldest_s]
        gone = [holding for holding in unknown if holding.newest_s >= self.oldest_s]
        return gone, [in_use, keep(older, f"they are older than every experiment of {self.name}")]


def _registered(registries: Sequence[Registry]) -> set[str]:
    return {each for registry in registries for each in registry.registered_ids()}


def _refusal(store: Store, trackers: Sequence[Tracker]) -> str:
    return (
        f"{_names(trackers)} knows nothing in {store.uri!r}, and none of its experiments keeps artifacts there, so it "
        "cannot identify orphans: pass the tracking store of the runs in this store, or log a run to it first"
    )


def _refusal_of_folder(store: Store, folder: str) -> str:
    if folder in folders_of_mlflow(store):
        return (
            f"MLflow keeps the artifacts in {folder or '.'!r} in folders of its own: remove the folders of deleted "
            "models, models/m-…; a collection without --folder then frees their content in the store"
        )
    return f"no run, logged model or trace has artifacts in the folder {folder or '.'!r} of the store"


def _names(trackers: Sequence[Tracker]) -> str:
    return " and ".join(tracker.name for tracker in trackers)
