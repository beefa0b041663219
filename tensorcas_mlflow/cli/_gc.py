"""The command ``gc``: it deletes garbage and orphans. It asks first."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.cli._command import (
    ABANDON,
    DRY_RUN,
    PLACE,
    QUIET,
    TRACKING_URI,
    WORKERS,
    YES,
    Command,
    duration,
    engine_of,
    flag,
    option,
    percentage,
    repeated,
)
from tensorcas_mlflow.cli._output import Json, confirm, fields_of, printable, ref_json, say, say_json
from tensorcas_mlflow.cli._progress import ProgressBar
from tensorcas_mlflow.cli._record import NO_RECORD, recorded
from tensorcas_mlflow.cli._select import is_json, store_of
from tensorcas_mlflow.errors import DirectAccessError
from tensorcas_mlflow.integration.forgotten import (
    Holding,
    Kept,
    OrphanPlan,
    Registry,
    Tracker,
    drop_orphans,
    find_holdings,
    orphaned_refs,
    plan_orphans,
)
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import (
    DEFAULT_GRACE_S,
    DEFAULT_MAX_WASTE,
    DEFAULT_QUARANTINE_S,
    GcPlan,
    GcReport,
    disk_bytes,
    plan_gc,
)
from tensorcas_mlflow.store import Store


def collect(options: Namespace) -> int:
    """Delete the content not needed by any checkpoint or file."""
    engine = engine_of(options)
    store = store_of(options)
    if store.backend.is_carrier:
        raise DirectAccessError("collection", store.uri)
    orphans = find_orphans(options, store)
    plan_with = partial(
        plan_gc,
        store,
        grace_s=options.grace,
        max_waste=options.max_waste,
        abandon=[key.removeprefix("intents/") for key in options.abandon],
        quarantine_s=options.quarantine,
        engine=engine,
    )
    with ProgressBar("reading", is_quiet=options.quiet) as watch:
        plan = plan_with(without=orphans.keys(), watch=watch)
    if not is_json(options):
        orphans.say()
        say(printable(str(plan)))
    report: GcReport | None = None
    has_work = orphans.n > 0 or not plan.is_empty
    # Without anything to delete there is nothing to confirm, but the index is still tidied.
    question = f"Delete this, and free about {size_text(plan.freed_bytes + orphans.plain_bytes)}?"
    if not options.dry_run and (not has_work or confirm(question, yes=options.yes, as_json=is_json(options))):
        bytes_before = disk_bytes(store.backend)
        with recorded(options, store, "collect") as record:
            planned = plan
            with ProgressBar("collecting", is_quiet=options.quiet) as watch:
                if orphans.drop():
                    planned = plan_with()
                report = planned.execute(watch=watch)
            record.summary = str(report)
        # The record is a file of the store, too.
        report = replace(report, bytes_before=bytes_before, bytes_after=disk_bytes(store.backend))
    if is_json(options):
        say_json(
            {
                "store": store.uri,
                **orphans.json(),
                "plan": _plan_json(plan),
                "report": None if report is None else _report_json(report),
            }
        )
    elif report is not None:
        say(str(report))
    elif not options.dry_run:
        say("nothing was deleted")
    return 0


def _plan_json(plan: GcPlan) -> Json:
    return {
        **fields_of(plan, "n_refs n_live_chunks disk_bytes freed_bytes bound_bytes unread_refs strangers"),
        "n_packs": len(plan.packs),
        "packs_bytes": sum(plan.packs.values()),
        "n_rewrites": len(plan.rewrites),
        "rewrites_bytes": sum(size for _, size in plan.rewrites.values()),
        "rewrites_needed_bytes": sum(needed for needed, _ in plan.rewrites.values()),
        "n_manifests": len(plan.manifests),
        "n_dead_saves": len(plan.stale_intents),
        "n_dead_collections": len(plan.dead_lists),
        "n_quarantined": len(plan.quarantine),
        "quarantined_bytes": sum(plan.quarantine.values()),
        "why": [_why_json(plan, reason) for reason in sorted(set(plan.reasons.values()))],
        "rewrites": [
            {"pack": name, "bytes": size, "needed_bytes": needed}
            for name, (needed, size) in sorted(plan.rewrites.items())
        ],
    }


def _why_json(plan: GcPlan, reason: str) -> Json:
    packs = sorted(name for name in plan.packs if plan.reasons[name] == reason)
    manifests = [name for name in plan.manifests if plan.reasons[name] == reason]
    return {
        "reason": reason,
        "packs_bytes": sum(plan.packs[name] for name in packs),
        "packs": packs,
        "manifests": manifests,
    }


def _report_json(report: GcReport) -> Json:
    return fields_of(report, "n_packs n_manifests n_withdrawn n_spared bytes_before bytes_after freed_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphans:
    """Holdings for ``gc --orphans`` to drop, in folders of MLflow's own and in folders of the store."""

    store: Store
    copies: tuple[Ref, ...] = ()
    """Refs of models and runs with their folders of MLflow's own deleted."""
    plan: OrphanPlan | None = None
    """Plan for holdings unknown to MLflow's tracking stores; None if none was asked."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """Holdings unknown to the tracking stores."""
        return () if self.plan is None else self.plan.holdings

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Holdings unknown to them too, but kept."""
        return () if self.plan is None else self.plan.kept

    @property
    def plain_bytes(self) -> int:
        """Bytes of the plain files beside the holdings."""
        return sum(holding.plain_bytes for holding in self.holdings)

    @property
    def n(self) -> int:
        """Number of orphans."""
        return len(self.copies) + len(self.holdings)

    def keys(self) -> frozenset[str]:
        """Return the keys of all their refs."""
        return frozenset(ref.key for ref in (*self.copies, *(ref for each in self.holdings for ref in each.refs)))

    def say(self) -> None:
        """Print each orphan, and each kept holding with the reason."""
        for ref in self.copies:
            say(printable(f"gone: {ref.label}"))
        for holding in self.holdings:
            plain = f", {count_text(holding.n_plain, 'plain file')} ({size_text(holding.plain_bytes)})"
            kept = f"{count_text(len(holding.refs), 'file')} in the store{plain if holding.n_plain else ''}"
            say(printable(f"gone: {holding.kind} {holding.root}: {kept}"))
        for each in self.kept:
            folder = each.experiment or "."
            remedy = f"; if they are gone, pass --folder {folder}" if each.can_be_named else ""
            what = count_text(each.n_holdings, "unknown artifact root")
            say(printable(f"kept: {what} in {folder}: {each.reason}{remedy}"))

    def json(self) -> Json:
        """Return the orphans as JSON."""
        refs = [*self.copies, *(ref for holding in self.holdings for ref in holding.refs)]
        return {
            "gone": [ref_json(self.store, ref) for ref in refs],
            "gone_roots": [
                {
                    "kind": holding.kind,
                    "id": holding.id,
                    "path": holding.root,
                    "n_refs": len(holding.refs),
                    "n_plain_files": holding.n_plain,
                    "plain_bytes": holding.plain_bytes,
                }
                for holding in self.holdings
            ],
            "kept": [
                {"folder": each.experiment or ".", "n_roots": each.n_holdings, "reason": each.reason}
                for each in self.kept
            ],
        }

    def drop(self) -> bool:
        """Drop the holdings that are still orphans; tell whether there was one."""
        n_dropped = drop_orphans(self.store, self.copies)
        if self.plan is not None:
            n_dropped += len(self.plan.execute())
        return n_dropped > 0


def find_orphans(options: Namespace, store: Store) -> Orphans:
    """Find the holdings forgotten by MLflow, if ``--orphans`` is given.

    Raises:
        ValueError: Only a tracking store can tell, and the command names none.
    """
    if not options.orphans:
        if options.tracking_uri or options.registry_uri or options.folder:
            options.parser.error("--tracking-uri, --registry-uri and --folder need --orphans")
        return Orphans(store=store)
    copies = tuple(orphaned_refs(store, grace_s=options.grace))
    holdings = find_holdings(store)
    if not holdings and not options.folder:
        return Orphans(store=store, copies=copies)
    uris = options.tracking_uri or list(filter(None, [config.tracking_uri()]))
    if not uris:
        # Plain files alone may belong to a root of MLflow's own.
        if options.folder or any(holding.refs for holding in holdings):
            raise ValueError(
                "only MLflow knows the deleted runs, logged models and traces: name its tracking store with "
                "--tracking-uri URI or in MLFLOW_TRACKING_URI; name all, if several keep artifacts here"
            )
        return Orphans(store=store, copies=copies)
    # The tracking stores' own registries are asked in any case: one registry too many only keeps more.
    registry_uris = options.registry_uri or list(filter(None, [config.registry_uri()]))
    plan = plan_orphans(
        store,
        holdings,
        trackers=[Tracker(uri) for uri in uris],
        registries=[Registry(uri) for uri in dict.fromkeys([*uris, *registry_uris])],
        grace_s=options.grace,
        folders={"" if folder == "." else folder.rstrip("/") for folder in options.folder},
    )
    return Orphans(store=store, copies=copies, plan=plan)


COMMANDS = (
    Command(
        name="gc",
        help="delete the content that no checkpoint or file needs",
        examples=["gc --dry-run", "gc --yes --max-waste 0%", "gc --orphans --tracking-uri http://mlflow:5000"],
        options=[
            PLACE,
            option(
                "--grace",
                type=duration,
                default=DEFAULT_GRACE_S,
                metavar="DURATION",
                help=f"treat a save as dead after this long without a heartbeat (default: {DEFAULT_GRACE_S / 3600:g}h)",
            ),
            option(
                "--max-waste",
                type=percentage,
                default=DEFAULT_MAX_WASTE,
                metavar="PERCENT",
                help=f"rewrite packs with a larger share of unneeded bytes (default: {DEFAULT_MAX_WASTE:.0%}%)",
            ),
            option(
                "--quarantine",
                type=duration,
                default=DEFAULT_QUARANTINE_S,
                metavar="DURATION",
                help="delete damaged bytes that a repair put into quarantine this long ago (default: "
                f"{DEFAULT_QUARANTINE_S / 86400:g}d)",
            ),
            ABANDON,
            flag(
                "--orphans",
                help="first free the orphans: content of runs, logged models and traces that MLflow forgot longer ago "
                "than the grace",
            ),
            repeated(
                TRACKING_URI,
                metavar="URI",
                help="with --orphans: tracking store or server of MLflow; pass all with artifacts in the store "
                "(repeatable; default: MLFLOW_TRACKING_URI)",
            ),
            repeated(
                "--registry-uri",
                metavar="URI",
                help="with --orphans: model registry apart from the tracking store (repeatable; default: "
                "MLFLOW_REGISTRY_URI)",
            ),
            repeated(
                "--folder",
                metavar="FOLDER",
                help="with --orphans: folder of a deleted experiment, as gc printed it: free its content unknown to "
                "MLflow, even without any other sign of the experiment (repeatable)",
            ),
            *WORKERS,
            DRY_RUN,
            NO_RECORD,
            QUIET,
            YES,
        ],
        run=collect,
    ),
)
