"""Names of one checkpoint: its URI in MLflow's form for artifacts of runs, or the place of its artifact."""

from __future__ import annotations

import os
import re

from tensorcas_mlflow.integration._artifact_uri import owner_of
from tensorcas_mlflow.layout import DEFAULT_NAME, STEP_TEXT, step_of_text

FOLDER = "checkpoints"
"""Artifact folder of a run for its checkpoints."""

_CHECKPOINT_URI = re.compile(
    rf"(?:runs:/+(?P<run_id>[^/]+)|(?P<root>.+/artifacts))/+{FOLDER}/+(?P<name>[^/]+)"
    rf"/+step-(?P<step>{STEP_TEXT})\.(?:arrow|tensors)"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def parse_checkpoint_uri(text: str, *, step: int | None, name: str) -> tuple[str, str, int] | None:
    """Parse the name of one checkpoint: its URI in MLflow's form for artifacts, or the URI or path of its artifact.

    The second names the run by its artifact root, so it needs no tracking store: see `is_artifact_root`.

    Args:
        text: Any text.
        step: The caller's own ``step`` argument, if any.
        name: The caller's own ``name`` argument; `DEFAULT_NAME` matches every series.

    Returns:
        The run's id or its artifact root, the series and the step; or None if the text is no such name.

    Raises:
        ValueError: The text names another step or series than the caller.
    """
    found = _CHECKPOINT_URI.fullmatch(text)
    if found is None:
        return None
    run = found["run_id"] or found["root"]
    if found["root"] is not None:
        run = run if _SCHEME.match(run) else os.path.abspath(run)
        if not is_artifact_root(run):
            return None
    named = step_of_text(found["step"])
    if step is not None and step != named:
        raise ValueError(f"{text!r} is step {named}, and step={step} was given")
    if name not in (DEFAULT_NAME, found["name"]):
        raise ValueError(f"{text!r} is of the series {found['name']!r}, and name={name!r} was given")
    return run, found["name"], named


def is_artifact_root(run: str) -> bool:
    """Tell whether a run is named by its artifact root: ``…/<run's id>/artifacts``."""
    run_id = owner_of(run).run_id
    return run_id is not None and run.endswith(f"/{run_id}/artifacts")
