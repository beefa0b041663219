"""Operations of a store over a faulty connection, and the checks that follow them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Root, _buckets, _open, open_backend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tests.backends.objects.faults import Fault, Late
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of

Model = dict[str, Array]

SILENCE_S = 0.5
"""Seconds for which the clients of these tests wait for an answer."""
LATE_S = 0.8
"""Longer than they wait, so that they have asked again when a late request arrives."""
_SETTLE_S = 0.3
"""Seconds that a late request takes once it is forwarded."""


def be_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buckets that are opened from now on wait and pause for a short time only."""
    soon = {"init_backoff": timedelta(milliseconds=2), "max_backoff": timedelta(milliseconds=20), "base": 2}
    monkeypatch.setattr(_open, "_SILENCE_S", SILENCE_S)
    monkeypatch.setattr(_open, "_RETRIES", _open._RETRIES | {"backoff": soon})
    monkeypatch.setattr(_buckets, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(_buckets, "_LONGEST_PAUSE_S", 0.05)


def reach(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find a server as users do, without a local cache."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", "off")


def model_of(seed: int, *, n_tensors: int = 3, n_bytes: int = 20_000) -> Model:
    """Tensors that no other seed has."""
    draw = np.random.default_rng(seed)
    return {f"layer.{n}": draw.integers(0, 256, n_bytes, dtype=np.uint8) for n in range(n_tensors)}


def save(store: Store, model: Model, step: int, *, replace: bool = True) -> Ref:
    with store.write_checkpoint(model) as pending:
        return pending.commit(RefTarget(run_id="run", step=step), replace=replace)


def are_equal(found: Model, model: Model) -> bool:
    return found.keys() == model.keys() and all(np.array_equal(found[name], model[name]) for name in model)


@dataclass
class Place:
    """A store in a bucket, reached past the proxy and through it."""

    server: S3Server
    way: Proxy
    bucket: str
    prefix: str
    models: dict[int, Model] = field(default_factory=dict)
    """The models that must exist, by step."""

    def direct(self) -> Store:
        """The store past the proxy, by an object that knows nothing of it yet."""
        return Store.open_backend(backend_of(self.server, self.bucket, f"{self.prefix}/.tensorcas"))

    def through(self) -> Store:
        """The store through the proxy, as users open it."""
        return Store.open_backend(open_backend(Root.parse(f"tensorcas-s3://{self.bucket}/{self.prefix}")))

    def keep(self, store: Store, step: int, model: Model) -> Ref:
        """Save a checkpoint that must be there from then on."""
        ref = save(store, model, step)
        self.models[step] = model
        return ref

    def objects(self, folder: str) -> list[str]:
        """Names of the objects below a folder of the store, whatever they say."""
        prefix = f"{self.prefix}/.tensorcas/{folder}/"
        found = self.server.client().list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", [])
        return [it["Key"].removeprefix(prefix) for it in found]

    def check(self) -> None:
        """See that all that must be there is, that nothing else stays, and that the store can be used."""
        store = self.direct()
        self._check_content(store)
        assert verify(store).problems == ()
        self.keep(store, 1000, model_of(1000))
        plan_gc(store, grace_s=0).execute()

        refs = store.checkpoints()
        assert list(store.backend.list("intents")) == []
        assert [info.key for info in store.backend.list("condemned")] in ([], ["condemned/@generation"])
        assert {info.key for info in store.backend.list("manifests")} == {f"manifests/{ref.manifest}" for ref in refs}
        plan = plan_gc(store, grace_s=0)
        assert plan.is_empty, f"{plan}, {plan!r}"
        self._check_content(self.direct())

    def _check_content(self, store: Store) -> None:
        found = {ref.step: store.read_tensors(store.manifest(ref)) for ref in store.checkpoints()}

        assert found.keys() == self.models.keys()
        assert all(are_equal(found[step], model) for step, model in self.models.items() if step is not None)

    def settle(self) -> None:
        """Wait until requests that were held back have arrived."""
        late = [it for it in self.way.traffic().exchanges if "Late" in (it.fault or "")]
        time.sleep(max([0.0, *(it.start_s + LATE_S + _SETTLE_S - time.monotonic() for it in late)]))


Prepare = Callable[[Place], Callable[[], None]]
"""Makes things ready past the proxy, and returns what is then to be done through it."""


class Trials:
    """Does one thing again and again, each time in a store of its own, while something goes wrong at one request."""

    def __init__(self, server: S3Server, way: Proxy, bucket: str) -> None:
        self._server = server
        self._way = way
        self._bucket = bucket
        self._n_places = 0

    def place(self) -> Place:
        """A new store."""
        self._n_places += 1
        place = Place(self._server, self._way, self._bucket, f"trial-{self._n_places}")
        Store.init_backend(backend_of(self._server, self._bucket, f"{place.prefix}/.tensorcas"))
        return place

    def n_requests(self, prepare: Prepare) -> int:
        """Return the number of requests of the operation without faults."""
        act = prepare(self.place())
        self._way.forget()
        act()
        return len(self._way.traffic())

    def each(self, prepare: Prepare, fault: Fault, *, every: int = 1, start: int = 1) -> Iterator[tuple[int, Place]]:
        """Do it once for each of its requests, at which the fault strikes; yields which it was, and where it was."""
        for nth in range(start, self.n_requests(prepare) + 1, every):
            place = self.place()
            act = prepare(place)
            self._way.forget()
            self._way.inject(fault, nth=nth)
            try:
                act()
            except BaseException as error:
                error.add_note(f"with {fault} at request {nth} of:\n{self._way.traffic()}")
                raise
            if isinstance(fault, Late):
                place.settle()
            self._way.calm()
            assert any(it.fault for it in self._way.traffic().exchanges), f"{fault} at request {nth} did not strike"
            yield nth, place
