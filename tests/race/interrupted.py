"""A process that gets a real SIGINT at a random moment of each call, catches what comes of it, and goes on.

python -m tests.race.interrupted WAY SECONDS FOLDER ROOT
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.race.content import model, numbers_in
from tests.race.racer import Plain

N_WARM = 3
"""Calls that are not interrupted: they import what is imported lazily, and say how long a call takes."""


@dataclass
class Interrupted:
    """The process and what it knows."""

    folder: Path
    root: str
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    held: dict[int, list[list[int] | None]] = field(default_factory=dict)
    """For each step what it may hold, None being nothing."""

    def numbers(self) -> list[int]:
        return sorted(self.draw.sample(range(24), 6))


def saving(it: Interrupted) -> Callable[[int], None]:
    run = TensorCasStore(it.root, "run", Plain())

    def act(n: int) -> None:
        # Every other call overwrites.
        step, numbers = n // 2, it.numbers()
        before = it.held.get(step, [None])
        it.held[step] = [*before, numbers]
        run.save(model(numbers), step, overwrite=True)
        it.held[step] = [numbers]

    return act


def loading(it: Interrupted) -> Callable[[int], None]:
    run = TensorCasStore(it.root, "run", Plain())
    it.held[0] = [it.numbers()]
    run.save(model(it.held[0][0] or []), 0)

    def act(n: int) -> None:
        # By an object that knows nothing yet every other time.
        reader = run if n % 2 else TensorCasStore(it.root, "run", Plain())
        assert numbers_in(reader.load(0)) == it.held[0][0]

    return act


def collecting(it: Interrupted) -> Callable[[int], None]:
    run = TensorCasStore(it.root, "run", Plain())

    def act(n: int) -> None:
        numbers = it.numbers()
        it.held[n] = [None, numbers]
        run.save(model(numbers), n)
        it.held[n] = [numbers]
        gone = it.draw.choice(list(it.held))
        it.held[gone] = [*it.held[gone], None]
        run.delete_checkpoint(gone)
        it.held[gone] = [None]
        plan_gc(run.store, grace_s=3600, max_waste=0).execute()

    return act


def uploading(it: Interrupted) -> Callable[[int], None]:
    from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

    repo = TensorCasArtifactRepository(f"tensorcas://{it.root.removeprefix('tensorcas://')}")
    source, out = it.folder / "file", it.folder / "out"

    def act(n: int) -> None:
        data = b"".join(array.tobytes() for array in model(it.numbers()).values())
        source.write_bytes(data)
        repo.log_artifact(str(source), "folder")
        repo._download_file("folder/file", str(out))
        assert out.read_bytes() == data

    return act


def logging_(it: Interrupted, *, blocking: bool) -> Callable[[int], None]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{it.folder}/mlflow.db")
    location = f"tensorcas://{it.root.removeprefix('tensorcas://')}/logged"
    run = mlflow.start_run(experiment_id=mlflow.create_experiment("logged", artifact_location=location))

    def act(n: int) -> None:
        numbers = it.numbers()
        it.held[n] = [None, numbers]
        mlflow.tensorcas.log_checkpoint(
            model(numbers), step=n, run_id=run.info.run_id, blocking=blocking, log_metrics=False
        )
        if blocking:
            it.held[n] = [numbers]

    return act


WAYS: dict[str, Callable[[Interrupted], Callable[[int], None]]] = {
    "save": saving,
    "load": loading,
    "collect": collecting,
    "upload": uploading,
    "log": lambda it: logging_(it, blocking=True),
    "log in the background": lambda it: logging_(it, blocking=False),
}


def sender_of_interrupt(seconds: float) -> tuple[threading.Thread, Callable[[], object]]:
    """A thread that sends this process a SIGINT so long after it was told to; and how to tell it."""
    reading, writing = os.pipe()

    def send() -> None:
        os.read(reading, 1)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
        os.close(reading)
        os.close(writing)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread, lambda: os.write(writing, b".")


def wrong(it: Interrupted) -> list[str]:
    store = Store.open(it.root)
    found: dict[int | None, Any] = {
        ref.step: numbers_in(store.read_tensors(store.manifest(ref)))
        for ref in store.checkpoints()
        if ref.kind == "checkpoint"
    }
    return [
        f"step {step} is {found.get(step)} and should be one of {values}"
        for step, values in it.held.items()
        if found.get(step) not in values
    ]


def main() -> None:
    way, seconds, folder, root = sys.argv[1:]
    ignored: list[str] = []
    sys.unraisablehook = lambda what: ignored.append(f"{what.exc_value!r} in {what.object!r}")
    it = Interrupted(folder=Path(folder), root=root)
    act = WAYS[way](it)
    took: list[float] = []
    for n in range(N_WARM):
        began = time.perf_counter()
        act(n)
        took.append(time.perf_counter() - began)
    n_sent = n_caught = 0
    until = time.monotonic() + float(seconds)
    n = N_WARM
    while time.monotonic() < until:
        n += 1
        n_ignored = len(ignored)
        sender, go = sender_of_interrupt(it.draw.uniform(0, 1.3 * min(took)))
        try:
            go()
            act(n)
            sender.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            n_caught += 1
        sender.join()
        time.sleep(0.001)
        n_sent += 1
        if len(ignored) > n_ignored:
            n_sent -= 1  # the interpreter itself has lost it, in a destructor
    if way == "log in the background":
        import mlflow

        mlflow.tensorcas.wait()
    print(json.dumps({"sent": n_sent, "caught": n_caught, "ignored": ignored, "wrong": wrong(it)}))


if __name__ == "__main__":
    main()
