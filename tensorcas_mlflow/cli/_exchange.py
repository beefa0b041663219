"""The commands that speak other formats: ``import``, ``export`` and ``convert``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from tensorcas_mlflow._texts import count_text, size_text
from tensorcas_mlflow.cli._output import Json, printable, ref_json, say, say_json
from tensorcas_mlflow.cli._select import Wanted, full_run_id, is_json, is_short_id, store_of, the_one
from tensorcas_mlflow.cli._teller import Teller
from tensorcas_mlflow.exchange import import_checkpoint, plan_convert, plan_export
from tensorcas_mlflow.file_formats import WritePlan, open_listing
from tensorcas_mlflow.reader import open_ref
from tensorcas_mlflow.store import RefTarget, Store


def take_in(options: Namespace) -> int:
    """Make a checkpoint of a file."""
    store = store_of(options)
    listing = open_listing(options.path, format=options.source_format)
    target = RefTarget(run_id=_run_of(store, options.run), step=options.step, name=options.name)
    with _Progress(options) as progress:
        ref = import_checkpoint(
            store,
            listing,
            target,
            allow_left_out=options.skip_unknown,
            overwrite=options.overwrite,
            progress=progress.show,
        )
    specs = listing.specs()
    n_bytes = sum(spec.n_bytes for spec in specs)
    if is_json(options):
        sizes = {"n_tensors": len(specs), "n_bytes": n_bytes}
        said = {"store": store.uri, "checkpoint": ref_json(ref), "source_format": listing.format}
        say_json({**said, **sizes, "left_out": dict(listing.left_out)})
        return 0
    _say_left_out(listing.left_out)
    what = f"{count_text(len(specs), 'tensor')}, {size_text(n_bytes)}, from {listing.format},"
    say(printable(f"imported {what} as {ref.label}"))
    return 0


def _run_of(store: Store, run_id: str) -> str:
    return full_run_id(store.checkpoints(), run_id) if is_short_id(run_id) else run_id


def give_out(options: Namespace) -> int:
    """Write a checkpoint's tensors into a file."""
    store = store_of(options)
    ref = the_one(store.checkpoints(), Wanted(run_id=options.run, step=options.step, name=options.name))
    with open_ref(store, ref) as reader:
        plan = plan_export(reader, options.out, allow_left_out=options.skip_unknown, **_choices(options))
        if not is_json(options):
            say(printable(f"from {ref.label}"))
            _say_left_out(plan.left_out)
        _write(options, plan, {"store": store.uri, "checkpoint": ref_json(ref), "left_out": dict(plan.left_out)})
    return 0


def convert(options: Namespace) -> int:
    """Write a file's tensors into another one."""
    listing = open_listing(options.path, format=options.source_format)
    plan = plan_convert(listing, options.out, allow_left_out=options.skip_unknown, **_choices(options))
    if not is_json(options):
        _say_left_out(plan.left_out)
    source = {"source": os.path.abspath(options.path), "source_format": listing.format}
    _write(options, plan, {**source, "left_out": dict(plan.left_out)})
    return 0


def _choices(options: Namespace) -> dict[str, Any]:
    return {
        "format": options.to,
        "match": options.match,
        "shard_bytes": options.shard_size,
        "partitions": options.partitions,
        "overwrite": options.overwrite,
    }


def _write(options: Namespace, plan: WritePlan, what: Mapping[str, Any]) -> None:
    if not options.dry_run:
        with _Progress(options) as progress:
            plan.execute(progress=progress.show)
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


class _Progress(Teller):
    """Tells how far a command has come."""

    def __init__(self, options: Namespace) -> None:
        super().__init__(sys.stderr, is_quiet=options.quiet)

    def __enter__(self) -> _Progress:
        return self

    def show(self, n_done: int, n_all: int) -> None:
        """Show a part of a whole."""
        self.tell(f"{100 * n_done // max(n_all, 1)} % of {size_text(n_all)}", n_done)
