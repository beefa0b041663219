"""The tensors of a step as a table that folds, and the data of a page that its script shows."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tensorcas_mlflow.integration.pages._facts import Tensors
from tensorcas_mlflow.integration.pages._html import text, visible

_MOST_NAME = 300
_LEVEL = 6
"""Of compression. Level 9 takes three times as long, for 2 percent less."""

Value = tuple[float | None, float | None, float | None]
"""How much a tensor changed: relative norm, share of equal elements, largest change; None for what is not known."""


@cache
def script() -> str:
    """Return the script of the pages that show tensors."""
    return files(__package__).joinpath("tensors.js").read_text("utf-8")


def packed_facts(
    tensors: Tensors,
    steps: Sequence[Mapping[str, Any]],
    *,
    at: int,
    values: Mapping[int, Value],
    is_estimate: bool = False,
    bits: bytes = b"",
    more: Mapping[str, Any],
) -> str:
    """Return the data of a page for its script: compressed JSON, a line break and bits, in base64.

    Args:
        tensors: The tensors.
        steps: The steps that the page can show: ``step``, ``created``, ``n``, ``nChanged``, ``changedBytes``,
            ``stored`` and ``isDropped`` of each.
        at: Index of the step that it shows first.
        values: How much tensors changed at that step, by number.
        is_estimate: Whether ``values`` are estimates.
        bits: See ``more``.
        more: Either ``state``, for each tensor a number of ``states``, pairs of a class of the style and words; or
            ``first`` and ``from``, as `Changes` has them, with a bit in ``bits`` for each step from there and each
            tensor, each step a whole number of bytes.
    """
    dtypes, dtype = _numbered(tensors.dtypes)
    shapes, shape = _numbered([shape_text(each) for each in tensors.shapes])
    facts: dict[str, Any] = {
        "names": [visible(name, _MOST_NAME) for name in tensors.names],
        "dtypes": [visible(each, _MOST_NAME) for each in dtypes],
        "dtype": dtype,
        "shapes": shapes,
        "shape": shape,
        "bytes": list(tensors.n_bytes),
        "steps": steps,
        "at": at,
        "valuesAt": at,
        "values": {number: [_rounded(each) for each in value] for number, value in values.items()} or None,
        "isEstimate": is_estimate,
        **more,
    }
    line = json.dumps(facts, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return base64.b64encode(zlib.compress(line.encode() + b"\n" + bits, _LEVEL)).decode()


def _numbered(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the distinct texts, and the number of each text among them."""
    number = {each: at for at, each in enumerate(dict.fromkeys(texts))}
    return list(number), [number[each] for each in texts]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape for people."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "scalar"


_HEADINGS = (
    ("name", "name", "Tensor"),
    ("spec", None, "Dtype"),
    ("spec", None, "Shape"),
    ("size", "size", "Size"),
    ("", "change", "This step"),
)


def tensor_table(facts: str, *, has_values: bool, has_steps: bool) -> Iterator[str]:
    """Yield the search, the choice of the step, and the table that the script fills.

    Args:
        facts: From `packed_facts`.
        has_values: Whether the table says how much tensors changed.
        has_steps: Whether the reader can choose the step.
    """
    yield f'<data id="facts" value="{facts}"></data>\n'
    yield "<noscript><p>The list of tensors needs JavaScript.</p></noscript>\n"
    if has_steps:
        yield (
            '<p class="steps"><button id="earlier" type="button">\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK} earlier'
            '</button> <select id="step" aria-label="Step"></select> <button id="later" type="button">later '
            '\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}</button> <span id="chosen" aria-live="polite"></span></p>\n'
        )
    yield (
        '<p><label for="search">Search tensors by name</label></p>\n'
        '<p><input id="search" type="search" autocomplete="off" spellcheck="false"> '
        '<span id="found" aria-live="polite"></span></p>\n'
    )
    headings = (*_HEADINGS, ("amount", "amount", "How much")) if has_values else _HEADINGS
    cells = "".join(_heading(*each) for each in headings)
    yield f'<div class="wide"><table id="tensors"><thead><tr>{cells}</tr></thead><tbody></tbody></table></div>\n'
    yield '<p><button id="more" type="button" hidden>Show more</button></p>\n'


def _heading(kind: str, sort: str | None, words: str) -> str:
    button = f'<button type="button" data-sort="{sort}">{text(words)}</button>' if sort else text(words)
    return f'<th scope="col" class="{kind}">{button}</th>' if kind else f'<th scope="col">{button}</th>'


BLOCKED_LINKS = (
    '<p id="blocked" hidden>MLflow\'s preview blocks links: open one with Ctrl or \N{PLACE OF INTEREST SIGN} and a '
    "click, with the middle button, or from its menu.</p>\n"
)
"""A note that the script shows where links open only so."""
