"""Stores in a folder and in a bucket whose saves are counted: every byte that a save adds, and every request."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.data import Array, same_bytes
from benchmarks.harness import disk_bytes
from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.backends.objects.proxy import Proxy, proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server, localstack, moto

BESIDE_PACKS = 8
"""Requests of a save into a bucket besides those for its packs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Growth of a store, and the requests that made it."""

    n_bytes: int
    """Of all files or objects of the store."""
    n_requests: int = 0
    n_packs: int = 0
    """Uploads of packs, which are among the requests."""
    n_saves: int = 1

    @property
    def n_beside_packs(self) -> float:
        """Requests of one save besides those for packs."""
        return (self.n_requests - self.n_packs) / self.n_saves

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            n_bytes=self.n_bytes + other.n_bytes,
            n_requests=self.n_requests + other.n_requests,
            n_packs=self.n_packs + other.n_packs,
            n_saves=self.n_saves + other.n_saves,
        )


class Place(ABC):
    """A new store. It keeps what was saved into it, to compare all of it at the end."""

    kind: str
    """Name in tables."""

    def __init__(self, uri: str, elsewhere: ProcessPoolExecutor) -> None:
        self.uri = uri
        self._elsewhere = elsewhere
        self._stores: dict[str, TensorCasStore] = {}
        self._repositories: list[Any] = []
        self._states: dict[tuple[str, int], Mapping[str, Array]] = {}
        self._files: dict[str, bytes] = {}

    @abstractmethod
    def cost(self, act: Callable[[], object]) -> Cost:
        """Do something to the store and count."""

    def save(self, run: str, step: int, state: Mapping[str, Array]) -> Cost:
        """Save a checkpoint in this process. Opening the store is not counted."""
        self._states[run, step] = state
        if run not in self._stores:
            self._stores[run] = TensorCasStore(self.uri, run)
        return self.cost(lambda: self._stores[run].save(dict(state), step))

    def save_elsewhere(self, run: str, state: Mapping[str, Array]) -> None:
        """Save a checkpoint in another process, of which this one knows nothing."""
        self._states[run, 0] = state
        self._elsewhere.submit(_save, self.uri, run, dict(state)).result()

    def log(self, folder: str, write: Callable[[Path], object], suffix: str) -> Cost:
        """Log a file into a folder of artifacts, as MLflow does below such a location.

        Args:
            folder: The folder; the store must have no file in it.
            write: Writes the file.
            suffix: The end of the file's name.
        """
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, f"model{suffix}")
            write(path)
            self._files[f"{folder}/{path.name}"] = path.read_bytes()
            if not self._repositories:
                self._repositories.append(_artifacts(self.uri))
            return self.cost(lambda: self._repositories[0].log_artifact(str(path), folder))

    def size_of(self, folder: str) -> int:
        """Return the bytes of the file in a folder of artifacts."""
        return sum(len(data) for path, data in self._files.items() if path.startswith(f"{folder}/"))

    def check(self) -> None:
        """Read everything back, and compare it bit for bit.

        Raises:
            AssertionError: Something came back otherwise.
        """
        for (run, step), state in self._states.items():
            found = TensorCasStore(self.uri, run).load_tensors(step)
            found.pop(SKELETON, None)
            if not same_bytes(found, state):
                raise AssertionError(f"step {step} of {run!r} came back otherwise")
        for path, data in self._files.items():
            with tempfile.TemporaryDirectory() as scratch:
                if Path(_artifacts(self.uri).download_artifacts(path, scratch)).read_bytes() != data:
                    raise AssertionError(f"{path!r} came back otherwise")


class Folder(Place):
    """A store in a folder."""

    kind = "folder"

    def __init__(self, path: Path, elsewhere: ProcessPoolExecutor) -> None:
        super().__init__(f"tensorcas://{path}", elsewhere)
        self.path = path

    def cost(self, act: Callable[[], object]) -> Cost:
        before = disk_bytes(self.path)
        act()
        return Cost(n_bytes=disk_bytes(self.path) - before)


class InBucket(Place):
    """A store in a bucket, behind a proxy that counts requests."""

    kind = "bucket"

    def __init__(self, server: S3Server, way: Proxy, bucket: str, elsewhere: ProcessPoolExecutor) -> None:
        super().__init__(f"tensorcas-s3://{bucket}/root", elsewhere)
        self._client = server.client()
        self._way = way
        self._bucket = bucket

    def cost(self, act: Callable[[], object]) -> Cost:
        before = sum(self._objects().values())
        self._way.forget()
        act()
        traffic = self._way.traffic()
        n_packs = sum("/packs/" in it.path for it in traffic.of(Kind.PUT, Kind.CREATE).exchanges)
        grown = sum(self._objects().values()) - before
        return Cost(n_bytes=grown, n_requests=traffic.n_billed, n_packs=n_packs)

    def clear(self) -> None:
        """Delete all objects."""
        for key in self._objects():
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def _objects(self) -> dict[str, int]:
        """Return the sizes of all objects by key, asked for beside the proxy."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket)
        return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}


class Places:
    """Makes new stores of both kinds."""

    def __init__(self, scratch: Path, server: S3Server, way: Proxy, elsewhere: ProcessPoolExecutor) -> None:
        self._scratch = scratch
        self._server = server
        self._way = way
        self._elsewhere = elsewhere
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def folder(self) -> Iterator[Place]:
        """Give a store in a new folder, for the duration of a block."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as path:
            yield Folder(Path(path), self._elsewhere)

    @contextlib.contextmanager
    def bucket(self) -> Iterator[Place]:
        """Give a store in a new bucket, for the duration of a block."""
        name = self._server.make_bucket(f"deltas-{next(self._numbers)}")
        place = InBucket(self._server, self._way, name, self._elsewhere)
        yield place
        place.clear()


@contextlib.contextmanager
def places(scratch: Path) -> Iterator[tuple[Places, str]]:
    """Start a server, the proxy in front of it and another process, for the duration of a block.

    Yields:
        The places, and the name of the server: LocalStack's if ``make object-servers`` has installed it, else moto's.
    """
    with contextlib.ExitStack() as stack:
        try:
            server, name = stack.enter_context(localstack()), "LocalStack"
        except FileNotFoundError:
            server, name = stack.enter_context(moto()), "moto"
        way = stack.enter_context(proxy(server.endpoint))
        cache = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch))
        settings = {**server.at(way.endpoint).environment, "TENSORCAS_CACHE": cache}
        stack.enter_context(mock.patch.dict("os.environ", settings))
        # It inherits the environment at its first task.
        elsewhere = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        yield Places(scratch, server, way, elsewhere), name


def _save(uri: str, run: str, state: dict[str, Array]) -> None:
    TensorCasStore(uri, run).save(state, 0)


def _artifacts(uri: str) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(uri)
