"""`import mlflow` pays for every plugin that is installed: ours adds next to nothing, and no import order breaks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.tensorcas_store import TensorCasStore

LIGHT = {"mlflow.tensorcas", "tensorcas_mlflow", "tensorcas_mlflow.plugin"}
"""All that `import mlflow` may load because of us."""

# MLflow asks importlib.metadata for plugins by this function, at the end of its own import.
HIDE_THE_PLUGIN = """
import importlib.metadata as metadata

ask = metadata.entry_points

def entry_points(**params):
    found = ask(**params)
    if params.get("group") != "mlflow.artifact_repository":
        return found
    return metadata.EntryPoints(point for point in found if not point.value.startswith("tensorcas_mlflow"))

metadata.entry_points = entry_points
"""

LIST_MODULES = """
import json, sys
import mlflow
print(json.dumps(sorted(sys.modules)))
"""

REPORT = """
import sys
from mlflow.store.artifact import artifact_repository_registry as registry

print(sys.modules["mlflow.tensorcas"].__name__)
print("tensorcas" in registry._artifact_repository_registry.get_registered_artifact_repositories())
"""


def run_fresh(script: str, cwd: Path) -> str:
    """Run a script away from the checkout, where the packages could be imported without being installed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_import_mlflow_loads_only_the_facade_because_of_us(tmp_path: Path) -> None:
    with_plugin = set(json.loads(run_fresh(LIST_MODULES, tmp_path)))
    without_plugin = set(json.loads(run_fresh(HIDE_THE_PLUGIN + LIST_MODULES, tmp_path)))

    added = with_plugin - without_plugin
    assert "tensorcas_mlflow.plugin" in added
    assert added <= LIGHT


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        "import mlflow; mlflow.tensorcas.log_model",
        pytest.param("import mlflow.tensorcas; mlflow.tensorcas.log_model", marks=pytest.mark.long),
        pytest.param("from mlflow import tensorcas; tensorcas.log_model", marks=pytest.mark.long),
        "from mlflow.tensorcas import log_model",
        pytest.param("import tensorcas_mlflow; import mlflow; mlflow.tensorcas.log_model", marks=pytest.mark.long),
        "import tensorcas_mlflow.plugin; import mlflow; mlflow.tensorcas.log_model",
    ],
)
def test_every_import_order_gives_the_flavor_and_the_scheme(script: str, tmp_path: Path) -> None:
    name, is_registered = run_fresh(script + REPORT, tmp_path).split()

    assert name == "mlflow.tensorcas"
    assert is_registered == "True"


SAVE_AND_LOAD = """
import json, sys
import numpy as np
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

store = Store.init(sys.argv[1])
weights = {name: np.arange(50_000, dtype=np.float32) for name in "ab"}
for step in range(2):
    with store.write_checkpoint(weights, series="run") as pending:
        ref = pending.commit(RefTarget(run_id="run", step=step))
    weights["a"] += np.float32(0.5)
store = Store.open(sys.argv[1])
store.read_tensors(store.manifest(ref))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.long
def test_a_save_and_a_load_import_nothing_that_takes_long(tmp_path: Path) -> None:
    script = SAVE_AND_LOAD.replace("sys.argv[1]", repr(str(tmp_path / "store")))
    loaded = set(json.loads(run_fresh(script, tmp_path)))

    # Two to six tenths of a second each.
    assert not loaded & {"mlflow", "pandas", "torch"}
    assert "tensorcas_mlflow.file_formats._formats" not in loaded


LOOK_AT_PAGES = """
import json, sys
from tensorcas_mlflow.integration.pages import HISTORY_PAGE, SeriesFacts, history_page, render_page
made = set(sys.modules)
history_page("net", "run", SeriesFacts())
print(json.dumps([sorted(made), sorted(sys.modules)]))
"""


def test_jinja_is_imported_by_the_first_page(tmp_path: Path) -> None:
    before, after = json.loads(run_fresh(LOOK_AT_PAGES, tmp_path))

    assert "jinja2" not in before
    assert "jinja2" in after


READ_PARTS = """
import json, sys
from tensorcas_mlflow import TensorCasStore

reader = TensorCasStore(sys.argv[1], "run").open()
str(reader.summary()), reader.digest(), reader.layer(1)
reader.tensor("layers.0.a"), reader.rows("layers.0.a", slice(3, 5))
print(json.dumps(sorted(sys.modules)))
"""


def test_reading_parts_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path / "store", "run", adapter=Arrays())
    store.save({f"layers.{n}.a": np.arange(90_000, dtype=np.float32) for n in range(2)}, step=1)
    script = READ_PARTS.replace("sys.argv[1]", repr(str(tmp_path / "store")))

    loaded = set(json.loads(run_fresh(script, tmp_path)))

    # What is read of modules is counted by whoever counts what is read: a summary is a few kilobytes.
    assert not loaded & {"mlflow", "numpy.ma", "pandas", "torch"}


FIRST_READ = """
import json, sys
from tensorcas_mlflow.tensorcas_store import TensorCasStore

reader = TensorCasStore(sys.argv[1], "run").open()
str(reader.summary()) if sys.argv[2] == "summary" else reader.tensor(sys.argv[2], copy=True)
print(json.dumps(sorted(sys.modules)))
"""
UNUSED_BY_SUMMARIES = {
    "ml_dtypes",
    "tensorcas_mlflow.base.sketch",
    "tensorcas_mlflow.chunk_io._read",
    "tensorcas_mlflow.file_formats",
}


@pytest.mark.parametrize(("what", "most"), [("summary", 60), ("layers.0.a", 65)])
def test_first_read_of_a_process_imports_few_modules(tmp_path: Path, what: str, most: int) -> None:
    store = TensorCasStore(tmp_path / "store", "run", adapter=Arrays())
    store.save({f"layers.{n}.a": np.arange(90_000, dtype=ml_dtypes.bfloat16) for n in range(2)}, step=1)
    script = FIRST_READ.replace("sys.argv[1]", repr(str(tmp_path / "store"))).replace("sys.argv[2]", repr(what))

    loaded = set(json.loads(run_fresh(script, tmp_path)))

    assert len([name for name in loaded if name.startswith("tensorcas_mlflow")]) <= most
    assert what != "summary" or not loaded & UNUSED_BY_SUMMARIES


EVERYTHING_WITHOUT_PANDAS = """
import json, sys
import numpy as np
from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.reader import open_ref
from tensorcas_mlflow.maintenance import plan_repair
from tensorcas_mlflow.maintenance import store_stats
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.maintenance import verify

root = sys.argv[1]
weights = {f"layers.{n}.{kind}": np.arange(9_000).astype(kind) for n in range(3) for kind in ("f4", "f8", "i2")}
saves = TensorCasStore(root, "run")
for step in range(2):
    weights["layers.0.f4"] += np.float32(1)
    saves.save(weights, step=step)
store = Store.open(root)
with store.write_checkpoint(weights, cuts={"layers.0.f8": [4_000, 9_000]}) as pending:
    pending.commit(RefTarget(run_id="cut", step=1))
np.savez(root + "/file.npz", **weights)
with open(root + "/file.npz", "rb") as file, store.write_stream(file) as pending:
    pending.commit(RefTarget(path="file.npz"))
store = Store.open(root)
for ref in store.checkpoints():
    manifest = store.manifest(ref)
    if ref.kind == "checkpoint":
        reader = open_ref(store, ref)
        assert reader.tensor("layers.1.i2").sum() and list(reader) and reader.digest()
        store.read_tensors(manifest)
saves.list_checkpoints(), saves.load(), str(saves.open().summary()), store_stats(store)
plan_gc(store, grace_s=0).execute()
assert verify(store, full=True).problems == ()
plan_repair(store).execute()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.long
def test_nothing_but_a_table_for_pandas_imports_pandas(tmp_path: Path) -> None:
    script = EVERYTHING_WITHOUT_PANDAS.replace("sys.argv[1]", repr(str(tmp_path / "store")))

    assert "pandas" not in json.loads(run_fresh(script, tmp_path))


class Arrays:
    """Takes arrays as they are."""

    def extract(self, model: dict[str, Any]) -> dict[str, Any]:
        return model

    def reconstruct(self, tensors: Mapping[str, Any], original: Any = None) -> Any:
        return dict(tensors)
