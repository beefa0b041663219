"""Which holdings MLflow has forgotten: plan, then execute.

MLflow's tracking store is asked about each run, logged model and trace the store holds something for. What it does not
know any more is an orphan. But to a tracking store that is asked in error everything is unknown. So its word is taken
only

* for experiments' folders that are shown to be its own (`_whose.py`);
* if it knows at least half of the runs that hold artifacts there. MLflow deletes a run's artifacts before it forgets
  the run, so unknown ones are rare: they come of a deletion that met an upload, or of a database that is not the one
  that was written to. Models and traces are not counted: MLflow forgets them and leaves their artifacts, so that a
  folder may well hold more forgotten models than known ones;
* for what was written after its oldest experiment was made, for nothing else can it have forgotten. A database begun
  anew shows by this.

And what a registered model version is loaded from stays, though MLflow has forgotten whose it was.

A user who knows better names the folder; then only the last rule is left. Even so a tracking store that keeps nothing
at all in this store is refused: one of the two was named wrongly. Where several tracking stores share a root, all of
them have to be asked. Nothing in a store tells that it is so.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tensorcas_mlflow.orphans._holdings import Holding, drop_holding, folders_of_mlflow, look_again
from tensorcas_mlflow.orphans._tracker import Asked, Registry, Tracker, ask
from tensorcas_mlflow.orphans._whose import shown_folders
from tensorcas_mlflow.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Holdings of one experiment that no tracking store knows and that are left alone, and why."""

    experiment: str
    n_holdings: int
    reason: str
    can_be_named: bool
    """Whether naming the experiment's folder makes them orphans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanPlan:
    """What is to be dropped, as things stand."""

    store: Store = field(repr=False)
    trackers: Sequence[Tracker] = field(repr=False)
    registries: Sequence[Registry] = field(repr=False)
    holdings: tuple[Holding, ...] = ()
    kept: tuple[Kept, ...] = ()

    def execute(self) -> tuple[Holding, ...]:
        """Drop the refs and remove the plain files of the orphans; the next collection frees what only they needed.

        Each is looked at and asked about once more just before. One that was written to meanwhile, or that has come to
        be known, is spared.

        Returns:
            Those that were dropped.

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
    """Find what a store holds for runs, logged models and traces that MLflow does not know any more.

    Args:
        store: Which.
        holdings: All there are in it; see `find_holdings`.
        trackers: All tracking stores that keep artifacts in it. What one of them knows stays.
        registries: All model registries that load versions from it. What one of them loads stays.
        grace_s: What was written to more recently is left alone.
        folders: Experiments' folders, as `Holding.experiment` has them, that the user knows to be those of the tracking
            stores.

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
        # Plain files alone may as well be those of a root of MLflow's own.
        if folders or any(holding.refs for holding in holdings):
            raise ValueError(_refusal(store, trackers))
        return OrphanPlan(store=store, trackers=trackers, registries=registries)
    judge = _Judge(
        name=_names(trackers),
        oldest_s=min((each.made_s for tracker in trackers for each in tracker.experiments()), default=0.0),
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
        """Give the orphans, and what is kept though it is unknown."""

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
            # Plain files alone may as well be those of a root of MLflow's own.
            ours = [holding for holding in unknown if holding.refs]
            return [], [in_use, keep(ours, f"nothing shows that the folder is one of {self.name}")]
        knows = [bool(one.roots) for one in asked if one.holding.kind == "run"]
        if 2 * sum(knows) < len(knows):
            reason = f"{self.name} knows only {sum(knows)} of the {len(knows)} runs that have artifacts there"
            return [], [in_use, keep(unknown, reason)]
        older = [holding for holding in unknown if holding.newest_s < self.oldest_s]
        gone = [holding for holding in unknown if holding.newest_s >= self.oldest_s]
        return gone, [in_use, keep(older, f"they are older than anything that {self.name} knows")]


def _registered(registries: Sequence[Registry]) -> set[str]:
    return {each for registry in registries for each in registry.registered_ids()}


def _refusal(store: Store, trackers: Sequence[Tracker]) -> str:
    return (
        f"nothing in {store.uri!r} is known to {_names(trackers)}, and none of its experiments has its artifacts "
        "there, so it cannot tell what is gone: give the tracking store that the runs there were logged to, or log to "
        "it first"
    )


def _refusal_of_folder(store: Store, folder: str) -> str:
    if folder in folders_of_mlflow(store):
        return (
            f"MLflow keeps the artifacts in {folder or '.'!r} in folders of its own: remove those of the models that "
            "are gone, models/m-…, and what the store keeps for them is dropped without --folder"
        )
    return f"no run, logged model or trace has artifacts in the folder {folder or '.'!r} of the store"


def _names(trackers: Sequence[Tracker]) -> str:
    return " and ".join(tracker.name for tracker in trackers)
