"""The command that encodes a store anew in less room: ``optimize``. It asks first."""

from __future__ import annotations

import sys
from argparse import Namespace

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.cli._output import Json, confirm, printable, say, say_json
from tensorcas_mlflow.cli._select import is_json, store_of
from tensorcas_mlflow.cli._teller import Teller
from tensorcas_mlflow.maintenance import OptimizePlan, OptimizeReport, Progress, Spent, plan_optimize

EFFORTS = tuple(spent.name.lower() for spent in reversed(Spent))


def optimize(options: Namespace) -> int:
    """Encode anew what has not been yet, and collect what that makes unneeded."""
    store = store_of(options)
    plan = plan_optimize(store, spent=Spent[options.effort.upper()])
    if not is_json(options):
        say(str(plan))
        if not plan.gc.is_empty:
            say(f"to collect at once: {plan.gc}")
    report: OptimizeReport | None = None
    question = "Optimize, and delete what that makes unneeded?"
    if not options.dry_run and (plan.is_empty or confirm(question, yes=options.yes, as_json=is_json(options))):
        report = _execute(plan, is_quiet=options.quiet)
    if is_json(options):
        say_json(
            {
                "store": store.uri,
                "effort": options.effort,
                "plan": _plan_json(plan),
                "report": None if report is None else _report_json(report),
            }
        )
    elif report is not None and not plan.is_empty:
        say(printable(str(report)))
    elif report is None and not options.dry_run:
        say("nothing was changed")
    return 0


def _execute(plan: OptimizePlan, *, is_quiet: bool) -> OptimizeReport:
    with Teller(sys.stderr, is_quiet=is_quiet) as teller:

        def watch(progress: Progress) -> None:
            line = f"{size_text(progress.done_bytes)} of {size_text(progress.n_bytes or 0)} encoded"
            teller.tell(line, progress.done_bytes, is_last=progress.done_bytes == progress.n_bytes)

        return plan.execute(watch=watch)


def _plan_json(plan: OptimizePlan) -> Json:
    return {
        "n_refs": plan.n_refs,
        "checkpoints": list(plan.labels),
        "n_chunks": plan.n_chunks,
        "bytes": plan.n_bytes,
        "stored_bytes": plan.n_stored_bytes,
        "collectable_bytes": sum(plan.gc.packs.values()),
    }


def _report_json(report: OptimizeReport) -> Json:
    return {
        "packs_bytes_before": report.n_bytes_before,
        "packs_bytes_after": report.n_bytes_after,
        "written_bytes": report.written_bytes,
    }
