"""URIs of checkpoints, in MLflow's form for artifacts of runs."""

from __future__ import annotations

import re

from tensorcas_mlflow.layout import DEFAULT_NAME, STEP_TEXT, step_of_text

FOLDER = "checkpoints"
"""Artifact folder of a run for its checkpoints."""

_CHECKPOINT_URI = re.compile(
    rf"runs:/+(?P<run_id>[^/]+)/{FOLDER}/(?P<name>[^/]+)/step-(?P<step>{STEP_TEXT})\.(?:arrow|tensors)"
)


def parse_checkpoint_uri(text: str, *, step: int | None, name: str) -> tuple[str, str, int] | None:
    """Parse the URI of one checkpoint, in MLflow's form for artifacts.

    Args:
        text: Any text.
        step: The caller's own ``step`` argument, if any.
        name: The caller's own ``name`` argument; `DEFAULT_NAME` matches every series.

    Returns:
        The run's id, the series and the step, or None if the text is no such URI.

    Raises:
        ValueError: The URI names another step or series than the caller.
    """
    found = _CHECKPOINT_URI.fullmatch(text)
    if found is None:
        return None
    named = step_of_text(found["step"])
    if step is not None and step != named:
        raise ValueError(f"{text!r} is step {named}, and step={step} was given")
    if name not in (DEFAULT_NAME, found["name"]):
        raise ValueError(f"{text!r} is of the series {found['name']!r}, and name={name!r} was given")
    return found["run_id"], found["name"], named
