"""Cost of an installed tensorcas-mlflow in `import mlflow`.

MLflow loads every artifact-repository plugin at the end of its own import, so each of its users pays for ours. The
target is at most 20 ms.

Both sides run in fresh processes of this interpreter over a folder of links. It has one link for each entry of MLflow's
site-packages, except this distribution, and, on the side *with*, links to the two packages and a ``dist-info`` with
their entry points. A user has the same after ``pip install``: the difference includes the search for the entry point,
the file look-ups and the imports. (A developer's editable install would add its path hook to every import; patching
MLflow's look-up away would leave out the search.) ``-S`` excludes the real site-packages, and the time is taken inside
the process, around the import alone.

The two sides take turns and swap places each round, so a disturbance of the machine affects both. The first round warms
the file cache and compiles bytecode; it is not counted. The plugin's cost is the median over the rounds of *with* minus
*without*, shown with its spread. On a busy machine the time of the whole import varies by more than the plugin costs.
So loading the entry point is timed as well, inside the same processes; this time excludes the search for the entry
point.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.harness import Options, Section, Series, Table, at_most

DISTRIBUTION = "tensorcas-mlflow"
CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = (CHECKOUT / "tensorcas_mlflow", CHECKOUT / "flavors" / "tensorcas_flavors")
TITLE = "what the plugin adds to `import mlflow`"
ADDED = at_most(20, "ms", "import mlflow, with the plugin less without")
N_ROUNDS = 20

CHILD = """
import importlib.metadata, sys, time

load_ms = 0.0
load = importlib.metadata.EntryPoint.load

def timed_load(entry_point):
    global load_ms
    start = time.perf_counter()
    try:
        return load(entry_point)
    finally:
        if entry_point.value.startswith("tensorcas_mlflow"):
            load_ms += (time.perf_counter() - start) * 1000

importlib.metadata.EntryPoint.load = timed_load
sys.path.append(sys.argv[1])
start, start_cpu = time.perf_counter(), time.process_time()
import mlflow
import_ms = (time.perf_counter() - start) * 1000
cpu_ms = (time.process_time() - start_cpu) * 1000
assert ("tensorcas_mlflow.plugin" in sys.modules) == (sys.argv[2] == "with"), "the wrong side was measured"
print(import_ms, cpu_ms, load_ms)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one import of MLflow."""

    import_ms: float
    cpu_ms: float
    """Processor time of the same; it swings less on a busy machine."""
    load_ms: float
    """The part for loading our entry point; 0 without the plugin."""


def link_site(folder: Path, *, with_plugin: bool) -> None:
    """Fill a folder with links to the installed packages, with or without this distribution."""
    site = Path(str(metadata.distribution("mlflow").locate_file("")))
    folder.mkdir()
    for entry in site.iterdir():
        # tensorcas_mlflow, tensorcas_mlflow-0.1.0.dist-info, __editable___tensorcas_mlflow_0_1_0_finder.py, …
        if "tensorcas" not in entry.name and entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)
    if with_plugin:
        for package in PACKAGES:
            (folder / package.name).symlink_to(package)
        distribution = metadata.distribution(DISTRIBUTION)
        info = folder / f"tensorcas_mlflow-{distribution.version}.dist-info"
        info.mkdir()
        for name in ("METADATA", "entry_points.txt"):
            (info / name).write_text(distribution.read_text(name) or "")


def time_import(site: Path, side: str, cwd: Path) -> Timing:
    """Import MLflow in a fresh process."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_", "PYTHON"))
    }
    command = [sys.executable, "-S", "-c", CHILD, str(site), side]
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True)
    import_ms, cpu_ms, load_ms = map(float, done.stdout.split())
    return Timing(import_ms=import_ms, cpu_ms=cpu_ms, load_ms=load_ms)


def measure(n_runs: int) -> tuple[list[Timing], list[Timing]]:
    """Import MLflow ``n_runs`` times on either side: without and with the plugin, round by round."""
    times: dict[str, list[Timing]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for side in times:
            link_site(root / side, with_plugin=side == "with")
        for n_done in range(n_runs + 1):
            for side in sorted(times, reverse=n_done % 2 == 0):
                timing = time_import(root / side, side, root)
                if n_done > 0:
                    times[side].append(timing)
    return times["without"], times["with"]


def run(options: Options) -> Section:
    """Measure both sides, and the plugin's cost."""
    section = Section("import_time", TITLE)
    without, with_plugin = measure(options.n_rounds or N_ROUNDS)
    pairs = list(zip(without, with_plugin, strict=True))
    rows = {
        "without": Series(tuple(timing.import_ms for timing in without)),
        "with": Series(tuple(timing.import_ms for timing in with_plugin)),
        "added": Series(tuple(more.import_ms - less.import_ms for less, more in pairs)),
        "added, processor time": Series(tuple(more.cpu_ms - less.cpu_ms for less, more in pairs)),
        "entry point alone": Series(tuple(timing.load_ms for timing in with_plugin)),
    }
    table = Table(f"import mlflow {metadata.version('mlflow')}", ("", "ms", "middle half"))
    for name, series in rows.items():
        low, high = series.quartiles
        table.add(name, f"{series.median:.1f}", f"{low:.1f} to {high:.1f}")
    section.keep("import", rows, "ms")
    section.tables.append(table)
    section.verdicts.append(ADDED.judge("by round", rows["added"].median))
    return section
