"""The commands ``explain`` and ``calibrate``: how tensors are read, and how they are read best."""

from __future__ import annotations

from argparse import Namespace

from tensorcas_mlflow.cli._output import Json, printable, ref_json, say, say_json
from tensorcas_mlflow.cli._select import Wanted, is_json, store_of, the_one
from tensorcas_mlflow.readplan import PackRead, way_named


def explain(options: Namespace) -> int:
    """Say how tensors of one checkpoint would be read now, and why."""
    store = store_of(options)
    ref = the_one(store.checkpoints(), Wanted(run_id=options.run, step=options.step, name=options.name))
    way = None if options.way is None else way_named(options.way)
    plan = store.explain(store.manifest(ref), options.tensor or None, copy=False if options.map else None, way=way)
    if is_json(options):
        say_json(
            {
                "store": store.uri,
                "checkpoint": ref_json(ref),
                "n_tensors": plan.n_tensors,
                "n_bytes": plan.n_bytes,
                "n_mapped": plan.n_mapped,
                "n_cached": plan.n_cached,
                "packs": [_pack_json(pack) for pack in plan.packs],
                "rule": plan.rule,
            }
        )
        return 0
    say(printable(ref.label))
    for line in str(plan).splitlines():
        say(printable(line))
    return 0


def _pack_json(pack: PackRead) -> Json:
    return {
        "key": pack.key,
        "n_chunks": pack.n_chunks,
        "n_bytes": pack.n_bytes,
        "n_reads": pack.n_reads,
        "read_bytes": pack.read_bytes,
        "way": pack.choice.way,
        "reason": pack.choice.reason,
    }


def calibrate(options: Namespace) -> int:
    """Measure how this machine reads a store best, and keep the rule."""
    store = store_of(options)
    found = store.calibrate()
    if is_json(options):
        measured = [{"what": each.what, "bytes_per_s": each.bytes_per_s} for each in found.measured]
        say_json({"store": store.uri, "measured": measured, "rule": found.rule.source})
        return 0
    for line in str(found).splitlines():
        say(printable(line))
    return 0
