"""Figures of matplotlib: the history of a run's checkpoints, and the difference of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.errors import CheckpointNotFoundError
from tensorcas_mlflow.integration._background import reports, saves
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._figures import figure_name
from tensorcas_mlflow.integration.checkpoints._find import series_of
from tensorcas_mlflow.integration.checkpoints._open import diff
from tensorcas_mlflow.integration.checkpoints._series import Checkpoint, run_to_read
from tensorcas_mlflow.integration.pages import SeriesFacts, StepFacts, parts_by_steps
from tensorcas_mlflow.layout import DEFAULT_NAME
from tensorcas_mlflow.reader import CheckpointReader

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.checkpoints._open import CheckpointSource

_MOST_LABELS = 40
"""Of more parts only some are named beside the map."""


class _Picture(Figure):
    """A figure that a notebook shows without pyplot, so nothing keeps it in memory afterwards."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


@translate_errors()
def plot_history(run_id: str | Run | None = None, *, name: str = DEFAULT_NAME, metric: str | None = None) -> Figure:
    """Draw the history of a series: which layers changed at which step, and the bytes of each step.

    The upper panel is a map of layers by steps; a color is the share of the layer's bytes in tensors that changed since
    the step before. The panel below adds up the sizes of all states, and those of their changed tensors. A third line
    is the growth of the store, as far as the run has ``tensorcas/stored_bytes`` of the steps. Errors are also
    `mlflow.exceptions.MlflowException`.

    Args:
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else the last
            active run of this process.
        name: The series of checkpoints.
        metric: A metric of the run for a panel of its own.

    Returns:
        A figure of matplotlib. A notebook shows it; ``savefig`` writes it to a file.

    Raises:
        NotFoundError: There is no such run, store or series.
        ValueError: The run has no such metric.
        FormatError: A checkpoint is damaged.
        BackendError: The storage failed.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    saves.wait()
    reports.wait()
    run = run_to_read(run_id)
    steps = _steps(series_of(run, name).checkpoints())
    if not steps:
        raise CheckpointNotFoundError(f"{name!r} in run {run.run_id!r}")
    values = _metric(run.run_id, metric) if metric is not None else {}
    if metric is not None and not values:
        raise ValueError(f"run {run.run_id} has no metric {metric!r}")
    stored = _metric(run.run_id, figure_name(name, "stored_bytes"))
    n_panels = 3 if metric is not None else 2
    picture = _Picture(figsize=(9, 3 * n_panels + 1), layout="constrained")
    panels = picture.subplots(n_panels, 1, height_ratios=[2, *[1] * (n_panels - 1)])
    _draw_map(picture, panels[0], steps)
    _draw_bytes(panels[1], steps, stored)
    if metric is not None:
        panels[2].plot(list(values), list(values.values()), marker=".")
        panels[2].set(xlabel="step", ylabel=metric)
    picture.suptitle(f"{name} of run {run.run_id}")
    return picture


def _steps(checkpoints: Iterable[Checkpoint]) -> list[StepFacts]:
    facts = SeriesFacts()
    for checkpoint in checkpoints:
        with checkpoint.opened() as (manifest, _):
            facts.add(checkpoint.step, checkpoint.created or "", manifest)
    return facts.steps


def _metric(run_id: str, name: str) -> dict[int, float]:
    """Return the last value of a metric at each step."""
    history = sorted(MlflowClient().get_metric_history(run_id, name), key=lambda each: (each.step, each.timestamp))
    return {each.step: each.value for each in history}


def _draw_map(picture: Figure, panel: Any, steps: list[StepFacts]) -> None:
    parts, shares = parts_by_steps(steps)
    image = panel.imshow(shares, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis")
    picture.colorbar(image, ax=panel, label="share changed")
    every_part = -(-len(parts) // _MOST_LABELS)
    panel.set_yticks(range(0, len(parts), every_part), [_literal(part) for part in parts[::every_part]], fontsize=7)
    every_step = -(-len(steps) // 10)
    panel.set_xticks(range(0, len(steps), every_step), [str(each.step) for each in steps[::every_step]])
    panel.set(xlabel="step", title="tensors that changed since the step before")


def _draw_bytes(panel: Any, steps: list[StepFacts], stored: dict[int, float]) -> None:
    numbers = [each.step for each in steps]
    panel.plot(numbers, list(accumulate(each.n_bytes for each in steps)), marker=".", label="plain files")
    panel.plot(numbers, list(accumulate(each.n_changed_bytes for each in steps)), marker=".", label="changed tensors")
    known = [number for number in numbers if number in stored]
    if known:
        panel.plot(known, list(accumulate(stored[number] for number in known)), marker=".", label="growth of the store")
    panel.yaxis.set_major_formatter(lambda n_bytes, _: size_text(n_bytes))
    panel.set(xlabel="step", ylabel="added up")
    panel.set_ylim(bottom=0)
    panel.legend()


@translate_errors()
def plot_diff(
    before: CheckpointSource | CheckpointReader | tuple[str | Run, int],
    after: CheckpointSource | CheckpointReader | tuple[str | Run, int],
    *,
    most: int = 30,
) -> Figure:
    """Draw how much each tensor changed between two checkpoints, largest change first.

    A bar is the relative norm ``‖b - a‖ / ‖a‖``. The title counts the tensors without one: those in one checkpoint
    only, those of other dtypes or shapes, and those without numbers. Errors are also
    `mlflow.exceptions.MlflowException`.

    Args:
        before: As for `diff`.
        after: The same.
        most: Maximum number of bars.

    Returns:
        A figure of matplotlib. A notebook shows it; ``savefig`` writes it to a file.

    Raises:
        ValueError: ``most`` is not above 0.
        TensorCasError: As `open_checkpoint`.
    """
    if most < 1:
        raise ValueError(f"most is a whole number above 0, not {most!r}")
    found = diff(before, after, values=True)
    norms = {name: change.relative_norm for name, change in found.values.items()}
    bars = [(name, norm) for name, _ in found.by_change() if (norm := norms.get(name)) is not None]
    shown = bars[:most]
    picture = _Picture(figsize=(9, 1.5 + 0.25 * max(len(shown), 1)), layout="constrained")
    panel = picture.subplots()
    # An infinite norm (all numbers were 0) gets the longest bar, with its name.
    longest = max((norm for _, norm in shown if np.isfinite(norm)), default=1.0) or 1.0
    drawn = panel.barh(range(len(shown)), [min(norm, 1.2 * longest) for _, norm in shown])
    panel.bar_label(drawn, [f"{norm:.3g}" for _, norm in shown], padding=3, fontsize=7)
    panel.set_yticks(range(len(shown)), [_literal(name) for name, _ in shown], fontsize=7)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.set(xlabel="relative norm of the change")
    counts = [f"{count_text(len(found.changed), 'tensor')} changed", f"{len(found.equal)} equal"]
    counts += [f"{len(names)} {kind}" for kind, names in (("added", found.added), ("removed", found.removed)) if names]
    n_unmeasured = len(found.changed) - len(bars)
    counts += [f"{n_unmeasured} changed without a norm"] if n_unmeasured else []
    counts += [f"the largest {len(shown)} shown"] if len(bars) > len(shown) else []
    panel.set_title(", ".join(counts), fontsize=9)
    return picture


def _literal(text: str) -> str:
    """Keep matplotlib from reading a name as a formula."""
    return text.replace("$", r"\$")
