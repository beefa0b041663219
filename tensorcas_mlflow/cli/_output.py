"""Output: text made safe for a terminal, JSON, and questions."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any, TextIO

from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import FormatError, NotFoundError, without_secrets
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.store import Store

Json = dict[str, Any]


def printable(text: str) -> str:
    """Escape a text for one line of a terminal: names in a store are untrusted.

    Unprintable characters (newlines, escape sequences, marks of writing direction) are written as in a Python string.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(text: str = "") -> None:
    """Print a line."""
    _print(text, sys.stdout)


def tell_damaged(keys: Iterable[str]) -> int:
    """Report each damaged ref skipped by a command, by its key; return the exit status, 1 if there is one."""
    status = 0
    for key in keys:
        complain(f"{key} cannot be read and is left out: `tensorcas verify` lists all damage")
        status = 1
    return status


def complain(text: str) -> None:
    """Print a line on standard error after the program's name; the text may hold names from a store."""
    _print(f"tensorcas: {printable(without_secrets(text))}", sys.stderr)


def say_json(document: Json) -> None:
    """Print a JSON document."""
    say(json.dumps(document, indent=2, default=dict))


def fields_of(thing: object, names: str) -> Json:
    """Return some attributes of a value, by name, for a JSON document."""
    return {name: getattr(thing, name) for name in names.split()}


def confirm(question: str, *, yes: bool, as_json: bool) -> bool:
    """Ask for confirmation; no answer is no.

    Raises:
        ValueError: The output is JSON, and there is no terminal to ask at.
    """
    if yes:
        return True
    if as_json and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ValueError("nothing was deleted: --json without a terminal cannot ask for confirmation; pass --yes")
    # Standard output is for the result, possibly read by a program.
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def steps_text(steps: list[int]) -> str:
    """Write steps in one line: all of up to ten, or the first and the last."""
    if len(steps) <= 10:
        return ", ".join(map(str, steps))
    strides = {after - before for before, after in pairwise(steps)}
    [stride] = strides if len(strides) == 1 else [1]
    by = f" by {stride}" if stride != 1 else ""
    return f"{steps[0]}..{steps[-1]}{by} ({len(steps)} checkpoints)"


def date_text(moment: float | str) -> str:
    """Write a moment, in seconds of Unix time or in ISO 8601, as a date and a time of this machine's time zone."""
    try:
        at = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment)
        return at.astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "-"


def ratio_text(whole: float, part: float) -> str:
    """Write how many times smaller a part is than the whole, as in ``2.3 × smaller``; "" if it is not smaller."""
    return f"{whole / part:.1f} \N{MULTIPLICATION SIGN} smaller" if part and whole / part >= 1.05 else ""


def content_bytes(store: Store, ref: Ref) -> int | None:
    """Return the size of a checkpoint, model or file as it was logged; None if its manifest is damaged or gone."""
    if ref.kind == "file":
        return ref.n_bytes
    try:
        return store.manifest(ref).n_bytes
    except (FormatError, NotFoundError):
        return None


def ref_json(store: Store, ref: Ref) -> Json:
    """Return a checkpoint or file of a store as JSON."""
    return {
        **fields_of(ref, "kind run_id name step parent_step"),
        "metrics": None if ref.metrics is None else metrics_json(ref.metrics),
        "model_id": ref.model_id,
        "path": ref.path or ref.copy_path,
        **fields_of(ref, "uri flavor created"),
        "bytes": content_bytes(store, ref),
        "key": ref.key,
    }


def metrics_json(metrics: Mapping[str, float]) -> Json:
    """Return metrics as JSON; NaN and infinities become strings."""
    return {name: figure_json(value) for name, value in metrics.items()}


def figure_json(value: float | None) -> float | str | None:
    """Return a figure as JSON; NaN and infinities become strings."""
    return value if value is None or math.isfinite(value) else str(value)


def spec_text(spec: Spec) -> list[str]:
    """Write the dtype and the shape of a tensor."""
    return [printable(spec.dtype or "bytes"), "x".join(map(str, spec.shape)) or "scalar"]


def _print(text: str, stream: TextIO | None) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding) if stream else text, file=stream)
