"""``verify``: is everything there that a store says it keeps? It changes nothing."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.cli._output import printable, say, say_json
from tensorcas_mlflow.cli._select import is_json, root_of, store_of
from tensorcas_mlflow.cli._teller import Teller
from tensorcas_mlflow.errors import CorruptError, StoreNotFoundError
from tensorcas_mlflow.maintenance import Problem, Progress, VerifyReport, open_damaged, verify
from tensorcas_mlflow.orphans import find_lost, open_tracker
from tensorcas_mlflow.store import Store

PROBLEMS = 3
"""Exit status of a look at a store that is not sound."""


def check(options: Namespace) -> int:
    """Look at a store."""
    if options.seed is not None and options.sample is None:
        options.parser.error("--seed draws a --sample: say how much of the chunks, such as --sample 5%")
    store = _open(options)
    with Teller(sys.stderr, is_quiet=options.quiet) as teller:

        def watch(progress: Progress) -> None:
            line = f"{size_text(progress.done_bytes)} of {size_text(progress.n_bytes or 0)} read"
            teller.tell(line, progress.done_bytes)

        report = verify(
            store, full=options.full, sample=options.sample, part=options.part, seed=options.seed, watch=watch
        )
    if options.tracking_uri:
        lost = find_lost(store, [open_tracker(uri) for uri in options.tracking_uri])
        missing = (Problem(key=None, reason=each.reason, checkpoint=each.label) for each in lost)
        report = replace(report, problems=(*report.problems, *missing))
    if is_json(options):
        _say_json(store.uri, options, report)
    else:
        for line in str(report).split("\n"):
            say(printable(line))
        if report.seed is not None:
            say(f"drawn by --seed {report.seed}")
    return PROBLEMS if report.problems else 0


def _open(options: Namespace) -> Store:
    """Open a store, also one of which only the manifests still say what it was."""
    try:
        return store_of(options)
    except (CorruptError, StoreNotFoundError):
        if root_of(options).startswith("mlflow-artifacts:"):
            raise
    return open_damaged(root_of(options))[0]


def _say_json(uri: str, options: Namespace, report: VerifyReport) -> None:
    say_json(
        {
            "store": uri,
            "full": report.full,
            "sample": options.sample,
            "part": None if options.part is None else "{}/{}".format(*options.part),
            "seed": report.seed,
            "n_refs": report.n_refs,
            "n_packs": report.n_packs,
            "n_chunks": report.n_chunks,
            "n_read": report.n_read,
            "strangers": list(report.strangers),
            "problems": [_problem_json(problem) for problem in report.problems],
        }
    )


def _problem_json(problem: Problem) -> dict[str, object]:
    return {
        "key": problem.key,
        "reason": problem.reason,
        "checkpoint": problem.checkpoint,
        "tensors": list(problem.tensors),
    }
