"""The commands that change a store: ``init``, ``delete``, ``gc``. The last two ask first."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from tensorcas_mlflow.cli._orphans import find_orphans
from tensorcas_mlflow.cli._output import Json, confirm, printable, ref_json, say, say_json
from tensorcas_mlflow.cli._select import Wanted, is_json, root_of, store_of, the_one
from tensorcas_mlflow.errors import ConflictError, DirectAccessError
from tensorcas_mlflow.maintenance import GcPlan, GcReport, plan_gc
from tensorcas_mlflow.orphans import remove_copy
from tensorcas_mlflow.store import Ref, Store


def make(options: Namespace) -> int:
    """Make a store."""
    if options.place is not None and hasattr(options, "root"):
        options.parser.error("give the place once: init ROOT or --root ROOT")
    store = Store.init(options.place or root_of(options), chunk_bytes=options.chunk_bytes)
    if is_json(options):
        say_json({"store": store.uri, "id": store.id, "chunk_bytes": store.chunk_bytes})
    else:
        say(printable(f"made store {store.id} at {store.uri}"))
    return 0


def delete(options: Namespace) -> int:
    """Drop one checkpoint."""
    store = store_of(options)
    ref = the_one(store.checkpoints(), Wanted(run_id=options.run, step=options.step, name=options.name))
    question = f"Delete {ref.label}?"
    if ref.model_id is not None:
        question = f"{ref.label} is the logged model {ref.model_id}: MLflow will still list it and not load it. Delete?"
    is_deleted = confirm(question, yes=options.yes, as_json=is_json(options))
    if is_deleted:
        _drop(store, ref)
        remove_copy(store, ref)
    if is_json(options):
        say_json({"store": store.uri, "checkpoint": ref_json(ref), "deleted": is_deleted})
    elif is_deleted:
        say(printable(f"deleted {ref.label}; `tensorcas gc` removes what only it needed"))
    else:
        say("nothing was deleted")
    return 0


def _drop(store: Store, ref: Ref) -> None:
    """Drop the ref that was shown, and no other that has taken its place since."""
    info, now = store.backend.stat(ref.key), store.ref(ref.key)
    if info is None or now is None:
        return
    if now.write != ref.write or not store.backend.withdraw(ref.key, info.token):
        raise ConflictError(f"{ref.label} was saved again meanwhile; nothing was deleted")


def collect(options: Namespace) -> int:
    """Delete what nothing needs any more."""
    store = store_of(options)
    if store.backend.is_carrier:
        raise DirectAccessError("collection", store.uri)
    grace_s = options.grace * 3600
    orphans = find_orphans(options, store, grace_s=grace_s)
    plan_with = partial(
        plan_gc,
        store,
        grace_s=grace_s,
        max_waste=options.max_waste,
        abandon=options.abandon,
        quarantine_s=options.quarantine * 3600,
    )
    plan = plan_with(without=orphans.keys())
    if not is_json(options):
        orphans.tell()
        say(printable(str(plan)))
    report: GcReport | None = None
    has_work = orphans.n > 0 or not plan.is_empty
    # With nothing to delete there is nothing to ask, and the index is tidied all the same.
    if not options.dry_run and (not has_work or confirm("Delete?", yes=options.yes, as_json=is_json(options))):
        planned = plan
        if orphans.drop():
            planned = plan_with()
        report = planned.execute()
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
        "n_refs": plan.n_refs,
        "n_live_chunks": plan.n_live_chunks,
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
        "unread_refs": dict(plan.unread_refs),
        "strangers": list(plan.strangers),
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
    return {
        "n_packs": report.n_packs,
        "n_manifests": report.n_manifests,
        "n_aborted": report.n_aborted,
        "n_spared": report.n_spared,
        "freed_bytes": report.freed_bytes,
    }
