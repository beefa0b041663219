"""Settings of every test."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests import zygote

# Each test worker has a core of its own. OpenMP threads that spin for the other one make XGBoost's tests take five
# times as long. Set before any framework is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A thread of MLflow's telemetry changes the environment while requests reads it, which fails now and then.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# What the import of frameworks makes lives until the end: looking for garbage in it takes seconds.
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and every program of a test would ignore interrupts too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test asserts on wall time.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ALL_LONG = "\npytestmark = pytest.mark.long\n"
TOGETHER = ("deploy", "server_store", "served")
"""Folders whose tests share servers, which take longer to start than most tests to run."""


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that forks for programs of tests: one for all workers."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="tensorcas-")
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(zygote.start(Path(folder.name)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules of long tests unread where long tests do not run: every worker would import their frameworks."""
    if config.option.markexpr != "not long" or collection_path.suffix != ".py":
        return None
    return True if ALL_LONG in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for the workers: each module by itself, those that share servers together."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else item.nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Spare later garbage collections the objects of the frameworks too."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def store_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create stores without a database: the test looks at files of the store, or damages them."""
    monkeypatch.setenv("TENSORCAS_DATABASE", "false")
