"""Commands to move tensors between stores and files: ``copy``, ``import``, ``export``, ``convert``."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.cli._command import (
    CHECKPOINT,
    DRY_RUN,
    LAST_STEP,
    NAME,
    NEW_NAME,
    OVERWRITE,
    QUIET,
    RUN,
    WORKERS,
    Command,
    Option,
    count,
    engine_of,
    flag,
    option,
    repeated,
    size,
)
from tensorcas_mlflow.cli._output import Json, fields_of, printable, ref_json, say, say_json
from tensorcas_mlflow.cli._progress import ProgressBar
from tensorcas_mlflow.cli._select import (
    checkpoint_of,
    is_json,
    of_run,
    run_to_read,
    run_to_write,
    store_at,
    store_to_write,
)
from tensorcas_mlflow.file_formats import FORMATS_IN, FORMATS_OUT, WritePlan, open_listing
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import (
    Copied,
    CopyEnd,
    CopyPlan,
    Failure,
    copy_all,
    end_of,
    open_destination,
    read_source,
)
from tensorcas_mlflow.reader import import_checkpoint, open_ref, plan_export
from tensorcas_mlflow.store import Store

FAILED, KEPT = 1, 4
"""Exit statuses of ``copy``: something could not be copied; the destination kept something else."""

_ID_OF_MLFLOW = re.compile(r"[0-9a-f]{32}|m-[0-9a-f]{32}|tr-[0-9a-f]{32}")


def copy(options: Namespace) -> int:
    """Copy the content of one store to another."""
    if hasattr(options, "root"):
        options.parser.error("name both places: copy SRC DST, without --root")
    engine = engine_of(options)
    source = end_of(store_at(options.source))
    refs, unreadable = read_source(source.store)
    runs = [run_to_read(source.store, refs, each) for each in options.run]
    chosen = _chosen(refs, runs, options.path)
    _check_paths(source, refs, options.path)
    destination = _destination(options, source.store)
    if not is_json(options) and destination.is_new:
        made = "would make" if options.dry_run else "made"
        whose = "of an id of its own" if options.new_id else f"of the same id, {source.store.id},"
        say(printable(f"{made} a store {whose} at {destination.uri}"))
    with ProgressBar("copying", is_quiet=options.quiet) as watch:
        copied = copy_all(
            source,
            destination,
            chosen,
            wanted_plain=_wanted_plain(chosen, runs, options.path),
            replace=options.overwrite,
            dry_run=options.dry_run,
            engine=engine,
            watch=watch,
        )
    failed = [*unreadable, *copied.refs.failed, *(() if copied.plain is None else copied.plain.failed)]
    kept = [*copied.refs.kept, *(() if copied.plain is None else copied.plain.kept)]
    if is_json(options):
        say_json(_copy_json(source, destination, copied, failed, kept))
    else:
        _say_copied(copied, failed, kept, is_dry=options.dry_run)
    return FAILED if failed else KEPT if kept else 0


def _destination(options: Namespace, source: Store) -> CopyEnd:
    if options.destination.startswith("mlflow-artifacts:"):
        # An experiment's carried store is created by the first client to log there. Its id is the same for all clients.
        return end_of(store_at(options.destination))
    return open_destination(options.destination, source, new_id=options.new_id, dry_run=options.dry_run)


def _chosen(refs: Sequence[Ref], runs: Sequence[str], paths: Sequence[str]) -> list[Ref]:
    """Choose the refs of the runs, and those at or below the artifact paths; all if none is given.

    Raises:
        CheckpointNotFoundError: One of the runs has no content.
    """
    if not runs and not paths:
        return list(refs)
    keys = {ref.key for run in runs for ref in of_run(refs, run)}
    below = _is_below(paths)
    return [ref for ref in refs if ref.key in keys or below(ref.path or ref.copy_path or "")]


def _check_paths(source: CopyEnd, refs: Sequence[Ref], paths: Sequence[str]) -> None:
    """Check that every path exists.

    Raises:
        ValueError: There is nothing at one of them.
    """
    for path in paths:
        below = _is_below([path])
        if any(below(ref.path or ref.copy_path or "") for ref in refs):
            continue
        if not any(
            below(file.path) and not file.is_folder
            for file in (() if source.plain is None else source.plain.walk(left_out=[]))
        ):
            raise ValueError(f"there is nothing at {path!r} in {source.uri!r}; nothing was copied")


def _wanted_plain(chosen: Sequence[Ref], runs: Sequence[str], paths: Sequence[str]) -> Callable[[str], bool]:
    """Choose the plain files of the runs, of copied models, and below the paths."""
    if not runs and not paths:
        return lambda path: True
    of_runs = set(runs)
    roots = {root for ref in chosen if (root := _artifact_root(ref.path or ref.copy_path or "", of_runs))}
    below = _is_below(paths)

    def wanted(path: str) -> bool:
        root = _artifact_root(path, of_runs)
        return below(path) or (root is not None and (root in roots or root.split("/")[-2] in of_runs))

    return wanted


def _is_below(paths: Sequence[str]) -> Callable[[str], bool]:
    folders = tuple(path.strip("/") for path in paths)
    return lambda path: any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _artifact_root(path: str, runs: set[str]) -> str | None:
    """Return the artifact root of the run, model or trace around a path, by MLflow's layout."""
    parts = path.split("/")
    for at, part in enumerate(parts[1:], start=1):
        if part == "artifacts" and (parts[at - 1] in runs or _ID_OF_MLFLOW.fullmatch(parts[at - 1])):
            return "/".join(parts[: at + 1])
    return None


def _say_copied(copied: Copied, failed: Sequence[Failure], kept: Sequence[str], *, is_dry: bool) -> None:
    for what in kept:
        say(printable(f"kept: {what}: the destination has another one; --overwrite takes the source's"))
    for what in () if isinstance(copied.refs, CopyPlan) else copied.refs.deleted:
        say(printable(f"left out: {what}: it was deleted or saved again in the meantime"))
    for failure in failed:
        say(printable(f"failed: {failure}"))
    plain = copied.plain
    if plain is None:
        say("plain files were not compared: one of the places shows none")
    else:
        for path in plain.skipped:
            say(printable(f"left out: {path}: a link out of the root, or the folder of another store"))
    say(str(copied.refs))
    if plain is not None:
        say(str(plain).replace("copied", "to copy:", 1) if is_dry else str(plain))


def _copy_json(
    source: CopyEnd, destination: CopyEnd, copied: Copied, failed: Sequence[Failure], kept: Sequence[str]
) -> Json:
    refs, plain = copied.refs, copied.plain
    plan: Json | None = None
    report: Json | None = None
    if isinstance(refs, CopyPlan):
        plan = {**fields_of(refs, "n_new n_there n_chunks"), "bytes": refs.chunk_bytes}
    else:
        report = fields_of(refs, "n_copied n_there read_bytes written_bytes")
    return {
        "source": source.uri,
        "destination": destination.uri,
        "made": destination.is_new and plan is None,
        "plan": plan,
        "report": report,
        "plain": plain and {**fields_of(plain, "n_copied n_there skipped"), "bytes": plain.copied_bytes},
        "kept": list(kept),
        "deleted": [] if isinstance(refs, CopyPlan) else list(refs.deleted),
        "failed": [fields_of(each, "what reason tensors") for each in failed],
    }


def import_file(options: Namespace) -> int:
    """Create a checkpoint from a file."""
    store = store_to_write(options, options.run)
    listing = open_listing(options.path, format=options.in_format)
    target = RefTarget(run_id=run_to_write(store, options.run), step=options.step, name=options.name)
    with ProgressBar("importing", is_quiet=options.quiet) as bar:
        ref = import_checkpoint(
            store,
            listing,
            target,
            allow_left_out=options.skip_unknown,
            overwrite=options.overwrite,
            progress=bar.bytes,
        )
    specs = listing.specs()
    n_bytes = sum(spec.n_bytes for spec in specs)
    if is_json(options):
        sizes = {"n_tensors": len(specs), "n_bytes": n_bytes}
        said = {"store": store.uri, "checkpoint": ref_json(store, ref), "source_format": listing.format}
        say_json({**said, **sizes, "left_out": dict(listing.left_out)})
        return 0
    _say_left_out(listing.left_out)
    what = f"{count_text(len(specs), 'tensor')}, {size_text(n_bytes)}, from {listing.format},"
    say(printable(f"imported {what} as {ref.label}"))
    return 0


def export(options: Namespace) -> int:
    """Write the tensors of a checkpoint into a file."""
    store, ref = checkpoint_of(options, step=options.step)
    with open_ref(store, ref) as reader:
        plan = plan_export(reader, options.out, allow_left_out=options.skip_unknown, **_choices(options))
        if not is_json(options):
            say(printable(f"from {ref.label}"))
            _say_left_out(plan.left_out)
        _write(options, plan, {"store": store.uri, "checkpoint": ref_json(store, ref), "left_out": dict(plan.left_out)})
    return 0


def convert(options: Namespace) -> int:
    """Write the tensors of a file into another file."""
    listing = open_listing(options.path, format=options.in_format)
    plan = plan_export(listing, options.out, allow_left_out=options.skip_unknown, **_choices(options))
    if not is_json(options):
        _say_left_out(plan.left_out)
    source = {"source": os.path.abspath(options.path), "source_format": listing.format}
    _write(options, plan, {**source, "left_out": dict(plan.left_out)})
    return 0


def _choices(options: Namespace) -> dict[str, Any]:
    return {
        "format": options.out_format,
        "match": options.match,
        "shard_bytes": options.shard_size,
        "partitions": options.partitions,
        "overwrite": options.overwrite,
    }


def _write(options: Namespace, plan: WritePlan, what: Mapping[str, Any]) -> None:
    if not options.dry_run:
        with ProgressBar("writing", is_quiet=options.quiet) as bar:
            plan.execute(progress=bar.bytes)
    written = plan.result
    if is_json(options):
        files: list[Json] = [{"path": os.fspath(file.path), "n_bytes": file.n_bytes} for file in written.files]
        sizes = {"n_tensors": written.n_tensors, "n_bytes": written.n_bytes, "files": files}
        say_json({**what, "format": written.format, "is_dry": options.dry_run, **sizes})
        return
    for line in str(plan).splitlines():
        say(printable(f"would write {line}" if options.dry_run and not line.startswith(" ") else line))


def _say_left_out(left_out: Mapping[str, str]) -> None:
    for name, kind in left_out.items():
        say(printable(f"left out: {name}: {kind}"))


_SKIP_UNKNOWN = flag("--skip-unknown", help="leave out unsupported tensors, such as quantized ones")
_OUT = (
    option("out", metavar="OUT", help="file or folder to write; it appears whole or not at all"),
    option(
        "--shard-size",
        type=size,
        metavar="SIZE",
        help="for safetensors: write a folder of files of at most this many bytes, such as 5GB, and an index",
    ),
    option("--partitions", type=count, metavar="N", help="for serverlessllm: spread the tensors over this many files"),
    option("--match", metavar="GLOB", help="only tensors with matching names, such as '*.attn.*'"),
    OVERWRITE,
    DRY_RUN,
    QUIET,
)


def _in_format(word: str) -> Option:
    return option(
        word, dest="in_format", choices=FORMATS_IN, help="format of the file to read (default: by its first bytes)"
    )


def _out_format(word: str) -> Option:
    return option(
        word, dest="out_format", choices=list(FORMATS_OUT), help="format of the file to write (default: by its name)"
    )


COMMANDS = (
    Command(
        name="copy",
        help="copy a store to another one, moving only the missing content",
        examples=[
            "copy /data/mlflow /backup/mlflow",
            "copy /backup/mlflow /data/mlflow --run 8f3c21",
            "copy /data/mlflow /backup/mlflow --dry-run",
        ],
        options=[
            option("source", metavar="SRC", help="the store, as for --root"),
            option("destination", metavar="DST", help="root of the other store, created if missing"),
            repeated("--run", metavar="RUN", help="only the content of this run, by id or name (repeatable)"),
            repeated(
                "--path",
                metavar="PATH",
                help="only the content at or below this artifact path, such as the folder of a model (repeatable)",
            ),
            flag("--overwrite", help="replace differing content at the destination (default: keep it and report it)"),
            flag("--new-id", help="give a new store an id of its own; use this to write to both stores"),
            *WORKERS,
            DRY_RUN,
            QUIET,
        ],
        run=copy,
    ),
    Command(
        name="import",
        help="create a checkpoint from a file of another format, or of a folder of such files",
        examples=[
            "import model.safetensors --run 8f3c21 --step 0",
            "import bert-base/ --run 8f3c21 --step 0 --name base",
            "import model.gguf --run 8f3c21 --step 0 --skip-unknown",
        ],
        options=[
            option("path", metavar="PATH", help="file or folder to read"),
            option("--run", metavar="RUN", required=True, help="run of the new checkpoint, by id or name"),
            option("--step", metavar="N", type=int, required=True, help="step of the new checkpoint"),
            NEW_NAME,
            _in_format("--file-format"),
            _SKIP_UNKNOWN,
            OVERWRITE,
            QUIET,
        ],
        run=import_file,
    ),
    Command(
        name="export",
        help="write the tensors of a checkpoint into a file or folder of another format",
        examples=[
            "export baseline --step 20 model.safetensors",
            "export models:/digits@champion model.safetensors",
            "export --run 8f3c21 model/ --file-format safetensors --shard-size 5GB",
            "export --run 8f3c21 experts.npz --match '*.experts.*'",
            "export --run 8f3c21 served/ --file-format serverlessllm --partitions 4 --dry-run",
        ],
        options=[CHECKPOINT, RUN, LAST_STEP, NAME, *_OUT, _out_format("--file-format"), _SKIP_UNKNOWN],
        run=export,
    ),
    Command(
        name="convert",
        help="write the tensors of a file into a file of another format, without a store",
        examples=[
            "convert model.pt model.safetensors",
            "convert llama/ served/ --out-format serverlessllm --partitions 4",
        ],
        options=[
            option("path", metavar="IN", help="file or folder to read"),
            _in_format("--in-format"),
            _SKIP_UNKNOWN,
            *_OUT,
            _out_format("--out-format"),
        ],
        run=convert,
    ),
)
