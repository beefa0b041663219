"""The command ``adopt``: it moves the plain files of an artifact root into a store, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.cli._command import DRY_RUN, QUIET, TRACKING_URI, YES, Command, flag, option, repeated
from tensorcas_mlflow.cli._output import ProgressLine, confirm, printable, say, say_json
from tensorcas_mlflow.cli._select import is_json
from tensorcas_mlflow.integration.adoption import (
    AdoptionPlan,
    AdoptionReport,
    Database,
    LeftAlone,
    RevertReport,
    plan_adoption,
    revert,
)


def adopt(options: Namespace) -> int:
    """Adopt an artifact root, or revert its adoption."""
    if options.revert and (options.dry_run or options.running):
        options.parser.error("--revert takes neither --dry-run nor --running")
    databases = [Database(uri) for uri in _database_uris(options)]
    if options.revert:
        return _revert(options, databases)
    plan = plan_adoption(options.place, databases, runs=options.run, with_running=options.running)
    estimate = None
    report: AdoptionReport | None = None
    if not is_json(options):
        say(printable(str(plan)))
    with ProgressLine(is_quiet=options.quiet) as line_of:
        n_bytes = sum(unit.n_bytes for unit in plan.units)

        def watch(step: str, path: str, done_bytes: int) -> None:
            line_of.show(f"{printable(step)}: {size_text(done_bytes)} of {size_text(n_bytes)}", done_bytes)

        if options.dry_run:
            estimate = plan.estimate(watch)
        elif not plan.is_empty and confirm(
            "Move these files into a store, and remove the plain ones?", yes=options.yes, as_json=is_json(options)
        ):
            report = plan.execute(watch)
    left_alone = report.left_alone if report is not None else plan.left_alone
    if is_json(options):
        say_json(
            {
                "root": str(plan.root),
                "plan": _plan_json(plan),
                "estimate": None if estimate is None else asdict(estimate),
                "report": None if report is None else {**asdict(report), "left_alone": list(map(asdict, left_alone))},
            }
        )
        return 0
    if estimate is not None or report is not None:
        say(str(report or estimate))
    elif plan.is_empty:
        say("nothing to adopt")
    else:
        say("nothing was adopted")
    _say_left_alone(left_alone)
    return 0


def _revert(options: Namespace, databases: list[Database]) -> int:
    report: RevertReport | None = None
    if confirm("Make the adopted folders plain again?", yes=options.yes, as_json=is_json(options)):
        with ProgressLine(is_quiet=options.quiet) as line_of:

            def watch(step: str, path: str, done_bytes: int) -> None:
                line_of.show(f"{printable(step)}: {size_text(done_bytes)}", done_bytes)

            report = revert(options.place, databases, runs=options.run, watch=watch)
    if is_json(options):
        say_json({"root": options.place, "report": None if report is None else asdict(report)})
        return 0
    say("nothing was reverted" if report is None else str(report))
    _say_left_alone(() if report is None else report.left_alone)
    return 0


def _plan_json(plan: AdoptionPlan) -> dict[str, object]:
    return {
        "folders": [{"path": unit.path, "n_files": len(unit.files), "bytes": unit.n_bytes} for unit in plan.units],
        "n_experiments": len(plan.experiments),
        "left_alone": [asdict(each) for each in plan.left_alone],
    }


def _say_left_alone(left_alone: Iterable[LeftAlone]) -> None:
    each = list(left_alone)
    if each:
        say(f"left alone ({len(each)}):")
    for one in each:
        say(printable(f"  {one.path}: {one.reason}"))


def _database_uris(options: Namespace) -> list[str]:
    uris: list[str] = options.tracking_uri or list(filter(None, [config.tracking_uri()]))
    if uris:
        return uris
    root = Path(options.place).absolute()
    for file in (root.parent / "mlflow.db", root / "mlflow.db"):
        if file.is_file():
            return [f"sqlite:///{file}"]
    raise ValueError(
        f"there is no mlflow.db in {options.place!r} or beside it: name MLflow's database with --tracking-uri URI or "
        "in MLFLOW_TRACKING_URI; name all, if several keep artifacts here. Move a tracking folder into a database "
        "first, with `mlflow migrate-filestore`"
    )


COMMANDS = (
    Command(
        name="adopt",
        help="move the plain files of an MLflow artifact root into a store, or back",
        examples=[
            "adopt mlruns --dry-run",
            "adopt mlruns --tracking-uri sqlite:///mlflow.db",
            "adopt mlruns --run 8f3c21d07b2f4a53a1d5e0c1c3d7a9b4",
            "adopt mlruns --revert",
        ],
        options=[
            option("place", metavar="ROOT", help="the artifact root, such as mlruns or mlartifacts"),
            repeated(
                TRACKING_URI,
                metavar="URI",
                help="database of MLflow's tracking store or model registry; pass all that name artifacts in ROOT "
                "(repeatable; default: MLFLOW_TRACKING_URI, else mlflow.db beside ROOT or in it)",
            ),
            repeated(
                "--run",
                metavar="ID",
                help="only this run or logged model, by its full id; experiments then stay as they are (repeatable)",
            ),
            flag("--running", help="adopt running runs too: nothing may be writing into them"),
            flag("--revert", help="make adopted folders plain again"),
            DRY_RUN,
            YES,
            QUIET,
        ],
        run=adopt,
    ),
)
