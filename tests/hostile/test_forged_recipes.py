"""Recipes that somebody has forged: whole in themselves, under the right digest, and they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import NewerFormatError, TensorCasError
from tensorcas_mlflow.layout import Derivation, Manifest, Ref, RefTarget, Row, find_strangers, pack_key, recipe_key
from tensorcas_mlflow.maintenance import (
    _gc,
    copy_refs,
    plan_gc,
    plan_optimize,
    plan_repair,
    read_source,
    store_stats,
    verify,
)
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import (
    condemned_bytes,
    declare,
    full_payload,
    list_packs,
    read_pack_table,
    write_packs,
)
from tests.layout.test_recipe import named, with_head
from tests.pairs import pairs_of

CHUNK_BYTES = 4096
Array = np.ndarray[Any, Any]


def square(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (64, 64), dtype=np.uint8)


A, X = square(1), square(2)
TRANSPOSED: Array = np.ascontiguousarray(A.T)
UNKNOWN = square(9)
"""A chunk that no store holds."""
TENSORS: Mapping[str, Array] = {"a": A, "transposed": TRANSPOSED, "x": X}
"""One checkpoint, and one pack, for each."""


def row(array: Array, shape: tuple[int, ...] = (64, 64)) -> Row:
    digests = np.frombuffer(digest(array.tobytes()), np.uint8).reshape(1, -1)
    return Row(spec=Spec(name="", dtype="uint8", shape=shape), cuts=None, digests=digests)


def recipe(*made: tuple[Array, Array], axes: Sequence[int] = (1, 0), kind: Any = "recipe") -> Manifest:
    """The recipe that says that each first array is the transposed second one."""
    return Manifest(
        kind=kind,
        chunk_bytes=CHUNK_BYTES,
        store_id="5" * 32,
        flavor=None,
        rows=[row(product) for product, _ in made],
        inputs=[row(source) for _, source in made],
        derived=tuple(Derivation(at, "permute", {"axes": list(axes)}, (len(made) + at,)) for at, _ in enumerate(made)),
    )


def large() -> Manifest:
    """The recipe that says that a chunk is a small part of 64 MiB, of which the store has 4 KiB."""
    n_bytes = 64 << 20
    return Manifest(
        kind="recipe",
        chunk_bytes=n_bytes,
        store_id="5" * 32,
        flavor=None,
        rows=[row(X)],
        inputs=[row(A, (n_bytes // 64, 64))],
        derived=(Derivation(0, "slice", {"axis": 0, "start": 7}, (1,)),),
    )


CYCLES: dict[str, Callable[[], Sequence[Manifest]]] = {
    "of itself": lambda: [recipe((A, A), axes=(0, 1))],
    "of each other in one recipe": lambda: [recipe((A, TRANSPOSED), (TRANSPOSED, A))],
    "of each other in two recipes": lambda: [recipe((A, TRANSPOSED)), recipe((TRANSPOSED, A))],
    "a ring of lies": lambda: [recipe((X, A)), recipe((TRANSPOSED, X)), recipe((A, TRANSPOSED))],
    "a chain": lambda: [recipe((TRANSPOSED, A)), recipe((A, UNKNOWN)), recipe((UNKNOWN, X))],
}
LIES: dict[str, Callable[[], Sequence[Manifest]]] = {
    "other bytes": lambda: [recipe((X, A))],
    "other bytes beside the right ones": lambda: [recipe((X, A), (TRANSPOSED, A))],
    "of what is nowhere": lambda: [recipe((X, UNKNOWN))],
    "of 64 MiB": lambda: [large()],
}
FORGED = CYCLES | LIES


class Forged:
    """A store of three checkpoints, and forged recipes."""

    def __init__(self, recipes: Sequence[Manifest], backend: MemoryBackend | LocalBackend | None = None) -> None:
        self.backend = backend or MemoryBackend()
        store = Store.init_backend(self.backend, chunk_bytes=CHUNK_BYTES, store_id="5" * 32)
        self.refs: dict[str, Ref] = {}
        self.packs: dict[str, str] = {}
        for step, (name, array) in enumerate(TENSORS.items()):
            before = {pack for pack, _ in list_packs(self.backend)}
            with store.write_checkpoint({"w": array}) as pending:
                self.refs[name] = pending.commit(RefTarget(run_id="run", step=step))
            [self.packs[name]] = {pack for pack, _ in list_packs(self.backend)} - before
        for number, each in enumerate(recipes):
            self.backend.put_new(recipe_key(f"{each.digest}.{number:08x}"), [each.to_blob()])

    def lose(self, *names: str) -> Forged:
        """Delete the packs of some checkpoints."""
        for name in names:
            self.backend.delete(pack_key(self.packs[name]))
        return self

    def opened(self) -> Store:
        return Store.open_backend(self.backend)

    def load(self, name: str, *, checks: bool = True) -> Array:
        store = self.opened()
        return store.read_tensors(store.manifest(self.refs[name]), verify=checks)["w"]

    def check_loads(self, *names: str) -> None:
        for name in names or TENSORS:
            assert self.load(name).tobytes() == TENSORS[name].tobytes(), name

    def held(self) -> set[bytes]:
        packs = [name for name, _ in list_packs(self.backend)]
        return {entry["digest"].tobytes() for name in packs for entry in read_pack_table(self.backend, name)}


def collect(store: Store) -> None:
    plan_gc(store, grace_s=0, max_waste=0).execute()


def copy(store: Store) -> None:
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    refs, _ = read_source(store)
    copy_refs(store, other, refs)


def save_again(store: Store) -> None:
    for step, array in enumerate(TENSORS.values()):
        with store.write_checkpoint({"w": array}) as pending:
            pending.commit(RefTarget(run_id="again", step=step))


OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "verify": lambda store: verify(store, full=True),
    "verify quickly": verify,
    "verify a sample": lambda store: verify(store, sample=1.0),
    "collect": collect,
    "optimize": lambda store: plan_optimize(store).execute(),
    "optimize for restore": lambda store: plan_optimize(store, for_restore=True).execute(),
    "repair": lambda store: plan_repair(store).execute(),
    "copy": copy,
    "save again": save_again,
    "count": store_stats,
}


LOST = [[], ["a"], ["x"], ["transposed"], ["a", "transposed"], list(TENSORS)]


@pytest.mark.parametrize(("name", "lost", "checks"), pairs_of(FORGED, LOST, [True, False]))
def test_reader_of_forged_recipes_gives_the_right_bytes_or_an_error(name: str, lost: list[str], checks: bool) -> None:
    forged = Forged(FORGED[name]()).lose(*lost)

    for each, array in TENSORS.items():
        try:
            found = forged.load(each, checks=checks)
        except TensorCasError:
            assert each in lost
        else:
            assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(("name", "operation", "lost"), pairs_of(FORGED, OPERATIONS, LOST))
def test_every_user_of_forged_recipes_terminates(name: str, operation: str, lost: list[str]) -> None:
    forged = Forged(FORGED[name]()).lose(*lost)

    with suppress(TensorCasError):
        OPERATIONS[operation](forged.opened())

    for each, array in TENSORS.items():
        with suppress(TensorCasError):
            assert forged.load(each).tobytes() == array.tobytes()


@pytest.mark.parametrize("operation", ["collect", "optimize", "repair", "copy", "save again"])
@pytest.mark.parametrize("name", CYCLES)
def test_cycle_of_recipes_keeps_every_chunk_in_a_pack(name: str, operation: str) -> None:
    forged = Forged(CYCLES[name]())
    for act in (OPERATIONS[operation], collect, collect):
        act(forged.opened())
        forged.check_loads()
    assert plan_gc(forged.opened(), grace_s=0, max_waste=0).is_empty


@pytest.mark.parametrize("name", ["of itself", "of each other in one recipe", "of each other in two recipes"])
def test_verification_finds_what_a_cycle_of_recipes_cannot_make(name: str) -> None:
    forged = Forged(CYCLES[name]()).lose("a", "transposed")

    for full in (False, True):
        problems = verify(forged.opened(), full=full).problems
        assert {each.checkpoint for each in problems} == {"run run step 0", "run run step 1"}


def test_full_verification_finds_a_recipe_that_lies_about_the_only_copy() -> None:
    forged = Forged([recipe((X, A))]).lose("x")

    of_recipe, of_checkpoint = verify(forged.opened(), full=True).problems

    assert (of_recipe.checkpoint, of_checkpoint.checkpoint) == (None, "run run step 2")
    assert of_recipe.key == of_checkpoint.key
    assert str(of_recipe.key).startswith("recipes/")


def test_recipe_whose_input_is_nowhere_deletes_no_copy() -> None:
    forged = Forged([recipe((X, UNKNOWN))])

    collect(forged.opened())

    forged.check_loads()


def test_recipe_whose_input_is_lost_deletes_no_copy() -> None:
    """A checkpoint still names the input, so the store knows of it."""
    forged = Forged([recipe((TRANSPOSED, A))]).lose("a")

    collect(forged.opened())

    forged.check_loads("transposed")


def test_recipe_whose_input_is_damaged_gives_no_other_bytes() -> None:
    forged = Forged([recipe((TRANSPOSED, A))]).lose("transposed")
    key = pack_key(forged.packs["a"])
    blob = bytearray(forged.backend.get(key))
    blob[100] ^= 1
    forged.backend.delete(key)
    forged.backend.put_new(key, [bytes(blob)])

    with pytest.raises(TensorCasError):
        forged.load("transposed", checks=False)


@pytest.mark.parametrize("checks", [True, False])
def test_reader_finds_a_copy_that_the_index_does_not_name_though_a_recipe_lies(checks: bool) -> None:
    forged = Forged([recipe((X, A))])
    for info in list(forged.backend.list("index")):
        forged.backend.delete(info.key)

    assert forged.load("x", checks=checks).tobytes() == X.tobytes()


@pytest.mark.parametrize("is_dropped", [False, True], ids=["input in use", "input of a dropped checkpoint"])
@pytest.mark.parametrize("operation", ["collect", "optimize"])
def test_recipe_that_lies_deletes_no_copy(operation: str, is_dropped: bool) -> None:
    """The recipe says that X is the transposed A. Both exist; a collection evaluates the recipe, and keeps X."""
    forged = Forged([recipe((X, A))])
    if is_dropped:
        forged.opened().drop(forged.refs["a"])

    OPERATIONS[operation](forged.opened())

    assert digest(X.tobytes()) in forged.held()
    forged.check_loads("x")


def test_recipe_that_lies_stands_for_no_chunk_that_comes_to_be_needed_after_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recipe is right about one chunk, so it stays. Nobody needs the other one when recipes are evaluated."""
    forged = Forged([recipe((TRANSPOSED, A), (X, A))])
    forged.opened().drop(forged.refs["x"])
    plan = plan_gc(forged.opened(), grace_s=0)
    assert forged.packs["x"] in plan.packs
    condemn = _gc._condemn

    def after_another_save(*args: Any) -> str:
        store = forged.opened()
        with store.write_checkpoint({"w": X}) as pending:
            forged.refs["x"] = pending.commit(RefTarget(run_id="again", step=0))
        return condemn(*args)

    monkeypatch.setattr(_gc, "_condemn", after_another_save)
    report = plan.execute()

    assert report.n_spared == 1
    assert digest(TRANSPOSED.tobytes()) not in forged.held()
    forged.check_loads()


def test_recipe_that_lies_stands_for_no_chunk_whose_other_copy_somebody_condemns_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save that has declared the chunk commits, so that the recipe would do. Nobody has evaluated it."""
    forged = Forged([recipe((TRANSPOSED, A), (X, A))])
    store = forged.opened()
    raw = X.tobytes()
    write_packs(store.backend, store.catalog, iter([full_payload(digest(raw), raw, 1, begins_row=True)]))
    chunks = np.frombuffer(digest(raw), np.uint8).reshape(1, -1)
    intent = declare(store.backend, f"{'0' * 64}.{'a' * 8}", chunks, set())
    plan = plan_gc(forged.opened())
    copies = {name for name, _ in list_packs(forged.backend)} - {forged.packs["a"], forged.packs["transposed"]}
    [other] = copies - plan.packs.keys()
    condemn = _gc._condemn

    def beside_another(*args: Any) -> str:
        store.backend.withdraw(*intent, own=())
        forged.backend.put_new(f"condemned/{'a' * 32}", [condemned_bytes(frozenset({other}), frozenset())])
        return condemn(*args)

    monkeypatch.setattr(_gc, "_condemn", beside_another)
    report = plan.execute()

    assert report.n_spared == 1
    forged.backend.delete(pack_key(other))
    forged.check_loads()


def test_full_verification_finds_a_recipe_that_lies_before_a_collection_trusts_it() -> None:
    forged = Forged([recipe((X, A))])

    assert verify(forged.opened(), full=True).problems != ()


DAMAGED: dict[str, Callable[[], tuple[str, bytes]]] = {
    "empty": lambda: (named(b"?"), b""),
    "noise": lambda: (named(UNKNOWN.tobytes()), UNKNOWN.tobytes()),
    "a wrong digest": lambda: (named(b"?"), recipe((X, A)).to_blob()),
    "truncated": lambda: (f"{recipe((X, A)).digest}.{'0' * 8}", recipe((X, A)).to_blob()[:-9]),
    "a checkpoint": lambda: _named(_checkpoint()),
    "an unknown function": lambda: _with_head(derived=[[0, "sine", {}, [1], None]]),
    "a row that is not derived": lambda: _with_head(derived=[]),
    "format 1": lambda: _with_head(format=1),
}


def _checkpoint() -> Manifest:
    return Manifest(kind="checkpoint", chunk_bytes=CHUNK_BYTES, store_id="5" * 32, flavor=None, rows=[row(X)])


def _named(manifest: Manifest) -> tuple[str, bytes]:
    return f"{manifest.digest}.{'0' * 8}", manifest.to_blob()


def _with_head(**changes: Any) -> tuple[str, bytes]:
    stream = with_head(recipe((X, A)), **changes)
    return named(stream), stream


@pytest.mark.parametrize(("name", "operation", "lost"), pairs_of(DAMAGED, OPERATIONS, [[], ["x"]]))
def test_every_user_of_damaged_recipes_terminates_and_loses_nothing(name: str, operation: str, lost: list[str]) -> None:
    forged = Forged([]).lose(*lost)
    key, blob = DAMAGED[name]()
    forged.backend.put_new(recipe_key(key), [blob])

    with suppress(TensorCasError):
        OPERATIONS[operation](forged.opened())

    forged.check_loads(*(each for each in TENSORS if each not in lost))
    if lost and operation != "save again":
        with pytest.raises(TensorCasError):
            forged.load("x")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_recipe_is_found_and_put_into_quarantine(name: str) -> None:
    forged = Forged([])
    key, blob = DAMAGED[name]()
    forged.backend.put_new(recipe_key(key), [blob])

    assert recipe_key(key) in {each.key for each in verify(forged.opened()).problems}
    report = plan_repair(forged.opened()).execute()

    assert report.recipes_gone == (recipe_key(key),)
    [piece] = forged.backend.list("quarantine")
    assert forged.backend.get(piece.key).endswith(blob)
    collect(forged.opened())
    forged.check_loads()


@pytest.mark.parametrize("operation", ["verify", "collect", "optimize", "repair"])
def test_recipe_of_a_later_release_stops_maintenance(operation: str) -> None:
    forged = Forged([])
    key, blob = _with_head(format=99)
    forged.backend.put_new(recipe_key(key), [blob])
    before = forged.held()

    with pytest.raises(NewerFormatError, match="recipes/"):
        OPERATIONS[operation](forged.opened())

    assert forged.held() == before
    assert forged.backend.stat(recipe_key(key)) is not None
    forged.check_loads()


def test_reader_of_a_missing_chunk_names_the_recipe_of_a_later_release() -> None:
    forged = Forged([]).lose("x")
    key, blob = _with_head(format=99)
    forged.backend.put_new(recipe_key(key), [blob])

    with pytest.raises(NewerFormatError, match="recipes/"):
        forged.load("x")


def test_foreign_files_below_recipes_are_left_alone(tmp_path: Any) -> None:
    forged = Forged([recipe((TRANSPOSED, A))], LocalBackend(tmp_path))
    folder = forged.backend.root / "recipes"  # type: ignore[union-attr]
    strangers = ["notes.txt", ".DS_Store", f"{'0' * 64}.tmp", f"{'F' * 64}"]
    for name in strangers:
        (folder / name).write_bytes(b"notes")

    assert find_strangers(forged.backend) == tuple(sorted(f"recipes/{name}" for name in strangers))
    plan = plan_gc(forged.opened(), grace_s=0, max_waste=0)
    plan.execute()
    plan_repair(forged.opened()).execute()

    assert plan.strangers == tuple(sorted(f"recipes/{name}" for name in strangers))
    assert digest(TRANSPOSED.tobytes()) not in forged.held()
    forged.check_loads()
    assert verify(forged.opened(), full=True).problems == ()
    assert all((folder / name).read_bytes() == b"notes" for name in strangers)
