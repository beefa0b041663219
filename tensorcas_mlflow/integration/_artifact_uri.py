"""Artifact URIs, split into folder, store root, and run or model. Opens nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.errors import without_secrets

# MLflow's names for the roots below an experiment's artifact location: one for each run, logged model and trace.
# The first match from the left counts: an outer store holds everything deeper; an inner one would lock out the outer.
# The pattern matches the scheme possessively, or the scheme could pass for the experiment's folder.
_BELOW_EXPERIMENT = re.compile(
    r"(?P<experiment>(?:[A-Za-z][A-Za-z0-9.-]*:(?://[^/]*)?)?+/?[^/].*?)"
    r"/(?:(?P<run_id>[0-9a-f]{32})|models/(?P<model_id>m-[0-9a-f]{32})|traces/(?:tr-)?[0-9a-f]{32})"
    r"/artifacts(?:/.*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactOwner:
    """The owner of the artifact at a URI, as far as the URI shows it."""

    run_id: str | None = None
    model_id: str | None = None


def store_root_for(artifact_uri: str) -> str:
    """Return the place for a new store for an artifact URI, if there is none at or above it yet.

    Args:
        artifact_uri: URI or path of a run's, model's or trace's artifact root, of something below one, or of any
            other folder.

    Returns:
        The experiment's artifact location if MLflow's folder names show it, so all its runs share one store;
        else the URI itself, without a slash at its end.
    """
    match = _BELOW_EXPERIMENT.fullmatch(artifact_uri)
    return match["experiment"] if match else artifact_uri.rstrip("/")


def owner_of(artifact_uri: str) -> ArtifactOwner:
    """Return the run or the logged model of the artifact root around a URI; other URIs have no known owner."""
    match = _BELOW_EXPERIMENT.fullmatch(artifact_uri)
    return ArtifactOwner(run_id=match["run_id"], model_id=match["model_id"]) if match else ArtifactOwner()


def root_of(artifact_uri: str) -> Root:
    """Return the place named by one of our URIs.

    Raises:
        ValueError: The URI has another scheme, a host, no folder, a relative one, or a query.
    """
    if not is_ours(artifact_uri):
        raise ValueError(f"{without_secrets(artifact_uri)!r} is no tensorcas URI")
    root = Root.parse(artifact_uri)
    if (root.is_local and root.path == "/") or ".." in unquote(artifact_uri).split("/"):
        raise ValueError(
            f"{without_secrets(artifact_uri)!r} must name a folder plainly, as tensorcas:///data/mlflow does"
        )
    return root
