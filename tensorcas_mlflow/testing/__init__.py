"""Conformance suites for implementations of our contracts. They need pytest."""

from tensorcas_mlflow.testing._backends import BackendConformance
from tensorcas_mlflow.testing._faulty import FaultyBackend, SimulatedCrash

__all__ = ["BackendConformance", "FaultyBackend", "SimulatedCrash"]
