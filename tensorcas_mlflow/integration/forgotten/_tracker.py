"""Collection's questions to MLflow, as protocols. This module imports no MLflow; ``_mlflow`` answers by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tensorcas_mlflow.integration.forgotten._holdings import Holding, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment known to a tracking store, deleted or not."""

    location: str
    """Its artifact location."""
    made_s: float
    """Its creation, in seconds of Unix time; 0 if unknown."""


class Artifacts(Protocol):
    """The artifacts of one run or logged model."""

    uri: str
    """Their root."""

    def paths(self) -> Iterator[str]:
        """List all files below the root.

        Raises:
            BackendError: They did not answer.
        """

    def read(self, path: str) -> bytes:
        """Read one file; raises as `paths`."""


class Tracker(Protocol):
    """A tracking store, as far as collection asks it."""

    name: str
    """Its URI, without a password."""

    def artifact_root(self, kind: Kind, of: str) -> str | None:
        """Return the artifact root of a run, logged model or trace.

        Returns:
            The URI, "" if not recorded; None if this id certainly does not exist, not even as a restorable deleted one.

        Raises:
            BackendError: It did not answer, or not clearly.
        """

    def experiments(self) -> Sequence[Experiment]:
        """List all experiments, deleted ones too; raises as `artifact_root`."""

    def artifacts(self) -> Iterator[tuple[Kind, str, Artifacts]]:
        """Yield kind, id and artifacts of each existing run and logged model; raises as `artifact_root`."""


class Registry(Protocol):
    """A model registry, as far as collection asks it."""

    name: str
    """Its URI, without a password."""

    def registered_ids(self) -> Collection[str]:
        """Return the ids of runs and logged models with artifacts used by a registered model version.

        Raises:
            BackendError: It did not answer, or not clearly.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A holding, with the tracking stores' answers."""

    holding: Holding
    roots: tuple[str, ...]
    """Its artifact root in each tracking store that knows it; empty if none does."""


def ask(trackers: Sequence[Tracker], holding: Holding) -> Asked:
    """Ask all tracking stores about a holding; raises as `Tracker.artifact_root`."""
    roots = (tracker.artifact_root(holding.kind, holding.id) for tracker in trackers)
    return Asked(holding=holding, roots=tuple(root for root in roots if root is not None))
