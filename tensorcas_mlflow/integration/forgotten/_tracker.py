"""What collection asks MLflow. Nothing here knows MLflow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tensorcas_mlflow.integration.forgotten._holdings import Holding, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment that a tracking store knows, deleted or not."""

    location: str
    """Its artifact location."""
    made_s: float
    """When, in seconds of Unix time; 0 if that is not known."""


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
        """Say where the artifacts of a run, logged model or trace are.

        Returns:
            Their URI, "" if that is not recorded; None if it is certain that there is none of this id, not even a
            deleted one that can be restored.

        Raises:
            BackendError: It did not answer, or not clearly.
        """

    def experiments(self) -> Sequence[Experiment]:
        """List all experiments, deleted ones too; raises as `artifact_root`."""

    def artifacts(self) -> Iterator[tuple[Kind, str, Artifacts]]:
        """Give kind, id and artifacts of each run and logged model that is there; raises as `artifact_root`."""


class Registry(Protocol):
    """A model registry, as far as collection asks it."""

    name: str
    """Its URI, without a password."""

    def registered_ids(self) -> Collection[str]:
        """Give the ids of runs and logged models whose artifacts a registered model version is loaded from.

        Raises:
            BackendError: It did not answer, or not clearly.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A holding, and what the tracking stores say of it."""

    holding: Holding
    roots: tuple[str, ...]
    """Where those that know it keep its artifacts; empty if none does."""


def ask(trackers: Sequence[Tracker], holding: Holding) -> Asked:
    """Ask all tracking stores about a holding; raises as `Tracker.artifact_root`."""
    roots = (tracker.artifact_root(holding.kind, holding.id) for tracker in trackers)
    return Asked(holding=holding, roots=tuple(root for root in roots if root is not None))
