"""The page of a series: its steps, the parts of the model that changed at each, and the tensors of the latest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np

from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.integration.pages._facts import LatestTensor, SeriesFacts, StepFacts, parts_by_steps
from tensorcas_mlflow.integration.pages._html import SEARCH, document, png, row, table, text, totals

HISTORY_PAGE = "history.html"
"""Name of the page in the folder of a series."""

_MOST_STEPS_LISTED = 500
_MOST_TENSORS = 1_500
"""Tensors of the latest step with a row of their own; the others are named in one line for each part."""
_MOST_NAMES_BYTES = 60_000
_MOST_POINTS = 400
"""Points of a curve."""
_N_SHADES = 32
_ABSENT = _N_SHADES
_SHADES = np.array(
    [
        *(np.array([237, 241, 245]) + (np.array([178, 34, 34]) - [237, 241, 245]) * (n / (_N_SHADES - 1)) ** 0.6
          for n in range(_N_SHADES)),
        [160, 172, 182],
    ]
).astype(np.uint8)  # fmt: skip
"""From no change to all changed; and the color of a part that a step does not have."""


def history_page(
    series: str, run: str, facts: SeriesFacts, *, dropped: Collection[int] = (), n_left_out: int = 0
) -> bytes:
    """Make the page of a series.

    Args:
        series: Its name.
        run: A name of its run for people.
        facts: Its steps.
        dropped: Steps among them that have been deleted.
        n_left_out: Number of other steps that are not among them.

    Returns:
        One self-contained HTML document, in UTF-8.
    """
    return "".join(document(f"{series} of {run}", _body(facts, dropped, n_left_out), has_search=True)).encode()


def _body(facts: SeriesFacts, dropped: Collection[int], n_left_out: int) -> Iterator[str]:
    steps = facts.steps
    if not steps:
        yield "<p>No step has been logged.</p>\n"
        return
    last = steps[-1]
    yield f"<p>{count_text(len(steps), 'step')}, the last is {last.step} of {text(_time(last.created))} UTC</p>\n"
    if n_left_out:
        yield f"<p>Not shown: {count_text(n_left_out, 'other step')}.</p>\n"
    yield totals(_totals(steps))
    if len(steps) > 1:
        yield "<h2>What changed</h2>\n"
        yield from _map(steps)
        yield "<h2>Bytes, added up</h2>\n"
        yield from _curves(steps)
    yield f"<h2>Tensors of step {last.step}, changed ones first</h2>\n{SEARCH}"
    yield from _tensors(facts.latest(), last.step)
    yield "<h2>Steps</h2>\n"
    yield from _list(steps, dropped)


def _time(created: str) -> str:
    return created.replace("T", " ").partition(".")[0]


def _totals(steps: Sequence[StepFacts]) -> Iterator[tuple[str, str]]:
    last = steps[-1]
    plain = sum(step.n_bytes for step in steps)
    yield "State", size_text(last.n_bytes)
    yield "Changed at the last step", f"{size_text(last.n_changed_bytes)} in {count_text(last.n_changed, 'tensor')}"
    yield "As plain files", size_text(plain)
    known = [step.stored_bytes for step in steps if step.stored_bytes is not None]
    if len(known) == len(steps):
        stored = sum(known)
        yield (
            "Stored",
            size_text(stored)
            + (f", {plain / stored:.1f}\N{MULTIPLICATION SIGN} smaller" if plain > stored > 0 else ""),
        )


def _map(steps: Sequence[StepFacts]) -> Iterator[str]:
    parts, shares = parts_by_steps(steps)
    shade = np.ceil(np.nan_to_num(shares) * (_N_SHADES - 1)).astype(np.uint8)
    shade[np.isnan(shares)] = _ABSENT
    label = f"Share of each part that changed, at {len(steps)} steps from {steps[0].step} to {steps[-1].step}"
    yield '<div class="wide"><div class="map">\n'
    for number, part in enumerate(parts):
        yield f'<div style="grid-row: {number + 1}" title="{text(part)}">{text(part)}</div>\n'
    yield f'<img style="grid-row: 1 / {len(parts) + 1}" alt="{label}" src="{png(shade, _SHADES)}">\n</div></div>\n'
    yield '<p class="key">'
    for number, words in (
        (0, "unchanged"),
        (_N_SHADES // 3, "in part"),
        (_N_SHADES - 1, "all of it"),
        (_ABSENT, "not there"),
    ):
        yield f'<span><i style="background: rgb({", ".join(map(str, _SHADES[number]))})"></i>{words}</span>'
    yield f"<span>steps {steps[0].step} to {steps[-1].step}, from left to right</span></p>\n"


def _curves(steps: Sequence[StepFacts]) -> Iterator[str]:
    lines = [("as plain files", "--plain", list(accumulate(step.n_bytes for step in steps)))]
    if all(step.stored_bytes is not None for step in steps):
        lines.append(("stored", "--bar", list(accumulate(step.stored_bytes or 0 for step in steps))))
    else:
        lines.append(("changed tensors", "--bar", list(accumulate(step.n_changed_bytes for step in steps))))
    most = max(max(values) for _, _, values in lines) or 1
    width, height = 800, 160
    words = "; ".join(f"{label}: {size_text(values[-1])}" for label, _, values in lines)
    yield f'<svg viewBox="0 0 {width} {height + 20}" role="img" aria-label="{text(words)}">\n'
    for _, color, values in lines:
        chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int)).tolist()
        points = " ".join(
            f"{width * at / max(1, len(values) - 1):.1f},{height - (height - 12) * values[at] / most:.1f}"
            for at in chosen
        )
        yield f'<polyline points="{points}" fill="none" stroke="var({color})" stroke-width="2"/>\n'
    yield f'<text x="0" y="{height + 15}">step {steps[0].step}</text>'
    yield f'<text x="{width}" y="{height + 15}" text-anchor="end">step {steps[-1].step}</text>'
    yield f'<text x="0" y="10">{text(size_text(most))}</text>\n</svg>\n<p class="key">'
    for label, color, values in lines:
        yield f'<span><i style="background: var({color})"></i>{label}: {text(size_text(values[-1]))}</span>'
    yield "</p>\n"


def _tensors(tensors: Sequence[LatestTensor], step: int) -> Iterator[str]:
    """Yield the tensors, those of a part together; the parts with changed ones come first."""
    first = {tensor.part: number for number, tensor in reversed(list(enumerate(tensors)))}
    by_part = sorted(tensors, key=lambda tensor: first[tensor.part])
    n_rows = n_names = 0
    for number, (part, group) in enumerate(groupby(by_part, key=lambda tensor: tensor.part)):
        members = list(group)
        n_changed = sum(tensor.since == step for tensor in members)
        words = f"{n_changed:,} of {len(members):,} changed" if n_changed else f"{len(members):,}, shared"
        is_open = " open" if n_changed and not number else ""
        yield f'<details class="tensors"{is_open}><summary>{text(part)} '
        yield f'<span class="{"new" if n_changed else "shared"}">{words}</span>, '
        yield f"{size_text(sum(tensor.n_bytes for tensor in members))}</summary>\n"
        shown = members[: max(0, _MOST_TENSORS - n_rows)]
        n_rows += len(shown)
        if shown:
            yield from table(_TENSOR_HEADINGS, (_tensor_row(tensor, step) for tensor in shown))
        rest = [tensor.name for tensor in members[len(shown) :]]
        if rest:
            names = ", ".join(rest)
            room = max(0, _MOST_NAMES_BYTES - n_names)
            n_names += len(names)
            told = f": {text_of_names(names[:room])}" if room else ""
            yield f"<p>and {count_text(len(rest), 'tensor')} more{told}</p>\n"
        yield "</details>\n"


def text_of_names(names: str) -> str:
    """Escape a long list of names."""
    return ", ".join(text(name) for name in names.split(", "))


_TENSOR_HEADINGS = (("name", "Tensor"), ("", "Dtype"), ("shape", "Shape"), ("size", "Size"), ("", "Bytes"))


def _tensor_row(tensor: LatestTensor, step: int) -> str:
    if tensor.since != step:
        state, words = "shared", f"shared since step {tensor.since}"
    elif tensor.is_new:
        state, words = "new", "new"
    else:
        state, words = "part", "changed"
    name = tensor.name or "(bytes between tensors)"
    shape = " \N{MULTIPLICATION SIGN} ".join(map(str, tensor.shape)) or "scalar"
    cells = (("name", name), ("", tensor.dtype), ("shape", shape), ("size", size_text(tensor.n_bytes)), (state, words))
    return row(cells, name=name)


_STEP_HEADINGS = (
    ("", "Step"),
    ("", "Saved at (UTC)"),
    ("size", "State"),
    ("size", "Changed"),
    ("size", "Tensors changed"),
    ("size", "Stored"),
)


def _list(steps: Sequence[StepFacts], dropped: Collection[int]) -> Iterator[str]:
    shown = steps[-_MOST_STEPS_LISTED:]
    yield from table(_STEP_HEADINGS, (_step_row(step, step.step in dropped) for step in reversed(shown)))
    if len(steps) > len(shown):
        yield f"<p>and {count_text(len(steps) - len(shown), 'earlier step')}</p>\n"


def _step_row(step: StepFacts, is_dropped: bool) -> str:
    cells = (
        ("", f"{step.step} (deleted)" if is_dropped else f"{step.step}"),
        ("", _time(step.created)),
        ("size", size_text(step.n_bytes)),
        ("size", size_text(step.n_changed_bytes)),
        ("size", f"{step.n_changed:,}"),
        ("size", "" if step.stored_bytes is None else size_text(step.stored_bytes)),
    )
    return row(cells)
