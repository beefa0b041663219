"""Actors that save through a carrier: the real one, on a shelf whose every call is a step of the run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.integration.server_store import CarrierBackend, Entry, Shelf
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store.protocol import FORMAT
from tests.protocol.casts import Cast, open_store, save
from tests.protocol.interleave import Run, WatchedBackend


class WatchedShelf(Shelf):
    """One actor's view of the backend in memory, as a server's artifact folder."""

    def __init__(self, backend: Backend) -> None:
        assert isinstance(backend, WatchedBackend)
        self._backend = backend
        self._memory = backend._run.memory

    def put(self, path: str, file: Path) -> None:
        data = file.read_bytes()

        def replace() -> None:
            self._memory.delete(path)
            self._memory.put_new(path, [data])

        self._backend._call("put", path, replace, path)

    def fetch(self, path: str, out: Path) -> None:
        out.write_bytes(self._backend._call("get", path, lambda: self._memory.get(path)))

    def head(self, path: str, n_bytes: int) -> bytes:
        return self._backend._call("get", path, lambda: self._memory.get(path))[:n_bytes]

    def entries(self, folder: str) -> list[Entry]:
        if folder == "":  # where nothing but `format` is looked for, which nobody ever changes
            return [Entry(name=FORMAT, size=len(self._memory.get(FORMAT)))]
        found = self._backend._call("list", folder, lambda: self._memory.list_dir(folder))
        files = [Entry(name=info.key.rpartition("/")[2], size=info.size) for info in found.facts()]
        return [*files, *(Entry(name=name, size=None) for name in sorted(found.segments))]

    def delete(self, path: str) -> None:
        self._backend._call("delete", path, lambda: self._memory.delete(path), path)


class CarrierCast(Cast):
    """A play in which somebody saves through a server."""

    def carrier_writer(self, name: str, letters: str, step: int) -> CarrierCast:
        def program(backend: Backend) -> None:
            save(open_store(CarrierBackend(WatchedShelf(backend), uri="mlflow-artifacts:/1")), letters, step)

        self.actors[name] = program
        self.may_hold.setdefault(step, set()).add(letters)
        self.saved_by[name] = step
        return self

    def abandoning_collector(self, name: str, *, max_waste: float = 0.3) -> CarrierCast:
        """Add a collector that is told to give up every save that is under way when it begins."""

        def program(backend: Backend) -> None:
            ids = [info.key.rpartition("/")[2] for info in backend.list("intents")]
            # It commits before the plan is made: then there is nothing to abandon.
            with suppress(ValueError):
                plan_gc(open_store(backend), grace_s=0, max_waste=max_waste, abandon=ids).execute()

        self.actors[name] = program
        return self

    def check(self, run: Run) -> str | None:
        self.abandons_in_the_end = True
        return super().check(run)
