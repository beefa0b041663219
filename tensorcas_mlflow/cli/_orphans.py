"""The part of ``gc`` that looks for what MLflow has forgotten."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from tensorcas_mlflow import config
from tensorcas_mlflow._texts import count_text, size_text
from tensorcas_mlflow.cli._output import Json, printable, ref_json, say
from tensorcas_mlflow.orphans import (
    Holding,
    Kept,
    OrphanPlan,
    drop_orphans,
    find_holdings,
    open_registry,
    open_tracker,
    orphaned_refs,
    plan_orphans,
)
from tensorcas_mlflow.store import Ref, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphans:
    """What ``gc --orphans`` is to drop, from MLflow's own folders and from the store's."""

    store: Store
    copies: tuple[Ref, ...] = ()
    """Refs of models and runs that are gone from folders of MLflow's own."""
    plan: OrphanPlan | None = None
    """Of what MLflow's tracking stores do not know; None if none was asked."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What the tracking stores do not know."""
        return () if self.plan is None else self.plan.holdings

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What they do not know either, and what is left alone."""
        return () if self.plan is None else self.plan.kept

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.copies) + len(self.holdings)

    def keys(self) -> frozenset[str]:
        """The keys of all refs among them."""
        return frozenset(ref.key for ref in (*self.copies, *(ref for each in self.holdings for ref in each.refs)))

    def tell(self) -> None:
        """Print each of them, and what is left alone and why."""
        for ref in self.copies:
            say(printable(f"gone: {ref.label}"))
        for holding in self.holdings:
            plain = f", {count_text(holding.n_plain, 'plain file')} ({size_text(holding.plain_bytes)})"
            kept = f"{count_text(len(holding.refs), 'file')} in the store{plain if holding.n_plain else ''}"
            say(printable(f"gone: {holding.kind} {holding.root}: {kept}"))
        for each in self.kept:
            folder = each.experiment or "."
            remedy = f"; if they are gone, say --folder {folder}" if each.can_be_named else ""
            what = count_text(each.n_holdings, "unknown artifact root")
            say(printable(f"kept: {what} in {folder}: {each.reason}{remedy}"))

    def json(self) -> Json:
        """Describe them."""
        refs = [*self.copies, *(ref for holding in self.holdings for ref in holding.refs)]
        return {
            "gone": [ref_json(ref) for ref in refs],
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
        """Drop those that are still orphans, and tell whether there were any."""
        n_dropped = drop_orphans(self.store, self.copies)
        if self.plan is not None:
            n_dropped += len(self.plan.execute())
        return n_dropped > 0


def find_orphans(options: Namespace, store: Store, *, grace_s: float) -> Orphans:
    """Find what MLflow has forgotten, if the command is to.

    Raises:
        ValueError: Whether some of it is known only a tracking store can tell, and none is named.
    """
    if not options.orphans:
        if options.tracking_uri or options.registry_uri or options.folder:
            options.parser.error("--tracking-uri, --registry-uri and --folder go with --orphans")
        return Orphans(store=store)
    copies = tuple(orphaned_refs(store, grace_s=grace_s))
    holdings = find_holdings(store)
    if not holdings and not options.folder:
        return Orphans(store=store, copies=copies)
    uris = options.tracking_uri or list(filter(None, [config.tracking_uri()]))
    if not uris:
        # Plain files alone may as well be those of a root of MLflow's own.
        if options.folder or any(holding.refs for holding in holdings):
            raise ValueError(
                "only MLflow can tell which runs, logged models and traces are gone: name its tracking store by "
                "--tracking-uri URI or in MLFLOW_TRACKING_URI; all of them, if several keep artifacts here"
            )
        return Orphans(store=store, copies=copies)
    # Those of the tracking stores are asked in any case: asking one too many only keeps more.
    registry_uris = options.registry_uri or list(filter(None, [config.registry_uri()]))
    plan = plan_orphans(
        store,
        holdings,
        trackers=[open_tracker(uri) for uri in uris],
        registries=[open_registry(uri) for uri in dict.fromkeys([*uris, *registry_uris])],
        grace_s=grace_s,
        folders={"" if folder == "." else folder.rstrip("/") for folder in options.folder},
    )
    return Orphans(store=store, copies=copies, plan=plan)
