"""The command that mends a damaged store: ``repair``. It asks first."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tensorcas_mlflow.cli._output import Json, confirm, printable, say, say_json
from tensorcas_mlflow.cli._select import is_json, root_of, store_at
from tensorcas_mlflow.errors import ConflictError, CorruptError, DirectAccessError, StoreNotFoundError
from tensorcas_mlflow.maintenance import FormatFix, Loss, RepairPlan, RepairReport, open_damaged, plan_repair
from tensorcas_mlflow.store import Store

LOST = 3
"""Exit status where something stays lost or damaged."""


def repair(options: Namespace) -> int:
    """Mend what is damaged, and say what is lost."""
    sources = [store_at(place) for place in options.sources]
    store, format_fix = _open(root_of(options), sources)
    for source in sources:
        if source.uri == store.uri:
            raise ConflictError(f"{source.uri!r} is the store that is to be repaired: give --from another one")
    plan = plan_repair(store, sources=sources, abandon=options.abandon, format_fix=format_fix)
    if not is_json(options):
        for line in str(plan).split("\n"):
            say(printable(line))
    report: RepairReport | None = None
    if not options.dry_run and (plan.is_empty or confirm("Repair?", yes=options.yes, as_json=is_json(options))):
        report = plan.execute()
    if is_json(options):
        say_json({"store": store.uri, "plan": _plan_json(plan), "report": None if report is None else _json(report)})
    elif report is not None and not plan.is_empty:
        for line in str(report).split("\n"):
            say(printable(line))
    elif report is None and not options.dry_run:
        say("nothing was changed")
    if report is None:
        # Of a plan that was only shown, it is what would stay; of one that was refused, all that is.
        return 0 if (plan.is_whole if options.dry_run else not plan.losses and not plan.findings) else LOST
    return 0 if report.is_whole else LOST


def _open(root: str, sources: Sequence[Store]) -> tuple[Store, FormatFix | None]:
    if root.startswith("mlflow-artifacts:"):
        raise DirectAccessError("repair", root)
    try:
        return store_at(root), None
    except (CorruptError, StoreNotFoundError):
        return open_damaged(root, sources)


def _plan_json(plan: RepairPlan) -> Json:
    return {
        "findings": [
            {
                "key": finding.key,
                "reason": finding.reason,
                "remedy": finding.remedy,
                "is_mended": finding.is_mended,
                "is_harmless": finding.is_harmless,
            }
            for finding in plan.findings
        ],
        "losses": [_loss_json(loss) for loss in plan.losses],
        "remaining": [_loss_json(loss) for loss in plan.remaining],
    }


def _json(report: RepairReport) -> Json:
    return {
        "restored": list(report.restored),
        "abandoned": list(report.abandoned),
        "packs_gone": list(report.packs_gone),
        "n_quarantined": report.n_quarantined,
        "n_healed": report.n_healed,
        "n_fenced": report.n_fenced,
        "left": dict(report.left),
        "losses": [_loss_json(loss) for loss in report.losses],
    }


def _loss_json(loss: Loss) -> Json:
    return {
        "key": loss.key,
        "checkpoint": loss.checkpoint,
        "tensors": list(loss.tensors),
        "bytes": loss.n_bytes,
        "reason": loss.reason,
    }
