"""Files become checkpoints: the same tensors, stored once, under the name that was said, or nothing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tensorcas_mlflow.errors import AdapterError, BackendError, CheckpointExistsError, ConflictError
from tensorcas_mlflow.file_formats import LocalFile
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.reader import import_checkpoint, open_ref, plan_export
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.reader.exchange.listings import listing_of
from tests.zygote import run_program

ONE = RefTarget(run_id="r", step=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "store")


def some(seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "w": draw.normal(size=(30, 400)).astype("f4"),
        "half": draw.normal(size=(7, 3)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), "i8"),
        "scalar": np.array(3.5),
    }


def digests(store: Store, target: RefTarget) -> dict[str, Any]:
    """Return the spec and chunk digests of each tensor of a checkpoint."""
    ref = store.ref(target.key)
    assert ref is not None
    return {row.spec.name: (row.spec, row.digests.tobytes()) for row in store.manifest(ref).rows}


def test_the_tensors_of_a_file_are_the_checkpoint(store: Store, tmp_path: Path) -> None:
    given = some()
    ref = import_checkpoint(store, listing_of(tmp_path / "f", given, metadata={"format": "pt", "n": 3}), ONE)

    manifest = store.manifest(ref)
    read = store.read_tensors(manifest)
    assert (ref.run_id, ref.step, ref.kind, ref.flavor) == ("r", 1, "checkpoint", "pytorch")
    assert manifest.metadata == {"format": "pt", "n": 3}
    assert {name: (value.dtype, value.shape, value.tobytes()) for name, value in read.items()} == {
        name: (value.dtype, value.shape, value.tobytes()) for name, value in given.items()
    }


def test_tensors_that_cannot_be_viewed_where_they_lie_are_the_same_tensors(store: Store, tmp_path: Path) -> None:
    class Unmapped(LocalFile):
        def view(self, start: int, n_bytes: int) -> memoryview | None:
            return None

    given = some()
    import_checkpoint(store, listing_of(tmp_path / "a", given), ONE)
    ways: list[dict[str, Any]] = [
        {"deflated": ("w", "empty")},
        {"deflated": tuple(given)},
        {"transposed": ("w", "half")},
        {"source": Unmapped},
    ]
    for step, options in enumerate(ways, 2):
        target = RefTarget(run_id="r", step=step)
        import_checkpoint(store, listing_of(tmp_path / f"{step}", given, **options), target)

        assert digests(store, target) == digests(store, ONE)


def test_equal_files_share_one_manifest_and_add_nothing(store: Store, tmp_path: Path) -> None:
    manifests = set()
    for name in ("one", "other"):
        listing = listing_of(tmp_path / name, some(), metadata={"a": 1})
        manifests.add(import_checkpoint(store, listing, RefTarget(run_id=name, step=1)).manifest)

    assert len(manifests) == 1


def test_a_module_is_filled_from_what_was_imported(store: Store, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    import_checkpoint(store, listing_of(tmp_path / "f", {n: t.numpy() for n, t in state.items()}), ONE)
    torch.nn.init.zeros_(module[0].weight)
    runs = TensorCasStore(tmp_path / "store", "r")
    runs.load(1, original=module)

    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(AdapterError, match="no skeleton"):
        runs.load(1)


def test_the_flavor_is_that_of_the_format_or_as_was_said(store: Store, tmp_path: Path) -> None:
    listing = listing_of(tmp_path / "f", some(), format="npz")

    assert import_checkpoint(store, listing, ONE).flavor == "generic"
    assert import_checkpoint(store, listing, ONE, flavor="mine", overwrite=True).flavor == "mine"


def test_a_later_step_is_stored_as_a_difference_from_the_one_before(store: Store, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    first = draw.normal(size=1 << 18).astype("f4")
    moved = first + (draw.random(len(first)) < 0.02).astype("f4") * np.float32(1e-4)
    sizes = []
    for step, weights in enumerate([first, moved]):
        # Another process, which remembers nothing of the step before.
        import_checkpoint(
            Store.open(tmp_path / "store"),
            listing_of(tmp_path / f"{step}", {"w": weights}),
            RefTarget(run_id="r", step=step),
        )
        sizes.append(sum(info.size for info in store.backend.list("packs")))

    assert sizes[1] - sizes[0] < sizes[0] / 5


def test_import_names_the_parts_it_would_leave_out_unless_allowed(store: Store, tmp_path: Path) -> None:
    listing = listing_of(tmp_path / "f", some(), left_out={"q.weight": "Q4_K", "q.bias": "quint8"})
    with pytest.raises(ValueError, match=r"2 tensors .* 'q\.weight' \(Q4_K\), 'q\.bias' \(quint8\)"):
        import_checkpoint(store, listing, ONE)

    assert store.checkpoints() == []
    import_checkpoint(store, listing, ONE, allow_left_out=True)
    assert digests(store, ONE).keys() == some().keys()


def test_a_checkpoint_remembers_what_its_import_left_out(store: Store, tmp_path: Path) -> None:
    left_out = {"q.weight": "Q4_K", "q.bias": "quint8"}
    listing = listing_of(tmp_path / "f", {"q.scale": np.ones(3)}, left_out=left_out)
    ref = import_checkpoint(store, listing, ONE, allow_left_out=True)
    reader = open_ref(Store.open(store.uri), ref)

    assert (list(reader), dict(reader.left_out)) == (["q.scale"], left_out)
    assert "and 2 tensors of unsupported types (Q4_K, quint8)" in str(reader.summary())
    with pytest.raises(ValueError, match=r"2 tensors cannot be taken .*'q\.weight' \(Q4_K\)"):
        plan_export(reader, tmp_path / "x.safetensors").execute()
    plan_export(reader, tmp_path / "x.safetensors", allow_left_out=True).execute()
    assert (tmp_path / "x.safetensors").exists()


def test_a_file_cannot_bring_a_pickle_in_under_the_name_of_a_skeleton(store: Store, tmp_path: Path) -> None:
    listing = listing_of(tmp_path / "f", {"w": np.ones(3), "__skeleton__": np.frombuffer(b"cos\nsystem\n.", np.uint8)})

    with pytest.raises(ValueError, match="'__skeleton__'"):
        import_checkpoint(store, listing, ONE)
    assert store.checkpoints() == []


def test_a_checkpoint_that_is_there_is_replaced_only_if_that_was_said(store: Store, tmp_path: Path) -> None:
    import_checkpoint(store, listing_of(tmp_path / "a", some(1)), ONE)
    before = digests(store, ONE)
    later = listing_of(tmp_path / "b", some(2))
    with pytest.raises(CheckpointExistsError):
        import_checkpoint(store, later, ONE)

    assert digests(store, ONE) == before
    import_checkpoint(store, later, ONE, overwrite=True)
    assert digests(store, ONE) != before


def test_nothing_is_committed_of_a_file_that_changes_meanwhile(store: Store, tmp_path: Path) -> None:
    listing = listing_of(tmp_path / "f", {"w": np.arange(1 << 20)})

    def change(done: int, n_all: int) -> None:
        if done >= n_all // 2:
            with open(tmp_path / "f", "r+b") as file:
                file.write(b"x" * 5000)

    with pytest.raises(ConflictError, match="changed"):
        import_checkpoint(store, listing, ONE, progress=change)
    assert store.checkpoints() == []
    assert list(store.backend.list("intents")) == []


def test_import_names_a_file_that_cannot_be_read(store: Store, tmp_path: Path) -> None:
    class Broken(LocalFile):
        def view(self, start: int, n_bytes: int) -> memoryview | None:
            return None

        def read_into(self, start: int, out: memoryview) -> None:
            raise BackendError("read", self.name, "EIO")

    with pytest.raises(BackendError, match="EIO"):
        import_checkpoint(store, listing_of(tmp_path / "f", some(), source=Broken), ONE)


@pytest.mark.parametrize("deflated", [(), ("w", "half")])
def test_progress_goes_up_to_the_end(store: Store, tmp_path: Path, deflated: tuple[str, ...]) -> None:
    told: list[tuple[int, int]] = []
    import_checkpoint(
        store,
        listing_of(tmp_path / "f", some() | {"big": np.arange(1 << 20)}, deflated=deflated),
        ONE,
        progress=lambda done, n_all: told.append((done, n_all)),
    )

    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == told[-1][1]
    assert len(told) >= 3


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tensorcas_mlflow.reader import import_checkpoint, plan_export
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.reader.exchange.listings import listing_of

def die(done, n_all):
    if done > float(sys.argv[2]) * n_all:
        os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
listing = listing_of(folder / "f", {"w": np.arange(1 << 20), "z": np.arange(1000)}, deflated=("z",))
import_checkpoint(Store.open(folder / "store"), listing, RefTarget(run_id="r", step=1), overwrite=True, progress=die)
"""


@pytest.mark.parametrize("when", [pytest.param(0.0, marks=pytest.mark.long), 0.5, 0.9])
def test_a_killed_import_leaves_the_checkpoint_that_was_there(store: Store, tmp_path: Path, when: float) -> None:
    import_checkpoint(store, listing_of(tmp_path / "old", some()), ONE)
    before = digests(store, ONE)
    ended = run_program(KILLED, tmp_path, when)

    assert ended.returncode == -signal.SIGKILL
    assert digests(store, ONE) == before
    assert verify(store, full=True).problems == ()
