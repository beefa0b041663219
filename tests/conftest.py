"""Settings of every test."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from binascii import crc32
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import zygote
from tests.mutants.mutant import all_mutants

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
MEMORY = Path("/dev/shm")
FREE_MEMORY_BYTES = 8 << 30
"""Tests that run at the same time hold up to half of that."""
if "TMPDIR" not in os.environ and MEMORY.is_dir():
    # Thousands of stores are made, synced and deleted. Tests of crashes look at the calls that sync, not at a disk.
    space = os.statvfs(MEMORY)
    if space.f_bavail * space.f_frsize >= FREE_MEMORY_BYTES and not space.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None  # what was found before
# No test asserts on wall time.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ALL_LONG = "\npytestmark = pytest.mark.long\n"
MOST_CASES = 5
"""Cases of one test that are not long; the others are, unless a mutant names them."""
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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group tests for the workers, and mark all but some cases of each test as long.

    Each module is a group by itself; those that share servers are one together.
    """
    if not any("::" in argument for argument in config.args):  # whoever names a test gets it
        for item in further_cases(items):
            item.add_marker(pytest.mark.long)
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else item.nodeid.partition("::")[0]))


def further_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests with many that are long: always the same ones, whatever is run with them."""
    named = {mutant.test for mutant in all_mutants()}
    cases = defaultdict(list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        test = function.partition("::")[2]
        if not {test, test + item.nodeid[len(function) :]} & named:
            cases[function].append(item)
    return [
        item
        for each in cases.values()
        for item in sorted(each, key=lambda item: crc32(item.nodeid.encode()))[MOST_CASES:]
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Spare later garbage collections the objects of the frameworks too."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def disk() -> Iterator[Path]:
    """Create a folder on a disk: other temporary folders may lie in memory."""
    with tempfile.TemporaryDirectory(prefix="tensorcas-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def store_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create stores without a database: the test looks at files of the store, or damages them."""
    monkeypatch.setenv("TENSORCAS_DATABASE", "false")
