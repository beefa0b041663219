"""The commands that look: ``list``, ``show`` and ``diff``. None of them changes anything."""

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
    steps_text,
)
from tensorcas_mlflow.cli._select import Wanted, is_json, of_run, store_of, the_one
from tensorcas_mlflow.diff import Diff, diff
from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.store import Ref


def list_all(options: Namespace) -> int:
    """List what a store keeps, a run at a time."""
    store = store_of(options)
    refs = store.checkpoints()
    if options.run is not None:
        refs = of_run(refs, options.run)
    runs: dict[str | None, list[Ref]] = {}
    for ref in refs:
        runs.setdefault(ref.run_id, []).append(ref)
    groups = [_group(run_id, runs[run_id]) for run_id in sorted(runs, key=lambda run_id: run_id is None)]
    if is_json(options):
        say_json({"store": store.uri, "runs": [_group_json(group) for group in groups]})
        return 0
    say(printable(f"store {store.uri}"))
    for group in groups:
        _say_group(group)
    return 0


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
                **totals,
                "tensors": tensors,
            }
        )
        return 0
    _say_checkpoint(ref)
    rows = [["tensor", "dtype", "shape", "bytes", "chunks"]]
    rows += [
        [printable(row.spec.name), *_spec_text(row), str(row.spec.n_bytes), str(len(row.digests))]
        for row in manifest.rows
    ]
    say_table(rows, right={3, 4})
    say(
        f"{count_text(totals['n_tensors'], 'tensor')}, {totals['n_bytes']:,} bytes, "
        f"{count_text(totals['n_chunks'], 'chunk')}, {totals['n_unique_chunks']} of them different"
    )
    return 0


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


def _spec_text(row: Row) -> list[str]:
    return [printable(row.spec.dtype or "bytes"), "x".join(map(str, row.spec.shape)) or "scalar"]


def compare(options: Namespace) -> int:
    """Compare two checkpoints."""
    sides = _sides(options)
    store = store_of(options)
    refs = store.checkpoints()
    before, after = (the_one(refs, wanted) for wanted in sides)
    old, new = store.manifest(before), store.manifest(after)
    found = diff(old, new)
    if is_json(options):
        kinds = ("added", "removed", "changed", "equal")
        said: Json = {kind: list(getattr(found, kind)) for kind in kinds}
        said |= {f"{kind}_bytes": getattr(found, f"{kind}_bytes") for kind in kinds}
        say_json({"store": store.uri, "before": ref_json(before), "after": ref_json(after), **said})
        return 0
    say(printable(f"from {before.label}"))
    say(printable(f"to   {after.label}"))
    _say_diff(found, old, new)
    return 0


def _sides(options: Namespace) -> tuple[Wanted, Wanted]:
    """Read --run, --step and --name, each given once for both sides or twice."""
    if options.steps and options.step:
        options.parser.error("--steps A B is short for --step A --step B: give one of the two")
    runs, steps, names = options.run, options.steps or options.step or [], options.name or [None]
    if max(len(runs), len(steps), len(names)) != 2 or not steps:
        options.parser.error("say which two checkpoints: --steps A B, or --step N with --run or --name twice")
    first, second = (Wanted(run_id=runs[at], step=steps[at], name=names[at]) for at in (0, -1))
    return first, second


def _say_diff(found: Diff, old: Manifest, new: Manifest) -> None:
    for mark, names, manifest in (("-", found.removed, old), ("+", found.added, new)):
        for name in names:
            row = manifest.row(name)
            say(printable(f"{mark} {name}  {' '.join(_spec_text(row))}"))
    for name in found.changed:
        was, now = " ".join(_spec_text(old.row(name))), " ".join(_spec_text(new.row(name)))
        say(printable(f"~ {name}  {now if was == now else f'{was} -> {now}'}"))
    say(
        f"{len(found.added)} added ({size_text(found.added_bytes)}), "
        f"{len(found.removed)} removed ({size_text(found.removed_bytes)}), "
        f"{len(found.changed)} changed ({size_text(found.changed_bytes)}), "
        f"{len(found.equal)} equal ({size_text(found.equal_bytes)})"
    )
