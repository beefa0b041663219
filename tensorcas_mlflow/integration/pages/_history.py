"""The page of a series: what changed at each step, bytes, metrics of the run, and the tensors of any step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.integration.pages._facts import SeriesFacts, StepFacts, amounts_by_steps, parts_by_steps
from tensorcas_mlflow.integration.pages._html import Markup, document, png, row, table, text, totals, visible
from tensorcas_mlflow.integration.pages._run import RunFacts
from tensorcas_mlflow.integration.pages._tensors import BLOCKED_LINKS, packed_facts, script, tensor_table

HISTORY_PAGE = "history.html"
"""Name of the page in the folder of a series."""

_MOST_STEPS_LISTED = 200
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
_OWN_SIZE = Markup("<!--own size-->")
"""Place of the figure that includes the size of the page."""
_LEAST_AMOUNT = 1e-3
"""A change by this relative norm or less has the lightest shade."""


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
    body = _body(facts, run, dropped, n_left_out, rule, is_stored)
    page = "".join(document(f"{series} of {run.label}", body, script=script())).encode()
    before, mark, after = page.partition(_OWN_SIZE.encode())
    if not mark:
        return page
    n_others = len(before) + len(after)
    figure = _stored_text(facts.steps, n_others)
    return before + _stored_text(facts.steps, n_others + len(figure.encode())).encode() + after


def _body(
    facts: SeriesFacts, run: RunFacts, dropped: Collection[int], n_left_out: int, rule: str, is_stored: bool
) -> Iterator[str]:
    steps = facts.steps
    if not steps:
        yield "<p>No step has been logged.</p>\n"
        return
    last = steps[-1]
    yield f"<p>{count_text(len(steps), 'step')}, the last is {last.step} of {text(time_text(last.created))} UTC</p>\n"
    if run.experiment_id:
        yield f"<p>In MLflow: {run.run_link(run.label)}</p>\n{BLOCKED_LINKS}"
    if n_left_out:
        yield f"<p>Not shown: {count_text(n_left_out, 'other step')}.</p>\n"
    yield totals(_totals(steps, is_stored))
    if len(steps) > 1:
        yield from _maps(steps, dropped)
        yield '<div class="charts">\n'
        yield from _bytes(steps)
        yield from _metrics(steps, run.metrics)
        yield "</div>\n"
    yield "<h2>Tensors, changed ones first</h2>\n"
    yield from tensor_table(_packed(facts, dropped), has_values=bool(facts.amounts), has_steps=True)
    yield "<h2>Steps</h2>\n"
    if rule:
        yield f"<p>Rule: {text(rule)}.</p>\n"
    if dropped:
        yield f"<p>Deleted: {count_text(len(dropped), 'step')}.</p>\n"
    yield from _list(steps, dropped)


def time_text(created: str) -> str:
    """Format a time for people."""
    return created.replace("T", " ").partition(".")[0]


def _totals(steps: Sequence[StepFacts], is_stored: bool) -> Iterator[tuple[str, str]]:
    last = steps[-1]
    yield "State", size_text(last.n_bytes)
    yield "Changed at the last step", f"{size_text(last.n_changed_bytes)} in {count_text(last.n_changed, 'tensor')}"
    yield "As plain files", size_text(sum(step.n_bytes for step in steps))
    if all(step.stored_bytes is not None for step in steps):
        yield ("Stored, with this page", _OWN_SIZE) if is_stored else ("Stored", _stored_text(steps, 0))


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


def _maps(steps: Sequence[StepFacts], dropped: Collection[int]) -> Iterator[str]:
    parts, shares = parts_by_steps(steps)
    amounts = amounts_by_steps(steps)
    has_amounts = bool((np.nan_to_num(amounts) > 0).any())
    yield '<h2><label for="by">What changed</label>'
    if has_amounts:
        yield ' <select id="by" data-shows="map" hidden><option value="0">by bytes</option>'
        yield '<option value="1">by how much, estimated</option></select>'
    yield '</h2>\n<div class="wide"><div class="map">\n'
    is_dropped = np.array([step.step in dropped for step in steps])
    rows = [*parts, "(deleted steps)"] if is_dropped.any() else parts
    for number, part in enumerate(rows):
        yield f'<div class="label" style="grid-row: {number + 1}" title="{text(part)}"><bdi>{text(part)}</bdi></div>\n'
    shade = np.ceil(np.nan_to_num(shares) * (_N_SHADES - 1)).astype(np.uint8)
    words = f"at {len(steps)} steps from {steps[0].step} to {steps[-1].step}"
    yield _picture(0, _with_absent(shade, shares, is_dropped), f"Share of each part that changed, {words}", len(rows))
    if has_amounts:
        yield _picture(
            1, _amount_shades(amounts, shares, is_dropped), f"How much each part changed, {words}", len(rows)
        )
    yield "</div></div>\n"
    ends = f"<span>steps {steps[0].step} to {steps[-1].step}, from left to right; click one to see its tensors</span>"
    keys = [(0, "unchanged"), (_N_SHADES // 3, "in part"), (_N_SHADES - 1, "all of it"), (_ABSENT, "not there")]
    if is_dropped.any():
        keys.append((_DELETED, "deleted"))
    yield f'<p class="key" data-view="map-0">{_key(keys)}{ends}</p>\n'
    if has_amounts:
        keys = [(1, "by a thousandth"), (_N_SHADES // 2, "by 3 %"), (_N_SHADES - 1, "by 100 % of its norm")]
        keys = [(0, "unchanged"), *keys, (_UNKNOWN, "changed, not known how much"), (_ABSENT, "not there")]
        yield f'<p class="key" data-view="map-1" hidden>{_key(keys)}{ends}</p>\n'


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


def _picture(view: int, shade: Any, label: str, n_rows: int) -> str:
    hidden, kind = " hidden" if view else "", ""
    if shade.shape[1] > _MOST_SHARP:
        # A narrow window mixes the colors of neighbours instead of leaving steps out; rows stay sharp.
        shade, kind = np.repeat(shade, _ROW_PIXELS, axis=0), " fine"
    return (
        f'<div class="picture{kind}" data-view="map-{view}" style="grid-row: 1 / {n_rows + 1}"{hidden}>'
        f'<img alt="{label}" src="{png(shade, _SHADES)}"><div class="cursor" style="left: 100%"></div></div>\n'
    )


def _key(keys: Sequence[tuple[int, str]]) -> str:
    return "".join(
        f'<span><i style="background: #{_SHADES[number].tobytes().hex()}"></i>{words}</span>' for number, words in keys
    )


# --- the curves


def _bytes(steps: Sequence[StepFacts]) -> Iterator[str]:
    is_known = all(step.stored_bytes is not None for step in steps)
    label = "stored" if is_known else "changed tensors"
    each = [(step.stored_bytes or 0) if is_known else step.n_changed_bytes for step in steps]
    plain = [step.n_bytes for step in steps]
    yield '<div><h2><label for="bytes">Bytes</label> <select id="bytes" data-shows="bytes" hidden>'
    yield '<option value="0">added up</option><option value="1">of each step</option></select></h2>\n'
    added = [("as plain files", "--plain", list(accumulate(plain))), (label, "--bar", list(accumulate(each)))]
    yield from _chart(steps, added, size_text, view="bytes-0")
    by_step = [("changed tensors", "--part", [step.n_changed_bytes for step in steps])]
    if is_known:
        by_step.append((label, "--bar", each))
    yield from _chart(steps, by_step, size_text, view="bytes-1")
    yield "</div>\n"


def _metrics(steps: Sequence[StepFacts], metrics: Mapping[str, Sequence[tuple[int, float]]]) -> Iterator[str]:
    curves = {name: _at(steps, history) for name, history in metrics.items()}
    curves = {name: values for name, values in curves.items() if any(value is not None for value in values)}
    if not curves:
        return
    options = "".join(f'<option value="{number}">{text(name)}</option>' for number, name in enumerate(curves))
    yield '<div><h2><label for="metric">Metric</label> '
    yield f'<select id="metric" data-shows="metric" hidden>{options}</select></h2>\n'
    for number, (name, values) in enumerate(curves.items()):
        yield from _chart(
            steps, [(name, "--new", values)], lambda value: f"{value:.4g}", view=f"metric-{number}", low=True
        )
    yield "</div>\n"


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
    steps: Sequence[StepFacts],
    lines: Sequence[tuple[str, str, Sequence[float | None]]],
    format: Any,
    *,
    view: str,
    low: bool = False,
) -> Iterator[str]:
    """Yield curves over the steps.

    Args:
        steps: The steps.
        lines: Label, color and values of each curve; a value that is None is left out.
        format: Formats a value.
        view: Name of the view, of which the first one is shown.
        low: Whether the axis begins at the least value, and not at 0.
    """
    known = [value for _, _, values in lines for value in values if value is not None]
    least, most = (min(known) if low else 0), max(known)
    reach = (most - least) or 1
    width, height = 560, 160
    hidden = "" if view.endswith("-0") else " hidden"
    words = "; ".join(f"{label}: {format(_last(values))} at the last step" for label, _, values in lines)
    yield f'<div data-view="{view}"{hidden}>'
    yield f'<p class="axis">{text(format(least))} to {text(format(most))}</p>\n'
    yield f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text(words)}">\n'
    for _, color, values in lines:
        chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int)).tolist()
        points = " ".join(
            f"{width * at / max(1, len(values) - 1):.0f},{height - 1 - (height - 2) * (value - least) / reach:.1f}"
            for at in chosen
            if (value := values[at]) is not None
        )
        yield f'<polyline points="{points}" fill="none" stroke="var({color})" stroke-width="2"/>\n'
    yield f'</svg>\n<p class="axis"><span>step {steps[0].step}</span><span>step {steps[-1].step}</span></p>\n'
    yield '<p class="key">'
    for label, color, values in lines:
        yield f'<span><i style="background: var({color})"></i>{text(label)}: {text(format(_last(values)))}</span>'
    yield "</p></div>\n"


def _last(values: Sequence[float | None]) -> float:
    return next((value for value in reversed(values) if value is not None), math.nan)


# --- the list

_STEP_HEADINGS = (
    ("", "Step"),
    ("", "Saved at (UTC)"),
    ("size optional", "State"),
    ("size", "Changed"),
    ("size optional", "Tensors changed"),
    ("size", "Stored"),
)


def _list(steps: Sequence[StepFacts], dropped: Collection[int]) -> Iterator[str]:
    shown = list(enumerate(steps))[-_MOST_STEPS_LISTED:]
    yield from table(_STEP_HEADINGS, (_step_row(at, step, step.step in dropped) for at, step in reversed(shown)))
    if len(steps) > len(shown):
        yield f"<p>and {count_text(len(steps) - len(shown), 'earlier step')}: choose them above</p>\n"


def _step_row(at: int, step: StepFacts, is_dropped: bool) -> str:
    words = f"{step.step} (deleted)" if is_dropped else f"{step.step}"
    cells = (
        ("", Markup(f'<button type="button" data-at="{at}">{words}</button>')),
        ("time", time_text(step.created)),
        ("size optional", size_text(step.n_bytes)),
        ("size", size_text(step.n_changed_bytes)),
        ("size optional", f"{step.n_changed:,}"),
        ("size", "" if step.stored_bytes is None else size_text(step.stored_bytes)),
    )
    return row(cells)
