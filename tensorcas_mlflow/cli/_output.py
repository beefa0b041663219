"""What reaches the terminal: text that is safe to show, and JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TextIO

from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.store import Ref
from tensorcas_mlflow.tensor import Spec

Json = dict[str, Any]


def printable(text: str) -> str:
    """Write a text in one line that leaves a terminal as it is: names in a store are anybody's.

    What does not print (newlines, escape sequences, marks that turn the direction of reading) is written as in a
    Python text.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(text: str = "") -> None:
    """Print a line."""
    _print(text, sys.stdout)


def tell_damaged(keys: Iterable[str]) -> int:
    """Complain of each damaged ref, by its key, that a command leaves out; returns the exit status: 1 if there are."""
    status = 0
    for key in keys:
        complain(f"{key} cannot be read and is left out: `tensorcas verify` lists all that is damaged")
        status = 1
    return status


def complain(text: str) -> None:
    """Print a line on standard error, after the program's name; the text may hold names from a store."""
    _print(f"tensorcas: {printable(without_secrets(text))}", sys.stderr)


def say_json(document: Json) -> None:
    """Print a document."""
    say(json.dumps(document, indent=2, default=dict))


def confirm(question: str, *, yes: bool, as_json: bool) -> bool:
    """Ask before something is deleted. No answer is no.

    Raises:
        ValueError: A program is reading the output, and there is nobody to ask.
    """
    if yes:
        return True
    if as_json and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ValueError("nothing was deleted: with --format json and no terminal to ask at, say --yes")
    # Standard output is for what the command finds; a program may be reading it.
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def say_table(rows: Sequence[Sequence[str]], *, right: set[int]) -> None:
    """Print rows of cells below each other; those of some columns end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def steps_text(steps: list[int]) -> str:
    """Write steps in one line: each of a few, or the first and the last of more than ten."""
    if len(steps) <= 10:
        return ", ".join(map(str, steps))
    strides = {after - before for before, after in pairwise(steps)}
    [stride] = strides if len(strides) == 1 else [1]
    by = f" by {stride}" if stride != 1 else ""
    return f"{steps[0]}..{steps[-1]}{by} ({len(steps)} checkpoints)"


def ref_json(ref: Ref) -> Json:
    """Describe a checkpoint or file."""
    return {
        "kind": ref.kind,
        "run_id": ref.run_id,
        "name": ref.name,
        "step": ref.step,
        "parent_step": ref.parent_step,
        "metrics": None if ref.metrics is None else metrics_json(ref.metrics),
        "model_id": ref.model_id,
        "path": ref.path or ref.copy_path,
        "uri": ref.uri,
        "flavor": ref.flavor,
        "created": ref.created,
        "bytes": ref.n_bytes if ref.kind == "file" else None,
        "key": ref.key,
    }


def metrics_json(metrics: Mapping[str, float]) -> Json:
    """Write metrics, those that JSON has no number for as texts."""
    return {name: figure_json(value) for name, value in metrics.items()}


def figure_json(value: float | None) -> float | str | None:
    """Write a figure, as a text where JSON has no number for it."""
    return value if value is None or math.isfinite(value) else str(value)


def spec_text(spec: Spec) -> list[str]:
    """Write a tensor's dtype and shape."""
    return [printable(spec.dtype or "bytes"), "x".join(map(str, spec.shape)) or "scalar"]


def _print(text: str, stream: TextIO | None) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding) if stream else text, file=stream)
