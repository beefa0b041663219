"""The page of a series: what changed at each step, bytes, metrics of the run, and the tensors of any step."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.integration.pages._facts import SeriesFacts, StepFacts, amounts_by_steps, parts_by_steps
from tensorcas_mlflow.integration.pages._render import render, time_text, visible
from tensorcas_mlflow.integration.pages._run import RunFacts
from tensorcas_mlflow.integration.pages._tensors import STATE_BYTES, packed_facts, whole_blocks

HISTORY_PAGE = "history.html"
"""Name of the page in the folder of a series."""

_MOST_STEPS_LISTED = 200
_STEP_BYTES = 420
"""What the page says of one step: a row of a table, a column of the map, and figures."""
_CHARTS_BYTES = 40_000
"""Its curves, and the labels of its map."""
MOST_FACTS_CHARS = 150_000
"""Size of a page's data. With more, it no longer has the changed tensors of the earlier steps."""
_MOST_POINTS = 250
"""Points of a curve."""
_MOST_SHARP = 240
"""A map of more steps may have several in one pixel of a narrow window."""
_ROW_PIXELS = 14
"""Height of a row of a map, as the style has it."""
_N_SHADES = 32
_ABSENT, _DELETED, _UNKNOWN = _N_SHADES, _N_SHADES + 1, _N_SHADES + 2
_SHADES = np.array(
    [
        [200, 40, 40, 0],
        *([200, 40, 40, 255 * (0.2 + 0.8 * (n / (_N_SHADES - 1)) ** 0.6)] for n in range(1, _N_SHADES)),
        [128, 140, 150, 150],
        [120, 110, 200, 255],
        [205, 205, 170, 255],
    ]
).astype(np.uint8)
"""From no change to all changed, the more opaque the more changed, so that a dark page shows it too; then the colors of
a part that a step does not have, of a deleted step, and of a change of unknown size. The last number is the opacity."""
_OWN_SIZE = "<!--own size-->"
"""Place of the figure that includes the size of the page."""
_LEAST_AMOUNT = 1e-3
"""A change by this relative norm or less has the lightest shade."""
_WIDTH, _HEIGHT = 560, 160
"""Of a chart, in the units of its points."""


def history_page(
    series: str,
    run: RunFacts | str,
    facts: SeriesFacts,
    *,
    dropped: Collection[int] = (),
    n_left_out: int = 0,
    rule: str = "",
    is_stored: bool = False,
) -> bytes:
    """Make the page of a series.

    Args:
        series: Its name.
        run: Its run, or a name of the run for people.
        facts: Its steps.
        dropped: Steps that have been deleted.
        n_left_out: Number of other steps that are not among them.
        rule: The rule for the steps to keep, in words.
        is_stored: Whether the page is a file beside the steps, whose bytes count as stored, too.

    Returns:
        One self-contained HTML document, in UTF-8.
    """
    if isinstance(run, str):
        run = RunFacts(name=run)
    steps = facts.steps
    parts, maps, curves = _drawings(steps, run, dropped) if len(steps) > 1 else ([], [], [])
    is_known = all(step.stored_bytes is not None for step in steps)
    page = render(
        "file/history.html",
        series=series,
        run=run,
        steps=steps,
        plain_bytes=sum(step.n_bytes for step in steps),
        stored=(_OWN_SIZE if is_stored else _stored_text(steps, 0)) if is_known else None,
        parts=parts,
        maps=maps,
        curves=curves,
        facts=_packed(facts, dropped) if steps else "",
        has_values=bool(facts.amounts),
        most_listed=_MOST_STEPS_LISTED,
        dropped=dropped,
        n_left_out=n_left_out,
        rule=rule,
        is_stored=is_stored,
    ).encode()
    before, mark, after = page.partition(_OWN_SIZE.encode())
    if not mark:
        return page
    n_others = len(before) + len(after)
    figure = _stored_text(steps, n_others)
    return before + _stored_text(steps, n_others + len(figure.encode())).encode() + after


def history_bytes(page_bytes: int, n_steps: int) -> int:
    """Return the size to which a page of so many steps is filled up, from that of the page of its last step."""
    # A page has 20 bytes or more for each tensor, and a history one bit for each tensor and step, in base64.
    marks = min(MOST_FACTS_CHARS, n_steps * (page_bytes // (6 * STATE_BYTES)))
    return whole_blocks(page_bytes + marks + n_steps * _STEP_BYTES + _CHARTS_BYTES)


def _stored_text(steps: Sequence[StepFacts], page_bytes: int) -> str:
    """Format the bytes that a series takes, with its page."""
    plain, stored = sum(step.n_bytes for step in steps), page_bytes
    stored += sum(step.stored_bytes or 0 for step in steps)
    with_page = f", {size_text(page_bytes)} of it the page" if page_bytes else ""
    smaller = f", {plain / stored:.1f}\N{MULTIPLICATION SIGN} smaller" if plain > stored > 0 else ""
    return f"{size_text(stored)}{with_page}{smaller}"


# --- the data


def _packed(facts: SeriesFacts, dropped: Collection[int]) -> str:
    """Return the page's data: the tensors, the steps, and the marks of what changed for as many steps as have room."""
    tensors, changes = facts.tensors(), facts.changes()
    steps = [_step_facts(step, step.step in dropped) for step in facts.steps]
    marks, begin = changes.is_changed, changes.begin
    while True:
        packed = packed_facts(
            tensors,
            steps,
            at=len(steps) - 1,
            values={number: (*amounts, None) for number, amounts in facts.amounts.items()},
            is_estimate=True,
            bits=np.packbits(marks, axis=1).tobytes(),
            more={"first": changes.first.tolist(), "from": begin},
        )
        if len(packed) <= MOST_FACTS_CHARS or len(marks) <= 1:
            return packed
        n_kept = max(1, len(marks) // 2)
        begin += len(marks) - n_kept
        marks = marks[-n_kept:]


def _step_facts(step: StepFacts, is_dropped: bool) -> dict[str, Any]:
    return {
        "step": step.step,
        "created": visible(time_text(step.created)),
        "n": step.n_tensors,
        "nChanged": step.n_changed,
        "changedBytes": step.n_changed_bytes,
        "stored": step.stored_bytes,
        "isDropped": is_dropped,
    }


# --- the map


class _Map(NamedTuple):
    """A picture of the parts of a state and of the steps."""

    words: str
    uri: str
    """The picture, as ``data:``."""
    is_fine: bool
    """Whether its rows are drawn as many pixels."""
    key: Sequence[tuple[str, str]]
    """Colors, and what they mean."""


def _drawings(
    steps: Sequence[StepFacts], run: RunFacts, dropped: Collection[int]
) -> tuple[list[str], list[_Map], list[tuple[str, str, dict[str, _Chart]]]]:
    """Return the rows of the maps, the maps, and the charts: name, title, and each by what it shows."""
    parts, shares = parts_by_steps(steps)
    amounts = amounts_by_steps(steps)
    is_dropped = np.array([step.step in dropped for step in steps])
    shade = np.ceil(np.nan_to_num(shares) * (_N_SHADES - 1)).astype(np.uint8)
    key = [(0, "unchanged"), (_N_SHADES // 3, "in part"), (_N_SHADES - 1, "all of it"), (_ABSENT, "not there")]
    if is_dropped.any():
        parts.append("(deleted steps)")
        key.append((_DELETED, "deleted"))
    maps = [_map("Share of each part that changed", _with_absent(shade, shares, is_dropped), key)]
    if (np.nan_to_num(amounts) > 0).any():
        key = [(1, "by a thousandth"), (_N_SHADES // 2, "by 3 %"), (_N_SHADES - 1, "by 100 % of its norm")]
        key = [(0, "unchanged"), *key, (_UNKNOWN, "changed, not known how much"), (_ABSENT, "not there")]
        maps.append(_map("How much each part changed", _amount_shades(amounts, shares, is_dropped), key))
    curves = [("bytes", "Bytes", _bytes(steps)), ("metric", "Metric", _metrics(steps, run.metrics))]
    return parts, maps, [each for each in curves if each[2]]


def _with_absent(shade: Any, shares: Any, is_dropped: Any) -> Any:
    shade[np.isnan(shares)] = _ABSENT
    if is_dropped.any():
        shade = np.concatenate([shade, np.where(is_dropped, _DELETED, 0).astype(np.uint8)[None]])
    return shade


def _amount_shades(amounts: Any, shares: Any, is_dropped: Any) -> Any:
    scale = np.log(np.clip(np.nan_to_num(amounts), _LEAST_AMOUNT, 1) / _LEAST_AMOUNT) / -math.log(_LEAST_AMOUNT)
    shade = (1 + scale * (_N_SHADES - 2)).astype(np.uint8)
    shade[np.nan_to_num(shares) == 0] = 0
    shade[np.isnan(amounts) & (np.nan_to_num(shares) > 0)] = _UNKNOWN
    return _with_absent(shade, shares, is_dropped)


def _map(words: str, shade: Any, key: Sequence[tuple[int, str]]) -> _Map:
    is_fine = shade.shape[1] > _MOST_SHARP
    if is_fine:
        # A narrow window mixes the colors of neighbours instead of leaving steps out; rows stay sharp.
        shade = np.repeat(shade, _ROW_PIXELS, axis=0)
    return _Map(words, _png(shade, _SHADES), is_fine, [(_SHADES[at].tobytes().hex(), words) for at, words in key])


def _png(pixels: Any, palette: Any) -> str:
    """Return a picture as a ``data:`` URI.

    Args:
        pixels: The number of each pixel's color, uint8, shape ``(height, width)``.
        palette: The colors and how opaque they are, uint8, shape ``(n, 4)``.
    """
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)
    lines[:, 1:] = pixels

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    chunks = (
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", palette[:, :3].tobytes()),
        chunk(b"tRNS", palette[:, 3].tobytes()),
        chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
        chunk(b"IEND", b""),
    )
    encoded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    return f"data:image/png;base64,{encoded}"


# --- the curves


class _Line(NamedTuple):
    """A curve over the steps."""

    label: str
    color: str
    last: str
    """Its last value, for people."""
    points: str


class _Chart(NamedTuple):
    """Curves over the steps, and the ends of their axis."""

    least: str
    most: str
    lines: Sequence[_Line]


def _bytes(steps: Sequence[StepFacts]) -> dict[str, _Chart]:
    is_known = all(step.stored_bytes is not None for step in steps)
    label = "stored" if is_known else "changed tensors"
    changed = [step.n_changed_bytes for step in steps]
    each = [step.stored_bytes or 0 for step in steps] if is_known else changed
    plain = accumulate(step.n_bytes for step in steps)
    by_step = {"changed tensors": ("--part", changed)} | ({label: ("--bar", each)} if is_known else {})
    return {
        "added up": _chart({"as plain files": ("--plain", [*plain]), label: ("--bar", [*accumulate(each)])}, size_text),
        "of each step": _chart(by_step, size_text),
    }


def _metrics(steps: Sequence[StepFacts], metrics: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, _Chart]:
    curves = {name: _at(steps, history) for name, history in metrics.items()}
    return {
        name: _chart({name: ("--new", values)}, "{:.4g}".format, low=True)
        for name, values in curves.items()
        if any(value is not None for value in values)
    }


def _at(steps: Sequence[StepFacts], history: Sequence[tuple[int, float]]) -> list[float | None]:
    """Return a metric's last value up to each step and after the one before; None if there is none."""
    values: list[float | None] = []
    at = 0
    for step in steps:
        value = None
        while at < len(history) and history[at][0] <= step.step:
            value = history[at][1] if math.isfinite(history[at][1]) else value
            at += 1
        values.append(value)
    return values


def _chart(
    lines: Mapping[str, tuple[str, Sequence[float | None]]], words_of: Callable[[float], str], *, low: bool = False
) -> _Chart:
    """Draw curves over the steps.

    Args:
        lines: By label the color and the values of each curve; a value that is None is left out.
        words_of: Formats a value.
        low: Whether the axis begins at the least value, and not at 0.
    """
    known = [value for _, values in lines.values() for value in values if value is not None]
    least, most = (min(known) if low else 0), max(known)

    def draw(values: Sequence[float | None]) -> Iterator[str]:
        for at in np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int)).tolist():
            if (value := values[at]) is not None:
                y = _HEIGHT - 1 - (_HEIGHT - 2) * (value - least) / ((most - least) or 1)
                yield f"{_WIDTH * at / max(1, len(values) - 1):.0f},{y:.1f}"

    return _Chart(
        words_of(least),
        words_of(most),
        [
            _Line(label, color, words_of(_last(values)), " ".join(draw(values)))
            for label, (color, values) in lines.items()
        ],
    )


def _last(values: Sequence[float | None]) -> float:
    return next((value for value in reversed(values) if value is not None), math.nan)
