"""The command ``diff``, which changes nothing."""

from __future__ import annotations

from argparse import Namespace

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.cli._output import Json, figure_json, printable, ref_json, say, say_json, spec_text
from tensorcas_mlflow.cli._select import Wanted, is_json, store_of, the_one
from tensorcas_mlflow.reader import CheckpointDiff, CheckpointReader, ValueChange, diff, open_ref

DIFFERENT = 5
"""The exit status if two checkpoints are not equal."""


def compare(options: Namespace) -> int:
    """Compare two checkpoints; return 0 if they are equal."""
    sides = _sides(options)
    store = store_of(options)
    refs = store.checkpoints()
    before, after = (the_one(refs, wanted) for wanted in sides)
    old, new = open_ref(store, before), open_ref(store, after)
    found = diff(old, new, values=options.values)
    if is_json(options):
        kinds = ("added", "removed", "changed", "equal")
        said: Json = {kind: list(getattr(found, kind)) for kind in kinds}
        said |= {f"{kind}_bytes": getattr(found, f"{kind}_bytes") for kind in kinds}
        said |= {"other": list(found.other), "is_equal": found.is_equal}
        if options.values:
            said["values"] = {name: _values_json(change) for name, change in found.values.items()}
        say_json({"store": store.uri, "before": ref_json(before), "after": ref_json(after), **said})
    else:
        say(printable(f"from {before.label}"))
        say(printable(f"to   {after.label}"))
        _say_diff(found, old, new)
    return 0 if found.is_equal else DIFFERENT


def _sides(options: Namespace) -> tuple[Wanted, Wanted]:
    """Read --run, --step and --name, each given once for both sides or twice."""
    if options.steps and options.step:
        options.parser.error("--steps A B is short for --step A --step B: give one of the two")
    runs, steps, names = options.run, options.steps or options.step or [], options.name or [None]
    if max(len(runs), len(steps), len(names)) != 2 or not steps:
        options.parser.error("say which two checkpoints: --steps A B, or --step N with --run or --name twice")
    first, second = (Wanted(run_id=runs[at], step=steps[at], name=names[at]) for at in (0, -1))
    return first, second


def _say_diff(found: CheckpointDiff, old: CheckpointReader, new: CheckpointReader) -> None:
    for mark, names, reader in (("-", found.removed, old), ("+", found.added, new)):
        for name in names:
            say(printable(f"{mark} {name}  {' '.join(spec_text(reader.spec(name)))}"))
    for name in found.changed:
        was, now = " ".join(spec_text(old.spec(name))), " ".join(spec_text(new.spec(name)))
        say(printable(f"~ {name}  {now if was == now else f'{was} -> {now}'}{_values_text(found.values.get(name))}"))
    if found.other:
        say(f"other content differs: {', '.join(found.other)}")
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
