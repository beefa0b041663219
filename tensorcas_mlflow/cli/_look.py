"""The commands ``list`` and ``show``, which look and change nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tensorcas_mlflow._texts import count_text, size_text
from tensorcas_mlflow.cli._output import (
    Json,
    printable,
    ref_json,
    say,
    say_json,
    say_table,
    spec_text,
    steps_text,
    tell_damaged,
)
from tensorcas_mlflow.cli._select import Wanted, is_json, of_run, store_of, the_one
from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.manifest import Row
from tensorcas_mlflow.reader import Node, Summary, open_ref
from tensorcas_mlflow.store import Ref


def list_all(options: Namespace) -> int:
    """List what a store keeps, a run at a time."""
    store = store_of(options)
    refs, damaged = store.readable_checkpoints()
    if options.run is not None:
        refs = of_run(refs, options.run)
    status = tell_damaged(damaged)
    runs: dict[str | None, list[Ref]] = {}
    for ref in refs:
        runs.setdefault(ref.run_id, []).append(ref)
    groups = [_group(run_id, runs[run_id]) for run_id in sorted(runs, key=lambda run_id: run_id is None)]
    if is_json(options):
        listed = [_group_json(group) for group in groups]
        say_json({"store": store.uri, "runs": listed, "damaged_refs": sorted(damaged)})
        return status
    say(printable(f"store {store.uri}"))
    for group in groups:
        _say_group(group)
    return status


def _group(run_id: str | None, refs: Sequence[Ref]) -> Json:
    return {
        "run_id": run_id,
        "checkpoints": sorted(
            (ref for ref in refs if _kind(ref) == "checkpoints"),
            key=lambda ref: (ref.name or "", ref.step or 0),
        ),
        "models": [ref for ref in refs if _kind(ref) == "models"],
        "files": sorted((ref for ref in refs if _kind(ref) == "files"), key=lambda ref: ref.label),
    }


def _kind(ref: Ref) -> str:
    if ref.kind == "file":
        return "files"
    return "models" if ref.model_id is not None or ref.step is None else "checkpoints"


def _group_json(group: Json) -> Json:
    return {key: [ref_json(ref) for ref in value] if isinstance(value, list) else value for key, value in group.items()}


def _say_group(group: Json) -> None:
    say("no run" if group["run_id"] is None else printable(f"run {group['run_id']}"))
    named: dict[tuple[str | None, str | None], list[int]] = {}
    for ref in group["checkpoints"]:
        named.setdefault((ref.name, ref.flavor), []).append(ref.step)
    for (name, flavor), steps in named.items():
        said = "" if name is None else f"{name} "
        say(printable(f"  {said}steps {steps_text(steps)}  {flavor or '-'}"))
    for ref in group["models"]:
        step = "" if ref.step is None else f" step {ref.step}"
        say(printable(f"  model {ref.model_id or '-'}{step}  {ref.flavor or '-'}  {ref.label}"))
    for ref in group["files"]:
        say(printable(f"  file {ref.label}  {size_text(ref.n_bytes)}"))


def show(options: Namespace) -> int:
    """Show the tensors of one checkpoint."""
    store = store_of(options)
    ref = the_one(store.checkpoints(), Wanted(run_id=options.run, step=options.step, name=options.name))
    if options.tree:
        return _show_tree(open_ref(store, ref).summary(), store.uri, ref, is_in_json=is_json(options))
    manifest = store.manifest(ref)
    totals = {
        "n_tensors": len(manifest.rows),
        "n_bytes": manifest.n_bytes,
        "n_chunks": len(manifest.digests),
        "n_unique_chunks": len(unique_rows(manifest.digests)[0]),
    }
    if is_json(options):
        tensors = [_row_json(row) for row in manifest.rows]
        say_json(
            {
                "store": store.uri,
                "checkpoint": ref_json(ref),
                "metadata": dict(manifest.metadata),
                "left_out": dict(manifest.left_out),
                **totals,
                "tensors": tensors,
            }
        )
        return 0
    _say_checkpoint(ref)
    rows = [["tensor", "dtype", "shape", "bytes", "chunks"]]
    rows += [
        [printable(row.spec.name), *spec_text(row.spec), str(row.spec.n_bytes), str(len(row.digests))]
        for row in manifest.rows
    ]
    say_table(rows, right={3, 4})
    for name, kind in manifest.left_out.items():
        say(printable(f"left out: {name}: {kind}"))
    say(
        f"{count_text(totals['n_tensors'], 'tensor')}, {totals['n_bytes']:,} bytes, "
        f"{count_text(totals['n_chunks'], 'chunk')}, {totals['n_unique_chunks']} of them different"
    )
    return 0


def _show_tree(summary: Summary, uri: str, ref: Ref, *, is_in_json: bool) -> int:
    if not is_in_json:
        for line in str(summary).splitlines():
            say(printable(line))
        return 0
    stacks = [
        {
            "name": stack.name,
            "layers": list(stack.layers),
            "bytes": list(stack.layer_bytes),
            "n_experts": stack.n_experts,
        }
        for stack in summary.stacks
    ]
    say_json(
        {
            "store": uri,
            "checkpoint": ref_json(ref),
            "n_tensors": summary.n_tensors,
            "n_bytes": summary.n_bytes,
            "dtypes": {name: {"n_tensors": count, "n_bytes": size} for name, (count, size) in summary.dtypes.items()},
            "stacks": stacks,
            "tree": _node_json(summary.tree),
            "is_cut": summary.is_cut,
        }
    )
    return 0


def _node_json(node: Node) -> Json:
    return {
        "name": node.name,
        "n_tensors": node.n_tensors,
        "n_bytes": node.n_bytes,
        "n_alike": node.n_alike,
        "dtypes": list(node.dtypes),
        "shape": None if node.shape is None else list(node.shape),
        "children": [_node_json(child) for child in node.children],
    }


def _row_json(row: Row) -> Json:
    return {
        "name": row.spec.name,
        "dtype": row.spec.dtype,
        "shape": list(row.spec.shape),
        "n_bytes": row.spec.n_bytes,
        "n_chunks": len(row.digests),
    }


def _say_checkpoint(ref: Ref) -> None:
    say(printable(ref.label))
    facts = {
        "run": ref.run_id,
        "step": ref.step,
        "name": ref.name,
        "model": ref.model_id,
        "parent step": ref.parent_step,
        "flavor": ref.flavor,
        "created": ref.created,
        "metrics": ", ".join(f"{name} {value:g}" for name, value in (ref.metrics or {}).items()) or None,
    }
    for what, value in facts.items():
        if value is not None:
            say(printable(f"  {what}: {value}"))
