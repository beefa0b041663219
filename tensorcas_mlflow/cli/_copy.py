"""The command that copies from one store to another: ``copy``."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.cli._output import Json, printable, say, say_json
from tensorcas_mlflow.cli._select import full_run_id, is_json, of_run, store_at
from tensorcas_mlflow.cli._teller import Teller
from tensorcas_mlflow.maintenance import (
    Copied,
    CopyEnd,
    CopyPlan,
    Failure,
    PlainReport,
    Progress,
    copy_all,
    end_of,
    open_destination,
    read_source,
)
from tensorcas_mlflow.store import Ref, Store

FAILED, KEPT = 1, 4
"""Exit statuses: something could not be copied; the destination has something else, which was kept."""

_ID_OF_MLFLOW = re.compile(r"[0-9a-f]{32}|m-[0-9a-f]{32}|tr-[0-9a-f]{32}")


def copy(options: Namespace) -> int:
    """Copy what a store keeps to another one."""
    if hasattr(options, "root"):
        options.parser.error("say both places: copy SRC DST, without --root")
    source = end_of(store_at(options.source))
    refs, unreadable = read_source(source.store)
    runs = [full_run_id(refs, each) for each in options.run]
    chosen = _chosen(refs, runs, options.path)
    _check_paths(source, refs, options.path)
    destination = _destination(options, source.store)
    if not is_json(options) and destination.is_new:
        made = "would make" if options.dry_run else "made"
        whose = "of an id of its own" if options.new_id else f"of the same id, {source.store.id},"
        say(printable(f"{made} a store {whose} at {destination.uri}"))
    with Teller(sys.stderr, is_quiet=options.quiet) as teller:

        def watch(progress: Progress) -> None:
            line = f"{progress.n_done} of {progress.n} checkpoints and files, {size_text(progress.done_bytes)} read"
            teller.tell(line, progress.done_bytes, is_last=progress.n_done == progress.n)

        copied = copy_all(
            source,
            destination,
            chosen,
            wanted_plain=_wanted_plain(chosen, runs, options.path),
            replace=options.replace,
            dry_run=options.dry_run,
            watch=watch,
        )
    failed = [*unreadable, *copied.refs.failed, *(() if copied.plain is None else copied.plain.failed)]
    kept = [*copied.refs.kept, *(() if copied.plain is None else copied.plain.kept)]
    if is_json(options):
        say_json(_json(source, destination, copied, failed, kept))
    else:
        _say(copied, failed, kept, is_dry=options.dry_run)
    return FAILED if failed else KEPT if kept else 0


def _destination(options: Namespace, source: Store) -> CopyEnd:
    if options.destination.startswith("mlflow-artifacts:"):
        # Whoever logs to an experiment makes the store that is carried there, with the id that they all agree on.
        return end_of(store_at(options.destination))
    return open_destination(options.destination, source, new_id=options.new_id, dry_run=options.dry_run)


def _chosen(refs: Sequence[Ref], runs: Sequence[str], paths: Sequence[str]) -> list[Ref]:
    """Choose what belongs to some runs or lies at or below some artifact paths; all if none is given.

    Raises:
        CheckpointNotFoundError: There is nothing of one of the runs.
    """
    if not runs and not paths:
        return list(refs)
    keys = {ref.key for run in runs for ref in of_run(refs, run)}
    below = _is_below(paths)
    return [ref for ref in refs if ref.key in keys or below(ref.path or ref.copy_path or "")]


def _check_paths(source: CopyEnd, refs: Sequence[Ref], paths: Sequence[str]) -> None:
    """Refuse a path at which there is nothing.

    Raises:
        ValueError: There is one.
    """
    for path in paths:
        below = _is_below([path])
        if any(below(ref.path or ref.copy_path or "") for ref in refs):
            continue
        if not any(below(file.path) for file in (() if source.plain is None else source.plain.list())):
            raise ValueError(f"there is nothing at {path!r} in {source.uri!r}; nothing was copied")


def _wanted_plain(chosen: Sequence[Ref], runs: Sequence[str], paths: Sequence[str]) -> Callable[[str], bool]:
    """Choose plain files as refs are chosen: those of the runs, of models that are copied, and below the paths."""
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
    """Give the artifact root of the run, model or trace that a path belongs to, as MLflow lays it."""
    parts = path.split("/")
    for at, part in enumerate(parts[1:], start=1):
        if part == "artifacts" and (parts[at - 1] in runs or _ID_OF_MLFLOW.fullmatch(parts[at - 1])):
            return "/".join(parts[: at + 1])
    return None


def _say(copied: Copied, failed: Sequence[Failure], kept: Sequence[str], *, is_dry: bool) -> None:
    for what in kept:
        say(printable(f"kept: {what}: the destination has another one; --replace takes the source's"))
    for what in () if isinstance(copied.refs, CopyPlan) else copied.refs.dropped:
        say(printable(f"left out: {what}: it was dropped or saved anew meanwhile"))
    for failure in failed:
        say(printable(f"failed: {failure}"))
    plain = copied.plain
    if plain is None:
        say("plain files were not looked at: one of the places shows none")
    else:
        for path in plain.skipped:
            say(printable(f"left out: {path}: a link that leads elsewhere, or the folder of another store"))
    say(str(copied.refs))
    if plain is not None:
        say(str(plain).replace("copied", "to copy:", 1) if is_dry else str(plain))


def _json(
    source: CopyEnd, destination: CopyEnd, copied: Copied, failed: Sequence[Failure], kept: Sequence[str]
) -> Json:
    refs = copied.refs
    plan: Json | None = None
    report: Json | None = None
    if isinstance(refs, CopyPlan):
        plan = {"n_new": refs.n_new, "n_there": refs.n_there, "n_chunks": refs.n_chunks, "bytes": refs.chunk_bytes}
    else:
        sizes = {"read_bytes": refs.read_bytes, "written_bytes": refs.written_bytes}
        report = {"n_copied": refs.n_copied, "n_there": refs.n_there, **sizes}
    return {
        "source": source.uri,
        "destination": destination.uri,
        "made": destination.is_new and plan is None,
        "plan": plan,
        "report": report,
        "plain": None if copied.plain is None else _plain_json(copied.plain),
        "kept": list(kept),
        "dropped": [] if isinstance(refs, CopyPlan) else list(refs.dropped),
        "failed": [{"what": each.what, "reason": each.reason, "tensors": list(each.tensors)} for each in failed],
    }


def _plain_json(plain: PlainReport) -> Json:
    return {
        "n_copied": plain.n_copied,
        "bytes": plain.copied_bytes,
        "n_there": plain.n_there,
        "skipped": list(plain.skipped),
    }
