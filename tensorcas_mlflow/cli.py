"""The command line: ``tensorcas init | list | gc``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.gc import DEFAULT_GRACE_S, DEFAULT_MAX_WASTE, plan_gc
from tensorcas_mlflow.orphans import drop_orphans, orphaned_refs
from tensorcas_mlflow.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, or 1 after an error, which is told on standard error in one line.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (TensorCasError, ValueError, OSError) as error:
        print(f"tensorcas: error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorcas", description="Work on a store of deduplicated checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    init = commands.add_parser("init", help="make a store")
    init.add_argument("root", help="artifact root: a path, or tensorcas:///absolute/path")
    init.add_argument("--chunk-bytes", type=int, default=DEFAULT_CHUNK_BYTES, help="chunk size, fixed for its life")
    init.set_defaults(run=_init)

    listing = commands.add_parser("list", help="list the checkpoints and files a store keeps")
    listing.add_argument("root", help="the store's root, or any place below it")
    listing.set_defaults(run=_list)

    gc = commands.add_parser("gc", help="delete what no checkpoint or file needs any more")
    gc.add_argument("root", help="the store's root, or any place below it")
    gc.add_argument(
        "--grace",
        type=float,
        default=DEFAULT_GRACE_S / 3600,
        metavar="HOURS",
        help="take a save that has been silent for so long for dead (default %(default)g)",
    )
    gc.add_argument(
        "--max-waste",
        type=float,
        default=DEFAULT_MAX_WASTE,
        metavar="PART",
        help="rewrite packs of which more than this part is unneeded (default %(default)g)",
    )
    gc.add_argument(
        "--orphans",
        action="store_true",
        help="first drop the refs of models that are gone from MLflow's own artifact folders for longer than the grace",
    )
    gc.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    gc.add_argument("-y", "--yes", action="store_true", help="do not ask before deleting")
    gc.set_defaults(run=_gc)
    return parser


def _init(options: argparse.Namespace) -> None:
    store = Store.init(options.root, chunk_bytes=options.chunk_bytes)
    print(f"made store {store.id} at {store.uri}")


def _list(options: argparse.Namespace) -> None:
    store, _ = Store.find(options.root)
    for ref in store.checkpoints():
        step = "" if ref.step is None else str(ref.step)
        print(f"{ref.created}  {ref.kind:10}  {ref.flavor or '-':8}  {step:>6}  {ref.name}")


def _gc(options: argparse.Namespace) -> None:
    store, _ = Store.find(options.root)
    grace_s = options.grace * 3600
    orphans = orphaned_refs(store, grace_s=grace_s) if options.orphans else []
    for ref in orphans:
        print(f"gone: {ref.name}")
    plan = plan_gc(store, grace_s=grace_s, max_waste=options.max_waste)
    print(f"{plan}{f', and what only the {len(orphans)} models that are gone need' if orphans else ''}")
    if options.dry_run:
        return
    if not (options.yes or (plan.is_empty and not orphans)) and input("Delete? [y/N] ").strip().lower() not in (
        "y",
        "yes",
    ):
        print("nothing was deleted")
        return
    if drop_orphans(store, orphans):
        plan = plan_gc(store, grace_s=grace_s, max_waste=options.max_waste)
    print(plan.execute())
