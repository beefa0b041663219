"""The command ``adopt``: it moves the plain files of an artifact root into a store, and back."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.cli._command import DRY_RUN, QUIET, TRACKING_URI, YES, Command, flag, option, repeated
from tensorcas_mlflow.cli._output import confirm, printable, say, say_json
from tensorcas_mlflow.cli._progress import ProgressBar
from tensorcas_mlflow.cli._select import experiment_folder, is_json, only_run
from tensorcas_mlflow.integration.directory import database_beside, open_directory

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.adoption import AdoptionPlan, AdoptionReport, Database, LeftAlone, RevertReport

_FULL_ID = re.compile(r"(?:m-)?[0-9a-f]{32}")


def adopt(options: Namespace) -> int:
    """Adopt an artifact root, or revert its adoption."""
    # MLflow takes two seconds to import. Help and completions, which know this command too, do without.
    from tensorcas_mlflow.integration.adoption import Database, plan_adoption, real_root

    if options.revert and (options.dry_run or options.running):
        options.parser.error("--revert takes neither --dry-run nor --running")
    named = None if os.path.exists(options.place) else experiment_folder(options.place)
    if named is not None:
        options.place = named
    real_root(options.place)
    uris = _database_uris(options, is_experiment=named is not None)
    options.run = [_run_id(word, uris) for word in options.run]
    databases = [Database(uri) for uri in uris]
    if options.revert:
        return _revert(options, databases)
    plan = plan_adoption(options.place, databases, runs=options.run, with_running=options.running)
    estimate = None
    report: AdoptionReport | None = None
    if not is_json(options):
        say(printable(str(plan)))
    n_bytes = sum(unit.n_bytes for unit in plan.units)
    question = f"Move these {size_text(n_bytes)} of files into a store, and remove the plain ones?"
    if options.dry_run:
        with ProgressBar("storing", is_quiet=options.quiet) as bar:
            estimate = plan.estimate(lambda step, path, done_bytes: bar.bytes(done_bytes, n_bytes))
    elif not plan.is_empty and confirm(question, yes=options.yes, as_json=is_json(options)):
        with ProgressBar("adopting", is_quiet=options.quiet) as bar:
            report = plan.execute(lambda step, path, done_bytes: bar.bytes(done_bytes, n_bytes))
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


def _run_id(word: str, uris: Sequence[str]) -> str:
    """Return the id of a run by its name or the beginning of its id, or else the word itself."""
    if _FULL_ID.fullmatch(word):
        return word
    found = only_run([run for uri in uris for run in open_directory(uri).runs(word.removeprefix("runs:/"))], word)
    return word if found is None else found.run_id


def _revert(options: Namespace, databases: list[Database]) -> int:
    from tensorcas_mlflow.integration.adoption import revert

    report: RevertReport | None = None
    if confirm("Make the adopted folders plain again?", yes=options.yes, as_json=is_json(options)):
        with ProgressBar("reverting", is_quiet=options.quiet) as bar:
            report = revert(
                options.place,
                databases,
                runs=options.run,
                watch=lambda step, path, done_bytes: bar.bytes(done_bytes, 0),
            )
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


def _database_uris(options: Namespace, *, is_experiment: bool) -> list[str]:
    from tensorcas_mlflow.integration.adoption import real_root

    uris: list[str] = options.tracking_uri or list(filter(None, [config.tracking_uri()]))
    if uris:
        return uris
    root = real_root(options.place)
    # An experiment's folder lies in the artifact root, and its name is the experiment's id.
    above = [root.parent.parent] if is_experiment or root.name.isdecimal() else []
    found = database_beside(root.parent, root, *above)
    if found is not None:
        return [found]
    raise ValueError(
        f"there is no mlflow.db in {options.place!r} or beside it: name MLflow's database with "
        "--tracking-uri URI or in MLFLOW_TRACKING_URI; name all, if several keep artifacts here. Move a tracking "
        "folder into a database first, with `mlflow migrate-filestore`"
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
            option(
                "place",
                metavar="ROOT",
                help="the artifact root, such as mlruns or mlartifacts, or the name or id of an experiment",
            ),
            repeated(
                TRACKING_URI,
                metavar="URI",
                help="database of MLflow's tracking store or model registry; pass all that name artifacts in ROOT "
                "(repeatable; default: MLFLOW_TRACKING_URI, else mlflow.db beside ROOT or in it; for an "
                "experiment, also in the folder above)",
            ),
            repeated(
                "--run",
                metavar="RUN",
                help="only this run, by id or name, or logged model; experiments then stay as they are (repeatable)",
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
