"""The command ``stats``: how much is kept, on disk, and whose it is. It changes nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from tensorcas_mlflow._texts import count_text, size_text
from tensorcas_mlflow.cli._output import printable, say, say_json, say_table, steps_text, tell_damaged
from tensorcas_mlflow.cli._select import is_json, of_run, store_of
from tensorcas_mlflow.maintenance import find_shares, run_stats, store_stats
from tensorcas_mlflow.store import Store


def count(options: Namespace) -> int:
    """Count what a store or a run keeps, and what it takes on disk."""
    store = store_of(options)
    if options.by is not None:
        return _tell_shares(options, store)
    if options.top is not None:
        options.parser.error("--top goes with --by")
    if options.run is None:
        figures: Mapping[str, Any] = store_stats(store)
    else:
        options.run = of_run(store.checkpoints(), options.run)[0].run_id
        figures = run_stats(store, options.run)
    status = tell_damaged(figures.get("damaged_refs", ()))
    if is_json(options):
        say_json({"store": store.uri, **figures})
        return status
    whose = [f"run {options.run}"] if options.run is not None else [count_text(figures["runs"], "run")]
    whose += [count_text(figures["checkpoints"], "checkpoint"), count_text(figures["files"], "file")]
    if options.run is not None and figures["steps"]:
        whose.append(f"steps {steps_text(list(figures['steps']))}")
    disk = figures["disk"]
    parts = ", ".join(f"{kind} {size_text(n)}" for kind, n in disk.items() if kind != "total" and n)
    shared = "whole store on disk" if options.run is not None else "on disk"
    say(printable(f"store {store.uri}"))
    say(printable(", ".join(whose)))
    say(f"{figures['total_bytes']:,} bytes as logged ({size_text(figures['total_bytes'])})")
    say(f"{figures['disk_bytes']:,} bytes {shared} ({size_text(figures['disk_bytes'])}: {parts})")
    chunks = count_text(figures["total_chunks"], "chunk")
    say(f"{chunks}, {figures['unique_chunks']} of them different, ratio {figures['dedup_ratio']}")
    return status


def _tell_shares(options: Namespace, store: Store) -> int:
    if options.top is not None and options.top < 1:
        options.parser.error("--top is a number from 1 on")
    if options.run is not None:
        options.run = of_run(store.checkpoints(), options.run)[0].run_id
    found = find_shares(store, options.by, run_id=options.run)
    shares = found.shares[: options.top]
    if is_json(options):
        say_json({"store": store.uri, **found, "shares": [dict(share) for share in shares]})
        return 0
    levels = ("experiment", "run_id", "step")[: 1 + ("experiment", "run", "step").index(options.by)]
    rows = [[*(level.removesuffix("_id") for level in levels), "kept", "exclusive", "shared", "marginal"]]
    for share in shares:
        names = ["-" if share[level] is None else printable(str(share[level])) for level in levels]
        sizes = [share.exclusive_bytes, share.shared_bytes, share.marginal_bytes]
        rows.append([*names, str(share.refs), *map(size_text, sizes)])
    say(printable(f"store {store.uri}"))
    say_table(rows, right=set(range(len(levels), len(levels) + 4)))
    if len(shares) < len(found.shares):
        say(f"and {len(found.shares) - len(shares)} more")
    say(
        f"{size_text(found.needed_bytes)} needed by all: {size_text(found.exclusive_bytes)} by one alone, "
        f"{size_text(found.shared_bytes)} shared"
    )
    return 0
