"""One process of a race: it does one thing to a store, again and again, and says what came of it.

python -m tests.race.racer ROLE SEED SECONDS FOLDER ROOT GRACE
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CheckpointExistsError, FencedError, TensorCasError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.race.content import N_TENSORS, Array, model, numbers_in
from tests.race.journal import Journal

FENCED = "treated the save as dead"


@dataclass
class Race:
    """Facts that a racer knows."""

    role: str
    seed: int
    folder: Path
    """With the files to upload, and for journals."""
    root: str
    grace_s: float
    until: float
    draw: random.Random
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self.until

    @property
    def name(self) -> str:
        return f"{self.role}-{self.seed}"

    def journal(self) -> Journal:
        return Journal(self.folder / f"{self.name}.journal")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def store(self) -> Store:
        return Store.open(self.root)

    def numbers(self) -> list[int]:
        return sorted(self.draw.sample(range(N_TENSORS), 5))


class Plain:
    """Takes apart what are arrays already."""

    name = "plain"

    def extract(self, model: Mapping[str, Array]) -> dict[str, Array]:
        return dict(model)

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None) -> dict[str, Array]:
        return dict(tensors)


def save_steps(race: Race) -> None:
    """Save, overwrite, drop and load steps of a run of one's own."""
    journal, held, step = race.journal(), dict[int, list[int]](), 0
    with TensorCasStore(race.root, race.name, Plain()) as run:
        while race.is_on:
            act = race.draw.random()
            try:
                if act < 0.5 or not held:
                    step += 1
                    numbers = race.numbers()
                    with journal.says((race.name, step), numbers):
                        run.save(model(numbers), step, metrics={"loss": 1 / step})
                    held[step] = numbers
                elif act < 0.6:
                    at, numbers = race.draw.choice(list(held)), race.numbers()
                    with journal.says((race.name, at), numbers):
                        run.save(model(numbers), at, overwrite=True)
                    held[at] = numbers
                elif act < 0.65:
                    with contextlib.suppress(CheckpointExistsError):
                        run.save(model(race.numbers()), race.draw.choice(list(held)))
                        raise AssertionError("a step was saved twice")
                elif act < 0.8 or len(held) > 12:
                    at = race.draw.choice(list(held))
                    with journal.says((race.name, at), None):
                        run.delete_checkpoint(at)
                    del held[at]
                else:
                    at = race.draw.choice(list(held))
                    assert numbers_in(run.load(at)) == held[at], f"step {at} is another one"
                    assert run.list_checkpoints() == sorted(held)
                race.count("done")
            except FencedError:
                race.count("fenced")


def log_steps(race: Race) -> None:
    """Log checkpoints of an MLflow run, some in the background, and load them."""
    import mlflow
    from mlflow.exceptions import MlflowException

    journal, held, step = race.journal(), dict[int, list[int]](), 0
    place = race.root.removeprefix("tensorcas://")
    # Under a root of ours and under one of MLflow's own.
    location = f"tensorcas://{place}/{race.name}" if race.seed % 2 else f"{place}/{race.name}"
    experiment_id = mlflow.create_experiment(race.name, artifact_location=location)
    with mlflow.start_run(experiment_id=experiment_id) as run:
        run_id = run.info.run_id
        while race.is_on:
            act = race.draw.random()
            try:
                if act < 0.7 or not held:
                    overwrite = bool(held) and act < 0.1
                    at = race.draw.choice(list(held)) if overwrite else (step := step + 1)
                    numbers = race.numbers()
                    with journal.says((run_id, at), numbers):
                        mlflow.tensorcas.log_checkpoint(
                            model(numbers),
                            step=at,
                            overwrite=overwrite,
                            blocking=act > 0.4,
                            log_metrics=False,
                        ).wait()
                    held[at] = numbers
                elif act < 0.8 or len(held) > 8:
                    at = race.draw.choice(list(held))
                    with journal.says((run_id, at), None):
                        mlflow.tensorcas.delete_checkpoint(step=at)
                    del held[at]
                else:
                    at = race.draw.choice(list(held))
                    assert numbers_in(mlflow.tensorcas.load_checkpoint(step=at)) == held[at]
                    assert [each.step for each in mlflow.tensorcas.list_checkpoints()] == sorted(held)
                race.count("done")
            except MlflowException as error:
                if FENCED not in str(error):
                    raise
                race.count("fenced")


def upload(race: Race) -> None:
    """Upload files and streams over each other, delete them, and download them again."""
    from mlflow.exceptions import MlflowException

    from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

    journal, held = race.journal(), dict[str, str]()
    repo = TensorCasArtifactRepository(f"tensorcas://{race.root.removeprefix('tensorcas://')}/files")
    samples = sorted(path.name for path in (race.folder / "samples").iterdir())
    with tempfile.TemporaryDirectory(dir=race.folder) as scratch:
        while race.is_on:
            path = f"{race.name}/{race.draw.choice('abc')}/file"
            act = race.draw.random()
            try:
                if act < 0.6:
                    sample = race.draw.choice(samples)
                    data = (race.folder / "samples" / sample).read_bytes()
                    with journal.says(("files/" + path,), sample):
                        if act < 0.3:
                            repo.log_artifact_from_stream(io.BytesIO(data), "file", path.removesuffix("/file"))
                        else:
                            Path(scratch, "file").write_bytes(data)
                            repo.log_artifact(f"{scratch}/file", path.removesuffix("/file"))
                    held[path] = sample
                elif act < 0.75:
                    with journal.says(("files/" + path,), None):
                        repo.delete_artifacts(path)
                    held.pop(path, None)
                elif path in held:
                    out = Path(scratch, "out")
                    repo._download_file(path, str(out))
                    assert out.read_bytes() == (race.folder / "samples" / held[path]).read_bytes(), path
                    assert path in {info.path for info in repo.list_artifacts(path.removesuffix("/file"))}
                race.count("done")
            except MlflowException as error:
                if FENCED not in str(error):
                    raise
                race.count("fenced")


def read(race: Race) -> None:
    """Read whatever there is: all of it is whole, or was dropped meanwhile."""
    store, known = race.store(), race.store()
    samples = {path.read_bytes() for path in (race.folder / "samples").iterdir()}
    while race.is_on:
        refs = known.checkpoints()
        if not refs:
            time.sleep(0.01)
            continue
        ref = race.draw.choice(refs)
        reader = store if race.draw.random() < 0.5 else known
        try:
            manifest = reader.manifest(ref)
            if ref.kind == "file":
                assert b"".join(map(bytes, reader.iter_file(ref))) in samples, ref.label
            elif race.draw.random() < 0.5:
                numbers_in(reader.read_tensors(manifest))
            else:
                name = race.draw.choice([row.spec.name for row in manifest.rows])
                numbers_in(reader.read_tensors(manifest, [name]))
            race.count("done")
        except TensorCasError:
            if _stands(known, ref):
                raise
            race.count("dropped meanwhile")
        if race.draw.random() < 0.05:
            store = race.store()


def show(race: Race) -> None:
    """List folders, and make pages and self-contained files of what is in them."""
    from mlflow.exceptions import MlflowException

    from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

    store = race.store()
    repo = TensorCasArtifactRepository(f"tensorcas://{race.root.removeprefix('tensorcas://')}")
    with tempfile.TemporaryDirectory(dir=race.folder) as scratch:
        while race.is_on:
            refs = [ref for ref in store.checkpoints() if ref.path is not None]
            if not refs:
                time.sleep(0.01)
                continue
            ref = race.draw.choice(refs)
            assert ref.path is not None
            out = Path(scratch, "out")
            ending = race.draw.choice(["", ".html", ".tensors"]) if ref.kind == "checkpoint" else ""
            path = ref.path.removesuffix(".arrow") + ending if ending else ref.path
            try:
                repo._download_file(path, str(out))
                assert out.stat().st_size > 0
                repo.list_artifacts(path.rpartition("/")[0])
                race.count("done")
            except MlflowException:
                if _stands(store, ref):
                    raise
                race.count("dropped meanwhile")


def _stands(store: Store, ref: Ref) -> bool:
    now = store.ref(ref.key)
    return now is not None and now.write == ref.write


def collect(race: Race) -> None:
    """Collect without a pause, rewriting packs of which anything is unneeded, or whatever wastes much."""
    store = race.store()
    while race.is_on:
        report = plan_gc(store, grace_s=race.grace_s, max_waste=race.draw.choice([0, 0, 0.3])).execute()
        race.count("done")
        race.counts["aborted"] = race.counts.get("aborted", 0) + report.n_withdrawn
        if race.draw.random() < 0.1:
            store = race.store()


def check(race: Race) -> None:
    """Verify, again and again: there is never a problem."""
    while race.is_on:
        report = verify(race.store(), full=race.draw.random() < 0.5)
        assert report.problems == (), str(report)
        race.count("done")
        time.sleep(0.1)


def copy(race: Race) -> None:
    """Copy everything to a second store, where it is dropped again and collected."""
    from tensorcas_mlflow.maintenance import copy_refs, read_source

    source, destination = race.store(), Store.open(race.folder / "copy", create=True)
    while race.is_on:
        refs, failed = read_source(source)
        assert failed == [], failed
        report = copy_refs(source, destination, refs, replace=race.draw.random() < 0.5)
        for each in report.failed:
            assert FENCED in each.reason, each
            race.count("fenced")
        race.count("done")
        for ref in race.draw.sample(there := destination.checkpoints(), len(there) // 2):
            destination.drop(ref)
        plan_gc(destination, grace_s=race.grace_s, max_waste=0.3).execute()


ROLES: dict[str, Callable[[Race], None]] = {
    "save": save_steps,
    "log": log_steps,
    "upload": upload,
    "read": read,
    "show": show,
    "collect": collect,
    "check": check,
    "copy": copy,
}


def warm_up() -> None:
    """Import what is imported lazily, pandas by pyarrow among it: on a busy machine that takes longer than the race."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=4096)
    with store.write_checkpoint({**model(range(2)), "text": np.zeros(9_000)}) as pending:
        ref = pending.commit(RefTarget(run_id="warm", step=0))
    store.read_tensors(store.manifest(ref))
    plan_gc(store, max_waste=0).execute()


def main() -> None:
    role, seed, seconds, folder, root, grace_s = sys.argv[1:]
    warm_up()
    if role in ("log", "upload", "show"):
        import mlflow  # takes seconds, which are not the race's

        mlflow.set_tracking_uri(f"sqlite:///{folder}/{role}-{seed}.db")
        mlflow.search_experiments()
    print("ready", flush=True)
    sys.stdin.readline()
    race = Race(
        role=role,
        seed=int(seed),
        folder=Path(folder),
        root=root,
        grace_s=float(grace_s),
        until=time.monotonic() + float(seconds),
        draw=random.Random(int(seed)),
    )
    ROLES[role](race)
    print(json.dumps(race.counts))


if __name__ == "__main__":
    main()
