"""Content of each page, as values, and only what the sender may see."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import without_secrets
from tensorcas_mlflow.integration.server_app._access import (
    Access,
    model_aliases,
    model_version,
    model_versions,
    readable_models,
    readable_runs,
)
from tensorcas_mlflow.integration.server_app._catalog import Place, own_stores, stores_of
from tensorcas_mlflow.integration.server_app._jobs import Jobs, Known
from tensorcas_mlflow.integration.server_app._survey import (
    Health,
    StoreSurvey,
    check_health,
    compare,
    find_lineage,
    step_of,
    survey,
)
from tensorcas_mlflow.integration.server_app._tracking import Named, find_models, find_runs
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import Encoded, OwnedBytes
from tensorcas_mlflow.reader import CheckpointDiff, Lineage, Relation

ROWS = 100
"""Rows of one page of a list."""
MOST_TENSORS = 500
_FRESH_S = 5.0
_HEALTH_FRESH_S = 60.0
_WAIT_S = 0.4
_NOTHING = OwnedBytes(0, 0, 0, 0)
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class NotThereError(Exception):
    """There is no such thing, or the sender may not know of it: the two look alike."""


class StoreLine(NamedTuple):
    """A store."""

    id: str
    uri: str | None
    """Its root; None for senders who do not see everything."""
    n_refs: int
    """Checkpoints, models and files that the sender sees."""
    needed_bytes: int | None
    n_damaged: int
    at_s: float | None
    """Unix time of the figures; None while there are none."""
    error: str | None


class ExperimentLine(NamedTuple):
    """An experiment with bytes in a store."""

    id: str
    name: str
    is_deleted: bool
    n_runs: int
    owned: OwnedBytes


class OverviewPage(NamedTuple):
    """All stores and experiments."""

    stores: list[StoreLine]
    experiments: list[ExperimentLine]
    others: OwnedBytes | None
    """Content that no experiment of MLflow owns; None for senders who do not see everything."""
    is_pending: bool


class RunLine(NamedTuple):
    """A run with bytes in a store."""

    id: str
    name: str
    is_deleted: bool
    owned: OwnedBytes


class ModelLine(NamedTuple):
    """A logged model."""

    id: str
    name: str
    run_id: str | None
    store: str
    key: str
    owned: OwnedBytes


Sort = Literal["freed", "shared", "added", "name"]


class ExperimentPage(NamedTuple):
    """Runs and models of one experiment."""

    id: str
    name: str
    owned: OwnedBytes
    runs: list[RunLine]
    n_runs: int
    models: list[ModelLine]
    n_models: int
    page: int
    sort: Sort
    most_bytes: int
    is_pending: bool


class StepLine(NamedTuple):
    """A checkpoint, model or file."""

    store: str
    key: str
    label: str
    kind: str
    name: str | None
    step: int | None
    created: str
    owned: OwnedBytes
    model_id: str | None = None
    """The logged model that it belongs to."""

    @property
    def is_checkpoint(self) -> bool:
        """True for a checkpoint, and for the file of one that a client logged through a server."""
        return self.kind == "checkpoint" or self.step is not None

    @property
    def words(self) -> str:
        """Its name on a page."""
        kind = "checkpoint" if self.model_id is None else "model"
        return self.label if self.step is None else f"{self.name or kind} step {self.step}"

    @property
    def side(self) -> str:
        """Its name as a side of a comparison; see `Sender.diff`."""
        return f"{self.store}:{self.key}"


class RunPage(NamedTuple):
    """Checkpoints, models and files of one run."""

    id: str
    name: str
    experiment_id: str
    experiment_name: str
    owned: OwnedBytes
    refs: list[StepLine]
    """Series by series, the latest step first; then models and files."""
    n_refs: int
    page: int
    is_pending: bool


class TensorLine(NamedTuple):
    """A tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


class RelationLine(NamedTuple):
    """A relative of a checkpoint."""

    words: str
    is_older: bool
    kind: str
    share_equal: float
    n_changed: int
    n_added: int
    n_removed: int
    store: str
    key: str


class CheckpointPage(NamedTuple):
    """One checkpoint, model or file."""

    line: StepLine
    run: Named | None
    model: Named | None
    flavor: str | None
    metrics: Mapping[str, float]
    n_tensors: int
    n_bytes: int
    tensors: list[TensorLine]
    """Those of its page, the largest first."""
    before: StepLine | None
    """The previous step of the series."""
    relatives: list[RelationLine] | None
    """The nearest first; None while they are unknown."""
    lineage_error: str | None
    is_pending: bool
    page: int = 1
    """Of the list of its tensors."""


class ChangeLine(NamedTuple):
    """A tensor that differs."""

    name: str
    change: str
    n_bytes: int
    relative_norm: float | None
    max_absolute: float | None
    share_equal: float | None


class DiffPage(NamedTuple):
    """The difference of two checkpoints; without sides, the form to choose them."""

    a: str
    b: str
    before: StepLine | None = None
    after: StepLine | None = None
    has_values: bool = False
    counts: Mapping[str, tuple[int, int]] | None = None
    """Number and bytes of tensors by kind; None while unknown."""
    other: tuple[str, ...] = ()
    changes: list[ChangeLine] = []  # noqa: RUF012 -- never changed
    n_changes: int = 0
    page: int = 1
    error: str | None = None
    is_pending: bool = False


class VersionLine(NamedTuple):
    """A version of a registered model."""

    name: str
    version: str
    aliases: tuple[str, ...]
    run_id: str | None
    store: str | None
    key: str | None
    owned: OwnedBytes | None
    """None if no store of this server has it."""


class ModelsPage(NamedTuple):
    """Versions in the model registry."""

    versions: list[VersionLine]
    next: str | None
    is_pending: bool


class RoundLine(NamedTuple):
    """A round of maintenance."""

    action: str
    began_s: float
    ended_s: float
    outcome: str
    summary: str | None
    """None for senders who do not see everything: it may name anything."""


class StoreHealth(NamedTuple):
    """The state of one store."""

    store: StoreLine
    disk_bytes: int
    n_packs: int
    pack_bytes: int
    collectable_bytes: int
    wasted_bytes: int
    n_dead_saves: int
    n_unread: int
    n_strangers: int
    encoded: tuple[Encoded, ...]
    """Chunks by codec and by the length of their chains of deltas."""
    last_verify: RoundLine | None
    running: RoundLine | None
    rounds: list[RoundLine]


class HealthPage(NamedTuple):
    """The state of all stores."""

    stores: list[StoreHealth]
    waiting: list[StoreLine]
    """Stores whose state is not known yet, or not at all."""
    schedule: Mapping[str, float]
    can_run: bool
    is_pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What outlives a request."""

    figures: Jobs
    comparisons: Jobs


class Sender:
    """Pages as one sender sees them."""

    def __init__(self, site: Site, access: Access) -> None:
        self._site = site
        self.access = access
        places = {place.id: place for place in stores_of(each.location for each in access.experiments.values())}
        if access.is_admin:
            places |= {place.id: place for place in own_stores()}
        self.places: Mapping[str, Place] = places
        self._known: dict[str, Known[StoreSurvey]] = {}

    # Surveys

    def known(self, place: Place) -> Known[StoreSurvey]:
        """Return the survey of a store, as far as it is known."""
        if place.id not in self._known:

            def compute(last: StoreSurvey | None) -> StoreSurvey:
                return survey(place.store, last)

            key = ("survey", place.id)
            self._known[place.id] = self._site.figures.get(key, compute, fresh_s=_FRESH_S, wait_s=_WAIT_S)
        return self._known[place.id]

    def surveys(self) -> list[tuple[Place, StoreSurvey]]:
        """Return the surveys that are there."""
        found = [(place, self.known(place).value) for place in self.places.values()]
        return [(place, value) for place, value in found if value is not None]

    @property
    def is_pending(self) -> bool:
        """True if a store has no survey yet."""
        return any(known.value is None and known.error is None for known in map(self.known, self.places.values()))

    def sees(self, surveyed: StoreSurvey, ref: Ref) -> bool:
        """Tell whether the sender may know of a ref."""
        return self.access.sees(*surveyed.named_owners(ref))

    # Pages

    def overview(self) -> OverviewPage:
        """Make the content of the overview."""
        owned: dict[str | None, OwnedBytes] = {}
        runs: dict[str, set[str]] = {}
        for _, surveyed in self.surveys():
            for experiment_id, each in surveyed.by_experiment.owned.items():
                owned[experiment_id] = _sum([owned.get(experiment_id, _NOTHING), each])
            for run in surveyed.runs.values():
                runs.setdefault(run.experiment_id, set()).add(run.id)
        experiments = [
            ExperimentLine(each.id, each.name, each.is_deleted, len(runs.get(each.id, ())), owned[each.id])
            for each in self.access.experiments.values()
            if each.id in owned
        ]
        is_admin = self.access.is_admin
        return OverviewPage(
            stores=[self._store_line(place) for place in self.places.values()],
            experiments=sorted(experiments, key=lambda line: -line.owned.exclusive_bytes),
            others=owned.get(None) if is_admin else None,
            is_pending=self.is_pending,
        )

    def experiment(self, experiment_id: str, *, page: int, sort: Sort) -> ExperimentPage:
        """Make the content of an experiment's page.

        Raises:
            NotThereError: The sender may not know of it.
        """
        experiment = self.access.experiments.get(experiment_id)
        if experiment is None:
            raise NotThereError
        owned: list[OwnedBytes] = []
        runs: dict[str, RunLine] = {}
        models: list[tuple[Named, ModelLine]] = []
        for place, surveyed in self.surveys():
            owned.append(surveyed.by_experiment.owned.get(experiment_id, _NOTHING))
            for run in surveyed.runs.values():
                if run.experiment_id == experiment_id and run.id in surveyed.by_run.owned:
                    before = runs[run.id].owned if run.id in runs else _NOTHING
                    bytes_ = _sum([before, surveyed.by_run.owned[run.id]])
                    runs[run.id] = RunLine(run.id, run.name, run.is_deleted, bytes_)
            for model in surveyed.models.values():
                if model.experiment_id == experiment_id and model.id in surveyed.refs_of_model:
                    ref = surveyed.refs_of_model[model.id][-1]
                    of_model = surveyed.by_model.owned[model.id]
                    line = ModelLine(model.id, model.name, model.source_run_id, place.id, ref.key, of_model)
                    models.append((model, line))
        listed = sorted(runs.values(), key=_SORTS[sort])
        shown = listed[(page - 1) * ROWS : page * ROWS]
        named = find_runs(run.id for run in shown)
        readable = readable_runs(self.access, named.values())
        models.sort(key=lambda each: -each[1].owned.exclusive_bytes)
        shown_models = models[:ROWS]
        readable_ids = readable_models(self.access, [model for model, _ in shown_models])
        return ExperimentPage(
            id=experiment.id,
            name=experiment.name,
            owned=_sum(owned),
            runs=[
                run._replace(name=named[run.id].name, is_deleted=named[run.id].is_deleted)
                for run in shown
                if run.id in readable
            ],
            n_runs=len(listed),
            models=[line for model, line in shown_models if model.id in readable_ids],
            n_models=len(models),
            page=page,
            sort=sort,
            most_bytes=max((each.owned.exclusive_bytes + each.owned.shared_bytes for each in shown), default=0),
            is_pending=self.is_pending,
        )

    def run(self, run_id: str, *, page: int) -> RunPage:
        """Make the content of a run's page.

        Raises:
            NotThereError: The sender may not know of it, or no store is known to hold anything of it.
        """
        run = find_runs([run_id]).get(run_id) if _RUN_ID.fullmatch(run_id) else None
        if run is None or run.id not in readable_runs(self.access, [run]):
            raise NotThereError
        lines: list[StepLine] = []
        owned: list[OwnedBytes] = []
        for place, surveyed in self.surveys():
            owned.append(surveyed.by_run.owned.get(run_id, _NOTHING))
            lines += [
                _step_line(place, surveyed, ref)
                for ref in surveyed.refs_of_run.get(run_id, ())
                if self.sees(surveyed, ref)
            ]
        lines.sort(key=lambda line: (not line.is_checkpoint, line.name or "", line.step is None, -(line.step or 0)))
        experiment = self.access.experiments.get(run.experiment_id)
        return RunPage(
            id=run.id,
            name=run.name,
            experiment_id=run.experiment_id,
            experiment_name=run.experiment_id if experiment is None else experiment.name,
            owned=_sum(owned),
            refs=lines[(page - 1) * ROWS : page * ROWS],
            n_refs=len(lines),
            page=page,
            is_pending=self.is_pending,
        )

    def checkpoint(self, store: str, key: str, *, page: int = 1) -> CheckpointPage:
        """Make the content of a checkpoint's page.

        Args:
            store: Id of its store.
            key: Key of its ref.
            page: Number of the page of its tensors.

        Raises:
            NotThereError: The sender may not know of it.
            TensorCasError: Its manifest cannot be read.
        """
        place, surveyed, ref = self._find(store, key)
        manifest = place.store.manifest(ref)
        run, model = surveyed.named_owners(ref)
        columns = manifest.columns
        is_checkpoint = manifest.kind == "checkpoint"
        # A file of a known format lists its tensors, and its other bytes without a dtype.
        specs = [spec for at in range(len(columns)) if (spec := columns.spec(at)).dtype is not None or is_checkpoint]
        largest = sorted(specs, key=lambda spec: -spec.n_bytes)[(page - 1) * MOST_TENSORS : page * MOST_TENSORS]
        known = self._lineage(place, ref)
        relatives = None if known.value is None else self._relatives(place, surveyed, known.value)
        return CheckpointPage(
            line=_step_line(place, surveyed, ref),
            run=run,
            model=model,
            flavor=ref.flavor,
            metrics=ref.metrics or {},
            n_tensors=len(specs),
            n_bytes=manifest.n_bytes,
            tensors=[TensorLine(spec.name, spec.dtype or "bytes", spec.shape, spec.n_bytes) for spec in largest],
            before=self._previous(place, surveyed, ref),
            relatives=relatives,
            lineage_error=self._failure(known, "it cannot be computed"),
            is_pending=known.value is None and known.error is None,
            page=page,
        )

    def diff(self, a: str, b: str, *, values: bool, page: int) -> DiffPage:
        """Make the content of a comparison.

        Args:
            a: The first side: a run's id, ``runs:/<id>``, ``models:/<name>/<version>``, a logged model's id, or
                ``<store>:<key>``.
            b: The second one.
            values: Whether to measure the changes.
            page: Number of the page of the list.

        Raises:
            NotThereError: The sender may not know of a side.
        """
        if not a or not b:
            return DiffPage(a=a, b=b)
        if self.is_pending:
            return DiffPage(a=a, b=b, is_pending=True)
        before, after = self._side(a), self._side(b)
        first, second = (before[0].store, before[2]), (after[0].store, after[2])
        key = ("diff", *((place.id, ref.key, ref.write) for place, _, ref in (before, after)), values)

        def compute(last: CheckpointDiff | None) -> CheckpointDiff:
            return last or compare(first, second, values=values)

        known = self._site.comparisons.get(key, compute, fresh_s=math.inf, wait_s=_WAIT_S)
        found = known.value
        page_ = DiffPage(
            a=f"{before[0].id}:{before[2].key}",
            b=f"{after[0].id}:{after[2].key}",
            before=_step_line(*before),
            after=_step_line(*after),
            has_values=values,
            page=page,
            error=self._failure(known, "they cannot be compared"),
            is_pending=found is None and known.error is None,
        )
        if found is None:
            return page_
        listed = found.by_change()
        kinds = ("changed", "added", "removed", "equal")
        return page_._replace(
            counts={kind: (len(getattr(found, kind)), getattr(found, f"{kind}_bytes")) for kind in kinds},
            other=found.other,
            changes=[_change_line(found, *each) for each in listed[(page - 1) * ROWS : page * ROWS]],
            n_changes=len(listed),
        )

    def models(self, token: str | None) -> ModelsPage:
        """Make the content of the registry's page."""
        versions, following = model_versions(token, most=ROWS)
        aliases = model_aliases({str(each.get("name", "")) for each in versions})
        lines: list[VersionLine] = []
        for each in versions:
            name, version = str(each.get("name", "")), str(each.get("version", ""))
            found = self._of_source(each)
            line = None if found is None else _step_line(*found)
            run_id = str(each.get("run_id") or "") or None
            lines.append(
                VersionLine(
                    name=name,
                    version=version,
                    aliases=tuple(aliases.get((name, version), ())),
                    run_id=run_id if line is not None else None,
                    store=None if line is None else line.store,
                    key=None if line is None else line.key,
                    owned=None if found is None else _owned_by_model(*found),
                )
            )
        return ModelsPage(versions=lines, next=following, is_pending=self.is_pending)

    def health(self, *, can_run: bool) -> HealthPage:
        """Make the content of the health page."""
        stores: list[StoreHealth] = []
        waiting: list[StoreLine] = []
        is_pending = False
        for place in self.places.values():

            def compute(_: Health | None, store: Any = place.store) -> Health:
                return check_health(store)

            key = ("health", place.id)
            known = self._site.figures.get(key, compute, fresh_s=_HEALTH_FRESH_S, wait_s=_WAIT_S)
            line = self._store_line(place)
            if known.value is None or known.error is not None:
                waiting.append(line._replace(error=self._failure(known, "its state cannot be read"), at_s=None))
                is_pending = is_pending or known.error is None
            if known.value is not None:
                stores.append(self._store_health(line._replace(at_s=known.at_s), known.value))
        return HealthPage(
            stores=stores,
            waiting=waiting,
            schedule=config.maintenance(),
            can_run=can_run,
            is_pending=is_pending,
        )

    def forget(self, place: Place) -> None:
        """Let the next page look at a store's health again."""
        self._site.figures.forget(("health", place.id))

    # Parts

    def _failure(self, known: Known[Any], in_short: str) -> str | None:
        """Return the reason why something could not be computed; only administrators read names of blobs and paths."""
        return known.error if self.access.is_admin or known.error is None else in_short

    def _store_line(self, place: Place) -> StoreLine:
        known = self.known(place)
        surveyed, is_admin = known.value, self.access.is_admin
        n_refs = 0 if surveyed is None else sum(self.sees(surveyed, ref) for ref in surveyed.refs)
        return StoreLine(
            id=place.id,
            uri=without_secrets(place.store.uri) if is_admin else None,
            n_refs=n_refs,
            needed_bytes=surveyed.by_run.needed_bytes if is_admin and surveyed is not None else None,
            n_damaged=0 if surveyed is None else surveyed.n_damaged,
            at_s=known.at_s,
            error=self._failure(known, "it cannot be read"),
        )

    def _store_health(self, line: StoreLine, health: Health) -> StoreHealth:
        plan, packs = health.plan, health.packs
        rounds = [self._round_line(each) for each in health.rounds]
        return StoreHealth(
            store=line,
            disk_bytes=health.disk.total,
            n_packs=packs.n_packs,
            pack_bytes=packs.n_bytes,
            collectable_bytes=plan.freed_bytes,
            wasted_bytes=sum(size - needed for needed, size in plan.rewrites.values()),
            n_dead_saves=len(plan.stale_intents),
            n_unread=len(plan.unread_refs),
            n_strangers=len(plan.strangers),
            encoded=packs.encoded,
            last_verify=next((each for each in rounds if each.action == "verify"), None),
            running=None if health.running is None else self._round_line(health.running),
            rounds=rounds,
        )

    def _round_line(self, each: Any) -> RoundLine:
        summary = each.summary if self.access.is_admin else None
        return RoundLine(each.action, each.began_s, each.ended_s, each.outcome, summary)

    def _find(self, store: str, key: str) -> tuple[Place, StoreSurvey, Ref]:
        """Find a ref that the sender may see."""
        place = self.places.get(store)
        surveyed = None if place is None else self.known(place).value
        at = None if surveyed is None else surveyed.position.get(key)
        if place is None or surveyed is None or at is None:
            raise NotThereError
        ref = surveyed.refs[at]
        if not self._may_read(surveyed, ref):
            raise NotThereError
        return place, surveyed, ref

    def _may_read(self, surveyed: StoreSurvey, ref: Ref) -> bool:
        """Ask MLflow about the owners of one ref."""
        if not self.sees(surveyed, ref):
            return False
        run, model = surveyed.named_owners(ref)
        if run is not None and run.id not in readable_runs(self.access, [run]):
            return False
        return model is None or model.id in readable_models(self.access, [model])

    def _previous(self, place: Place, surveyed: StoreSurvey, ref: Ref) -> StepLine | None:
        run_id = surveyed.owners[surveyed.position[ref.key]].run_id
        name, step = step_of(ref)
        if step is None or run_id is None:
            return None
        lines = [_step_line(place, surveyed, each) for each in surveyed.refs_of_run[run_id]]
        earlier = [
            (line.step, line)
            for line in lines
            if line.step is not None and line.step < step and (line.name, line.kind) == (name, ref.kind)
        ]
        return max(earlier, key=lambda each: each[0])[1] if earlier else None

    def _lineage(self, place: Place, ref: Ref) -> Known[Lineage]:
        def compute(last: Lineage | None) -> Lineage:
            return find_lineage(place.store, ref)

        key = ("lineage", place.id, ref.key, ref.write)
        return self._site.comparisons.get(key, compute, fresh_s=600.0, wait_s=_WAIT_S)

    def _relatives(self, place: Place, surveyed: StoreSurvey, lineage: Lineage) -> list[RelationLine]:
        """Keep the relatives that the sender may see."""
        by_facts = {(ref.path, ref.run_id, ref.name, ref.step): ref for ref in surveyed.refs}
        found: list[tuple[Relation, Ref]] = []
        for each in lineage.relatives:
            ref = by_facts.get((each.path, each.run_id, each.name, each.step))
            if ref is not None and self.sees(surveyed, ref):
                found.append((each, ref))
        runs = [run for _, ref in found if (run := surveyed.named_owners(ref)[0]) is not None]
        readable = readable_runs(self.access, runs)
        lines: list[RelationLine] = []
        for each, ref in found:
            run, _ = surveyed.named_owners(ref)
            if run is not None and run.id not in readable:
                continue
            words = _step_line(place, surveyed, ref).words
            lines.append(
                RelationLine(
                    words=words if run is None else f"{run.name}: {words}",
                    is_older=each.is_older,
                    kind=each.kind,
                    share_equal=each.share_equal,
                    n_changed=len(each.changed),
                    n_added=len(each.added),
                    n_removed=len(each.removed),
                    store=place.id,
                    key=ref.key,
                )
            )
        return lines

    def _side(self, said: str) -> tuple[Place, StoreSurvey, Ref]:
        """Find the checkpoint that one side of a comparison names."""
        said = said.strip()
        store, _, key = said.partition(":")
        if store in self.places:
            return self._find(store, key)
        if said.startswith("models:/") and "/" in said.removeprefix("models:/"):
            name, _, version = said.removeprefix("models:/").rpartition("/")
            found = model_version(name, version)
            return self._last(None if found is None else self._of_source(found))
        said = said.removeprefix("models:/").removeprefix("runs:/").strip("/")
        run = find_runs([said]).get(said) if _RUN_ID.fullmatch(said) else None
        model = find_models([said]).get(said) if said.startswith("m-") else None
        if run is not None and run.id in readable_runs(self.access, [run]):
            return self._last(self._latest(lambda surveyed: surveyed.refs_of_run.get(run.id, ())))
        if model is not None:
            return self._last(self._latest(lambda surveyed: surveyed.refs_of_model.get(model.id, ())))
        raise NotThereError

    def _last(self, found: tuple[Place, StoreSurvey, Ref] | None) -> tuple[Place, StoreSurvey, Ref]:
        if found is None or not self._may_read(found[1], found[2]):
            raise NotThereError
        return found

    def _latest(self, refs_in: Callable[[StoreSurvey], Sequence[Ref]]) -> tuple[Place, StoreSurvey, Ref] | None:
        """Return the last checkpoint among some refs, by step; a file only if there is no checkpoint."""
        found = [(place, surveyed, ref) for place, surveyed in self.surveys() for ref in refs_in(surveyed)]

        def rank(each: tuple[Place, StoreSurvey, Ref]) -> tuple[bool, bool, int, str]:
            line = _step_line(*each)
            return line.is_checkpoint, line.step is not None, line.step or 0, line.created

        return max(found, key=rank, default=None)

    def _of_source(self, version: Mapping[str, Any]) -> tuple[Place, StoreSurvey, Ref] | None:
        """Find the checkpoint of a model version that the sender may see."""
        source = str(version.get("source") or "")
        model_id = str(version.get("model_id") or "")
        if source.startswith("models:/m-"):
            model_id = source.removeprefix("models:/")
        found = None
        if model_id:
            found = self._latest(lambda surveyed: surveyed.refs_of_model.get(model_id, ()))
        elif run_id := str(version.get("run_id") or ""):
            below = source.rpartition("/artifacts/")[2].strip("/")
            found = self._latest(
                lambda surveyed: [
                    ref for ref in surveyed.refs_of_run.get(run_id, ()) if below and _is_below(ref, below)
                ]
            )
        return found if found is not None and self.sees(found[1], found[2]) else None


def _is_below(ref: Ref, folder: str) -> bool:
    path = ref.path or ref.copy_path or ref.uri or ""
    return f"/artifacts/{folder}/" in f"/{path}"


def _step_line(place: Place, surveyed: StoreSurvey, ref: Ref) -> StepLine:
    name, step = step_of(ref)
    return StepLine(
        store=place.id,
        key=ref.key,
        label=ref.label,
        kind=ref.kind,
        name=name,
        step=step,
        created=ref.created,
        owned=surveyed.by_ref.owned[ref.key],
        model_id=ref.model_id,
    )


def _owned_by_model(place: Place, surveyed: StoreSurvey, ref: Ref) -> OwnedBytes:
    model_id = surveyed.owners[surveyed.position[ref.key]].model_id
    return surveyed.by_ref.owned[ref.key] if model_id is None else surveyed.by_model.owned[model_id]


def _change_line(found: CheckpointDiff, name: str, kind: str) -> ChangeLine:
    change = found.values.get(name)
    return ChangeLine(
        name=name,
        change=kind,
        n_bytes=found.tensor_bytes.get(name, 0),
        relative_norm=None if change is None else change.relative_norm,
        max_absolute=None if change is None else change.max_absolute,
        share_equal=None if change is None else change.share_equal,
    )


def _sum(some: Iterable[OwnedBytes]) -> OwnedBytes:
    return OwnedBytes(*map(sum, zip(_NOTHING, *some, strict=True)))


_SORTS: Mapping[Sort, Callable[[RunLine], Any]] = {
    "freed": lambda run: (-run.owned.exclusive_bytes, run.id),
    "shared": lambda run: (-run.owned.shared_bytes, run.id),
    "added": lambda run: (-run.owned.marginal_bytes, run.id),
    "name": lambda run: (run.name, run.id),
}


def to_json(value: Any) -> Any:
    """Return the content of a page as JSON values; numbers that JSON lacks become texts."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
