"""Commands to maintain a whole store: ``init``, ``verify``, ``repair``, ``optimize``, ``delete``.

Collection has a module of its own, `_gc`. A command asks before it deletes or rewrites.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.cli._command import (
    ABANDON,
    CHECKPOINT,
    DRY_RUN,
    NAME,
    PLACE,
    QUIET,
    RUN,
    STEPS,
    TRACKING_URI,
    WORKERS,
    YES,
    Command,
    engine_of,
    flag,
    option,
    part,
    percentage,
    repeated,
    switch,
)
from tensorcas_mlflow.cli._output import Json, confirm, fields_of, printable, ref_json, say, say_json
from tensorcas_mlflow.cli._progress import ProgressBar
from tensorcas_mlflow.cli._record import NO_RECORD, recorded
from tensorcas_mlflow.cli._select import checkpoint_of, find_checkpoint, is_json, root_of, store_at, store_of
from tensorcas_mlflow.codecs import Effort
from tensorcas_mlflow.errors import ConflictError, CorruptError, DirectAccessError, StoreNotFoundError, TensorCasError
from tensorcas_mlflow.integration.forgotten import Tracker, find_lost, remove_copy
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.maintenance import (
    FormatFix,
    OptimizePlan,
    OptimizeReport,
    Problem,
    RepairPlan,
    RepairReport,
    VerifyReport,
    bytes_freed_by,
    disk_bytes,
    open_damaged,
    plan_gc,
    plan_optimize,
    plan_repair,
)
from tensorcas_mlflow.maintenance import verify as verify_store
from tensorcas_mlflow.store import Store

PROBLEMS = 3
"""Exit status if ``verify`` found problems or ``repair`` left some."""
_RUN = re.compile(r"(?!m-)[^/:]+")
"""Name or id of a run, and neither a model's id, a path nor a URI."""
_CLEARLY = 0.1
"""A smaller share of the bytes that a collection frees is not worth a word."""
EFFORTS = tuple(effort.name.lower() for effort in reversed(Effort))


def make(options: Namespace) -> int:
    """Make a store."""
    if options.place is not None and hasattr(options, "root"):
        options.parser.error("name the place once: init ROOT or init --root ROOT")
    store = Store.init(options.place or root_of(options), chunk_bytes=options.chunk_bytes, database=options.database)
    if is_json(options):
        say_json({"store": store.uri, "id": store.id, "chunk_bytes": store.chunk_bytes})
    else:
        say(printable(f"made store {store.id} at {store.uri}"))
    return 0


def verify(options: Namespace) -> int:
    """Check that every chunk the store references exists and is readable."""
    if options.seed is not None and options.sample is None:
        options.parser.error("--seed needs --sample, such as --sample 5%")
    engine = engine_of(options)
    store = _open_for_verify(options)
    is_part = options.sample is not None or options.part is not None
    action = "verify, in part" if is_part else "verify" if options.full else "verify, quick"
    with recorded(options, store, action) as record:
        with ProgressBar("verifying", is_quiet=options.quiet) as watch:
            report = verify_store(
                store,
                full=options.full,
                sample=options.sample,
                part=options.part,
                seed=options.seed,
                engine=engine,
                watch=watch,
            )
        if options.tracking_uri:
            lost = find_lost(store, [Tracker(uri) for uri in options.tracking_uri])
            missing = (Problem(key=None, reason=each.reason, checkpoint=each.label) for each in lost)
            report = replace(report, problems=(*report.problems, *missing))
        record.summary, record.outcome = str(report), "problems" if report.problems else "done"
    if is_json(options):
        _say_verify_json(store.uri, options, report)
    else:
        for line in str(report).split("\n"):
            say(printable(line))
        if report.seed is not None:
            say(f"drawn by --seed {report.seed}")
    return PROBLEMS if report.problems else 0


def _open_for_verify(options: Namespace) -> Store:
    """Open a store, even with a damaged or missing `format`."""
    try:
        return store_of(options)
    except (CorruptError, StoreNotFoundError):
        if root_of(options).startswith("mlflow-artifacts:"):
            raise
    return open_damaged(root_of(options))[0]


def _say_verify_json(uri: str, options: Namespace, report: VerifyReport) -> None:
    say_json(
        {
            "store": uri,
            "full": report.full,
            "sample": options.sample,
            "part": None if options.part is None else "{}/{}".format(*options.part),
            **fields_of(report, "seed n_refs n_packs n_chunks n_read strangers"),
            "problems": [_problem_json(problem) for problem in report.problems],
        }
    )


def _problem_json(problem: Problem) -> dict[str, object]:
    return fields_of(problem, "key reason checkpoint tensors")


def repair(options: Namespace) -> int:
    """Repair damage, and report losses."""
    engine = engine_of(options)
    sources = [store_at(place) for place in options.sources]
    store, format_fix = _open_for_repair(root_of(options), sources)
    for source in sources:
        if source.uri == store.uri:
            raise ConflictError(f"{source.uri!r} is the store to repair: give --from another one")
    with ProgressBar("reading", is_quiet=options.quiet) as watch:
        plan = plan_repair(
            store, sources=sources, abandon=options.abandon, format_fix=format_fix, engine=engine, watch=watch
        )
    if not is_json(options):
        for line in str(plan).split("\n"):
            say(printable(line))
    report: RepairReport | None = None
    if not options.dry_run and (plan.is_empty or confirm("Repair?", yes=options.yes, as_json=is_json(options))):
        with recorded(options, store, "repair") as record:
            with ProgressBar("repairing", is_quiet=options.quiet):
                report = plan.execute()
            record.summary, record.outcome = str(report), "done" if report.is_whole else "problems"
    if is_json(options):
        say_json(
            {
                "store": store.uri,
                "plan": _repair_plan_json(plan),
                "report": None if report is None else _repair_json(report),
            }
        )
    elif report is not None and not plan.is_empty:
        for line in str(report).split("\n"):
            say(printable(line))
    elif report is None and not options.dry_run:
        say("nothing was changed")
    if report is None:
        return 0 if plan.is_whole else PROBLEMS
    return 0 if report.is_whole else PROBLEMS


def _open_for_repair(root: str, sources: Sequence[Store]) -> tuple[Store, FormatFix | None]:
    if root.startswith("mlflow-artifacts:"):
        raise DirectAccessError("repair", root)
    try:
        return store_at(root), None
    except (CorruptError, StoreNotFoundError):
        return open_damaged(root, sources)


def _repair_plan_json(plan: RepairPlan) -> Json:
    return {
        "findings": [fields_of(each, "key reason remedy is_mended is_harmless") for each in plan.findings],
        "losses": [_problem_json(loss) for loss in plan.losses],
    }


def _repair_json(report: RepairReport) -> Json:
    return {
        **fields_of(report, "restored abandoned packs_gone n_quarantined n_healed n_fenced n_kept left"),
        "losses": [_problem_json(loss) for loss in report.losses],
    }


def optimize(options: Namespace) -> int:
    """Re-encode content not optimized yet, and collect the resulting garbage."""
    engine = engine_of(options)
    store = store_of(options)
    for_restore = options.purpose == "restore"
    if options.pins and not for_restore:
        options.parser.error("--pin needs --for restore")
    pins = [_pin_of(options, store, what) for what in options.pins]
    with ProgressBar("reading", is_quiet=options.quiet) as watch:
        plan = plan_optimize(
            store,
            effort=Effort[options.effort.upper()],
            for_restore=for_restore,
            pins=pins,
            engine=engine,
            watch=watch,
        )
    if not is_json(options):
        say(str(plan))
        if for_restore:
            say(f"checkpoints to restore with at most one delta a chunk: {len(plan.shallow_labels)}")
        if not plan.gc.is_empty:
            say(f"to collect at once: {plan.gc}")
    report: OptimizeReport | None = None
    question = "Optimize, and delete the resulting garbage?"
    if not options.dry_run and (plan.is_empty or confirm(question, yes=options.yes, as_json=is_json(options))):
        bytes_before = disk_bytes(store.backend)
        with (
            recorded(options, store, "optimize") as record,
            ProgressBar("optimizing", is_quiet=options.quiet) as watch,
        ):
            report = plan.execute(engine=engine, watch=watch)
            record.summary = str(report)
        # The record is a file of the store, too.
        report = replace(report, bytes_before=bytes_before, bytes_after=disk_bytes(store.backend))
    if is_json(options):
        say_json(
            {
                "store": store.uri,
                "effort": options.effort,
                "for": options.purpose,
                "plan": _optimize_plan_json(plan),
                "report": report and fields_of(report, "bytes_before bytes_after written_bytes n_forms"),
            }
        )
    elif report is not None and not plan.is_empty:
        say(printable(str(report)))
    elif report is None and not options.dry_run:
        say("nothing was changed")
    return 0


def _pin_of(options: Namespace, store: Store, what: str) -> str:
    """Return the id of the model, or the key of the checkpoint, that somebody typed for a pin."""
    its_store, ref = find_checkpoint(options, what, step=None, name=None)
    if its_store.id != store.id:
        raise ValueError(f"{what!r} is in the store {its_store.uri!r}, and the store to optimize is {store.uri!r}")
    return ref.model_id or ref.key


def _optimize_plan_json(plan: OptimizePlan) -> Json:
    return {
        "n_refs": plan.n_refs,
        "checkpoints": list(plan.labels),
        "one_hop": list(plan.shallow_labels),
        "n_chunks": plan.n_chunks,
        "bytes": plan.n_bytes,
        "stored_bytes": plan.n_stored_bytes,
        "disk_bytes": plan.gc.disk_bytes,
        "collectable_bytes": plan.gc.freed_bytes,
    }


def delete(options: Namespace) -> int:
    """Delete checkpoints."""
    word = options.what or options.run
    steps = list(dict.fromkeys([*options.step, *options.steps]))
    if word is not None and not steps and _RUN.fullmatch(word):
        options.parser.error(f"{word!r} is a run: give --step as well, for one of its checkpoints")
    # All are found before the first is deleted.
    found = [checkpoint_of(options, step=step, to_delete=True) for step in steps or [None]]
    store, refs = found[0][0], [ref for _, ref in found]
    labels = ", ".join(ref.label for ref in refs)
    freed = _freed_text(store, refs)
    question = f"Delete {labels}? {freed[0].upper()}{freed[1:]}."
    for ref in refs:
        if ref.model_id is not None:
            model = f"{ref.label} is the logged model {ref.model_id}"
            question = f"{model}: MLflow will still list it and not load it. {question}"
    is_deleted = confirm(question, yes=options.yes, as_json=is_json(options))
    described = [ref_json(store, ref) for ref in refs] if is_json(options) else []
    if is_deleted:
        for ref in refs:
            _drop(store, ref)
            remove_copy(store, ref)
    if is_json(options):
        say_json({"store": store.uri, "checkpoints": described, "deleted": is_deleted})
    elif is_deleted:
        say(printable(f"deleted {labels}; {freed}"))
    else:
        say("nothing was deleted")
    return 0


def _freed_text(store: Store, refs: Sequence[Ref]) -> str:
    """Say what a collection frees once some checkpoints are deleted."""
    own_bytes, bound_bytes = bytes_freed_by(store, refs), 0
    # A bucket would take many requests, and only the server collects what a carrier reaches.
    if not (store.backend.is_carrier or store.backend.is_remote):
        with suppress(TensorCasError):  # `gc` names the damage, or the save, that prevents a collection
            now, later = plan_gc(store), plan_gc(store, without=[ref.key for ref in refs])
            own_bytes = later.freed_bytes - now.freed_bytes
            bound_bytes = later.bound_bytes - now.bound_bytes
    text = f"a collection then frees up to {size_text(max(0, own_bytes))}"
    if bound_bytes > _CLEARLY * own_bytes:
        text += f", and `tensorcas optimize` about {size_text(bound_bytes)} more, in packs that deltas need"
    return text


def _drop(store: Store, ref: Ref) -> None:
    """Drop the ref shown before, but no ref written in its place since."""
    info, now = store.backend.stat(ref.key), store.ref(ref.key)
    if info is None or now is None:
        return
    if now.write != ref.write or not store.backend.withdraw(ref.key, info.token):
        raise ConflictError(f"{ref.label} was saved again in the meantime; nothing was deleted")


COMMANDS = (
    Command(
        name="init",
        help="make a store",
        examples=["init /data/mlflow", "init tensorcas:///data/mlflow"],
        options=[
            option("place", nargs="?", metavar="ROOT", help="root of the store; the same as --root"),
            option(
                "--chunk-bytes",
                type=int,
                default=DEFAULT_CHUNK_BYTES,
                metavar="N",
                help="chunk size, a power of two, fixed for ever (default: %(default)d)",
            ),
            switch(
                "--database",
                help="keep small blobs in a database: a small save is one transaction; on a local disk only, and the "
                "default there (see TENSORCAS_DATABASE); --no-database for a store that other machines change",
            ),
        ],
        run=make,
    ),
    Command(
        name="verify",
        help="check that every chunk the store references exists and is readable",
        examples=["verify", "verify --full --json", "verify --sample 5%", "verify --full --part 3/7"],
        options=[
            PLACE,
            flag("--full", help="read every chunk, decode it and compare it with its digest"),
            option(
                "--sample",
                type=percentage,
                metavar="PERCENT",
                help="read a random sample of the chunks; without --full, compare stored bytes, a faster check than "
                "decoding",
            ),
            option(
                "--part",
                type=part,
                metavar="K/N",
                help="read the K-th of N fixed parts of the chunks: N calls read all; otherwise like --sample",
            ),
            option("--seed", type=int, metavar="N", help="with --sample: draw the same sample again"),
            *WORKERS,
            repeated(
                TRACKING_URI,
                metavar="URI",
                help="also report runs and logged models of this MLflow tracking store or server without a ref for "
                "their tensors (repeatable)",
            ),
            NO_RECORD,
            QUIET,
        ],
        run=verify,
    ),
    Command(
        name="repair",
        help="repair damage, quarantine irreparable bytes, and report losses",
        examples=[
            "repair --dry-run",
            "repair --from /backup/mlflow",
            "repair --from tensorcas-s3://backup/mlflow --yes",
        ],
        options=[
            PLACE,
            repeated(
                "--from",
                dest="sources",
                metavar="STORE",
                help="another store, such as a backup, with possible copies of lost content (repeatable)",
            ),
            ABANDON,
            *WORKERS,
            flag("--dry-run", help="read everything, print the damage, and stop"),
            NO_RECORD,
            QUIET,
            YES,
        ],
        run=repair,
    ),
    Command(
        name="optimize",
        help="store everything in less space, and delete the resulting garbage",
        examples=["optimize --dry-run", "optimize --yes", "optimize --effort balanced", "optimize --for restore"],
        options=[
            PLACE,
            option(
                "--for",
                dest="purpose",
                choices=("size", "restore"),
                default="size",
                help="size (default): in as little space as possible; restore: decode at most one delta a chunk in the "
                "latest step of each series and each --pin, for some more bytes",
            ),
            repeated(
                "--pin",
                dest="pins",
                metavar="CHECKPOINT",
                help="with --for restore: one more checkpoint or file: a run's last step, a model (its URI or id), an "
                "artifact (its URI or path), or a key (repeatable)",
            ),
            option(
                "--effort",
                choices=EFFORTS,
                default=EFFORTS[0],
                help="small (default): try several encodings of each chunk, slow ones too; balanced: one, as saves do",
            ),
            *WORKERS,
            DRY_RUN,
            NO_RECORD,
            QUIET,
            YES,
        ],
        run=optimize,
    ),
    Command(
        name="delete",
        help="delete checkpoints of a run, or a model; gc and optimize then free the bytes used by them alone",
        examples=[
            "delete baseline --step 3",
            "delete baseline --steps 0 1 2 --yes",
            "delete --run 8f3c21 --step 3 --name ema --yes",
        ],
        options=[CHECKPOINT, RUN, *STEPS, NAME, YES],
        run=delete,
    ),
)
