"""The command ``diff``, which changes nothing."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.cli._output import Json, figure_json, printable, ref_json, say, say_json, spec_text
from tensorcas_mlflow.cli._select import Wanted, is_json, store_of, the_one
from tensorcas_mlflow.diff import Diff, diff
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.reader import ValueChange, open_ref
from tensorcas_mlflow.reader import diff as diff_readers


def compare(options: Namespace) -> int:
    """Compare two checkpoints."""
    sides = _sides(options)
    store = store_of(options)
    refs = store.checkpoints()
    before, after = (the_one(refs, wanted) for wanted in sides)
    old, new = store.manifest(before), store.manifest(after)
    found = diff(old, new)
    values: Mapping[str, ValueChange] = {}
    if options.values:
        values = diff_readers(open_ref(store, before), open_ref(store, after), values=True).values
    if is_json(options):
        kinds = ("added", "removed", "changed", "equal")
        said: Json = {kind: list(getattr(found, kind)) for kind in kinds}
        said |= {f"{kind}_bytes": getattr(found, f"{kind}_bytes") for kind in kinds}
        if options.values:
            said["values"] = {name: _values_json(change) for name, change in values.items()}
        say_json({"store": store.uri, "before": ref_json(before), "after": ref_json(after), **said})
        return 0
    say(printable(f"from {before.label}"))
    say(printable(f"to   {after.label}"))
    _say_diff(found, old, new, values)
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


def _say_diff(found: Diff, old: Manifest, new: Manifest, values: Mapping[str, ValueChange]) -> None:
    for mark, names, manifest in (("-", found.removed, old), ("+", found.added, new)):
        for name in names:
            row = manifest.row(name)
            say(printable(f"{mark} {name}  {' '.join(spec_text(row))}"))
    for name in found.changed:
        was, now = " ".join(spec_text(old.row(name))), " ".join(spec_text(new.row(name)))
        say(printable(f"~ {name}  {now if was == now else f'{was} -> {now}'}{_values_text(values.get(name))}"))
    say(
        f"{len(found.added)} added ({size_text(found.added_bytes)}), "
        f"{len(found.removed)} removed ({size_text(found.removed_bytes)}), "
        f"{len(found.changed)} changed ({size_text(found.changed_bytes)}), "
        f"{len(found.equal)} equal ({size_text(found.equal_bytes)})"
    )


def _values_text(change: ValueChange | None) -> str:
    if change is None:
        return ""
    figures = {"max": change.max_absolute, "mean": change.mean_absolute, "norm": change.relative_norm}
    told = [f"{name} {value:.3g}" for name, value in figures.items() if value is not None]
    return "  " + " ".join([*told, f"equal {change.share_equal:.1%}"])


def _values_json(change: ValueChange) -> Json:
    return {
        "max_absolute": figure_json(change.max_absolute),
        "mean_absolute": figure_json(change.mean_absolute),
        "relative_norm": figure_json(change.relative_norm),
        "share_equal": change.share_equal,
        "n_elements": change.n_elements,
        "n_not_finite": change.n_not_finite,
    }
