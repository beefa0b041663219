"""``init``, ``delete`` and ``gc`` on a real store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store

Tensorcas = Callable[..., Any]


def save(store: Store, step: int, name: str | None = None) -> None:
    with store.write_checkpoint({"w": np.random.default_rng(step).normal(size=1000)}) as pending:
        pending.commit(RefTarget(run_id="run", step=step, name=name))


def pack_bytes(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs"))


def keys(store: Store) -> list[str]:
    return [ref.key for ref in store.checkpoints()]


def steps(store: Store) -> list[Any]:
    return [ref.step for ref in store.checkpoints()]


@pytest.fixture
def garbage(place: str) -> Store:
    """A store of two steps, one of them dropped."""
    store = Store.init(place)
    save(store, 1)
    save(store, 2)
    store.drop(store.checkpoints()[0])
    return store


# --- init


@pytest.mark.parametrize("words", [["init", "ROOT"], ["init", "--root", "ROOT"], ["--root", "ROOT", "init"]])
def test_init_makes_a_store_once(tensorcas: Tensorcas, place: str, words: list[str]) -> None:
    words = [word.replace("ROOT", place) for word in words]
    first, second = tensorcas(*words, "--chunk-bytes", "65536"), tensorcas(*words)

    assert (first.status, second.status) == (0, 1)
    assert Store.open(place).chunk_bytes == 65536
    assert "already a store" in second.err


def test_init_without_a_place_makes_a_store_at_the_default_place(
    tensorcas: Tensorcas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = tensorcas("init", "--json").json

    assert made == {"store": Store.open(tmp_path).uri, "id": Store.open(tmp_path).id, "chunk_bytes": 262144}


def test_init_refuses_two_places(tensorcas: Tensorcas, tmp_path: Path) -> None:
    done = tensorcas("init", tmp_path / "a", "--root", tmp_path / "b")

    assert done.status == 2
    assert list(tmp_path.iterdir()) == []


# --- delete


def test_delete_says_which_bytes_a_collection_leaves_to_an_optimization(tensorcas: Tensorcas, place: str) -> None:
    store = Store.init(place, chunk_bytes=4096)
    draw = np.random.default_rng(0)
    shared = draw.normal(size=10_000).astype(np.float32)
    for step in (1, 2):
        shared = shared + np.float32(1e-5) * draw.normal(size=10_000).astype(np.float32)
        own = draw.normal(size=20_000).astype(np.float32)
        with store.write_checkpoint({"shared": shared, f"own-{step}": own}, series="run") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    before = pack_bytes(store)
    done = tensorcas("delete", "--run", "run", "--step", "1", "--yes", "--root", store.uri)
    bound_bytes = tensorcas("gc", "--dry-run", "--json", "--root", store.uri).json["plan"]["bound_bytes"]
    collected = tensorcas("gc", "--yes", "--root", store.uri)
    after_gc = pack_bytes(store)
    tensorcas("optimize", "--yes", "--root", store.uri)

    is_local = ":" not in place
    said = re.search(r"frees up to [\d.]+ K?B, and `tensorcas optimize` about [67]\d\.\d KB more", done.out)
    assert (said is not None) == is_local  # a bucket is not asked for it
    assert "a collection then frees up to " in done.out
    assert re.search(r"[67]\d\.\d KB stay in packs that deltas of other checkpoints need", collected.out)
    assert 60_000 < bound_bytes < 80_000
    assert plan_gc(Store.open(place)).bound_bytes == 0
    assert after_gc == before
    assert pack_bytes(store) < before - 60_000


def test_delete_needs_no_collection_that_can_run(tensorcas: Tensorcas, store: Store) -> None:
    store.backend.put_new("condemned/" + "0" * 32, [b"damage"])

    assert tensorcas("gc", "--dry-run", "--root", store.uri).status == 1
    done = tensorcas("delete", "--run", "train", "--step", "1", "--yes", "--root", store.uri)
    assert done.status == 0, done.err
    assert "a collection then frees up to " in done.out


def test_delete_drops_one_step_after_a_yes(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("delete", "--run", "train", "--step", "1", "--root", store.uri, typed="y\n")

    assert done.status == 0
    size = r"1\.\d KB|7\d\d B|0 B"  # garbage in records of a database stays until there are 4 KiB of it
    assert re.fullmatch(rf"Delete run train step 1\? A collection then frees up to ({size})\. \[y/N\] ", done.err)
    assert "deleted run train step 1" in done.out
    assert [ref.step for ref in store.checkpoints() if ref.run_id == "train"] == [2, 3, 3]


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yep\n"])
def test_delete_without_a_yes_deletes_nothing(tensorcas: Tensorcas, store: Store, answer: str) -> None:
    before = keys(store)
    for told in ({"typed": answer}, {"piped": answer}):
        done = tensorcas("delete", "--run", "train", "--step", "1", "--root", store.uri, **told)

        assert (done.status, done.out) == (0, "nothing was deleted\n")
    assert keys(store) == before


def test_delete_with_yes_does_not_ask(tensorcas: Tensorcas, store: Store) -> None:
    words = ["delete", "--run", "other", "--step", "1", "--name", "ema", "--yes", "--root", store.uri]
    done = tensorcas(*words, "--json")

    assert (done.status, done.err) == (0, "")
    assert (done.json["deleted"], done.json["checkpoints"][0]["name"]) == (True, "ema")
    assert tensorcas(*words).status == 1


def test_delete_refuses_a_step_of_several_checkpoints(tensorcas: Tensorcas, store: Store) -> None:
    before = keys(store)
    done = tensorcas("delete", "--run", "train", "--step", "3", "--yes", "--root", store.uri)

    assert done.status == 1
    assert "give --name as well" in done.err
    assert keys(store) == before


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--step", "1", "--step", "2"],
        ["--run", "train", "--steps", "1", "2"],
        ["train", "--step", "1", "--steps", "2", "1"],
        ["--steps", "1", "2", "--run", "train"],
    ],
)
def test_delete_drops_all_steps_that_are_named(tensorcas: Tensorcas, store: Store, words: list[str]) -> None:
    done = tensorcas("delete", *words, "--yes", "--root", store.uri, "--json")

    assert (done.status, done.json["deleted"]) == (0, True)
    assert [each["step"] for each in done.json["checkpoints"]] == [1, 2]
    assert [ref.step for ref in store.checkpoints() if ref.run_id == "train"] == [3, 3]


def test_delete_deletes_nothing_if_one_of_several_steps_is_missing(tensorcas: Tensorcas, store: Store) -> None:
    before = keys(store)
    done = tensorcas("delete", "train", "--steps", "1", "2", "77", "--yes", "--root", store.uri)

    assert done.status == 1
    assert "77" in done.err
    assert keys(store) == before


def test_delete_of_a_logged_model_warns_that_mlflow_still_lists_it(tensorcas: Tensorcas, store: Store) -> None:
    words = ["delete", "--run", "train", "--step", "3", "--name", "m-1", "--root", store.uri]
    done = tensorcas(*words, typed="n\n")

    assert "the logged model m-1: MLflow will still list it and not load it" in done.err


def test_delete_keeps_a_checkpoint_saved_while_it_asked(
    tensorcas: Tensorcas, garbage: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            garbage.drop(garbage.checkpoints()[0])
            save(garbage, 2)
            return "y\n"

    monkeypatch.setattr("io.StringIO", lambda *_: Slow())
    done = tensorcas("delete", "--run", "run", "--step", "2", "--root", garbage.uri)

    assert done.status == 1
    assert "saved again in the meantime" in done.err
    assert steps(garbage) == [2]


# --- gc


def test_gc_prints_its_plan_asks_and_reports(tensorcas: Tensorcas, garbage: Store) -> None:
    done = tensorcas("gc", "--root", garbage.uri, typed="yes\n")

    assert done.status == 0
    plan, report = done.out.splitlines()
    assert "1 pack to delete" in plan
    assert "deleted 1 pack and 1 manifest," in report
    [size] = re.findall(r"frees (about .*?) of .*? on disk", plan)
    assert done.err == f"Delete this, and free {size}? [y/N] "
    assert steps(garbage) == [2]


@pytest.mark.parametrize("told", [{"typed": "n\n"}, {"typed": ""}, {"piped": ""}])
def test_gc_without_a_yes_deletes_nothing(tensorcas: Tensorcas, garbage: Store, told: dict[str, str]) -> None:
    before = pack_bytes(garbage)
    done = tensorcas("gc", "--root", garbage.uri, **told)

    assert done.status == 0
    assert done.out.splitlines()[-1] == "nothing was deleted"
    assert pack_bytes(garbage) == before > 0


def test_gc_with_nothing_to_delete_does_not_ask(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("gc", "--root", store.uri)

    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[-1].startswith("deleted 0 packs and 0 manifests")


def test_gc_dry_run_prints_the_plan_and_stops(tensorcas: Tensorcas, garbage: Store) -> None:
    before = pack_bytes(garbage)
    done = tensorcas("gc", "--dry-run", "--yes", "--root", garbage.uri)
    found = tensorcas("gc", "--dry-run", "--root", garbage.uri, "--json").json

    assert len(done.out.splitlines()) == 1
    assert (found["plan"]["n_packs"], found["plan"]["n_manifests"], found["report"]) == (1, 1, None)
    assert pack_bytes(garbage) == before


def test_gc_in_json_prints_one_document(tensorcas: Tensorcas, garbage: Store) -> None:
    done = tensorcas("gc", "--yes", "--root", garbage.uri, "--json")

    [why] = done.json["plan"]["why"]
    assert (why["reason"], len(why["packs"]), len(why["manifests"])) == ("deleted", 1, 1)
    assert why["packs_bytes"] == done.json["plan"]["packs_bytes"]
    assert (done.json["report"]["n_packs"], done.json["report"]["n_manifests"]) == (1, 1)
    most = 1024 if garbage.backend.has_database else 400  # the record of the round, in a database two pages
    assert abs(done.json["plan"]["freed_bytes"] - done.json["report"]["freed_bytes"]) <= most


def test_gc_keeps_what_a_save_within_the_grace_relies_on(tensorcas: Tensorcas, garbage: Store) -> None:
    with garbage.write_checkpoint({"w": np.random.default_rng(1).normal(size=1000)}) as pending:
        kept = tensorcas("gc", "--yes", "--root", garbage.uri, "--json").json
        tensorcas("gc", "--yes", "--grace", "0", "--root", garbage.uri)
        pending.commit(RefTarget(run_id="run", step=3))

    assert (kept["report"]["n_packs"], kept["report"]["n_withdrawn"]) == (0, 0)
    assert tensorcas("verify", "--full", "--root", garbage.uri).status == 0


def test_gc_rewrites_packs_above_max_waste(tensorcas: Tensorcas, place: str) -> None:
    store = Store.init(place)
    rng = np.random.default_rng(0)
    big, small = rng.normal(size=10_000), rng.normal(size=1_000)
    with store.write_checkpoint({"big": big, "small": small}) as pending:
        first = pending.commit(RefTarget(run_id="run", step=1))
    with store.write_checkpoint({"big": big}) as pending:
        pending.commit(RefTarget(run_id="run", step=2))
    store.drop(first)

    kept = tensorcas("gc", "--yes", "--root", place, "--json").json["report"]
    assert kept["n_packs"] == 0
    rewritten = tensorcas("gc", "--yes", "--max-waste", "0", "--root", place, "--json").json
    assert (rewritten["plan"]["n_rewrites"], rewritten["report"]["n_packs"]) == (1, 1)


@pytest.mark.parametrize("command", [["gc"], ["delete", "--run", "run", "--step", "2"]])
def test_json_without_a_terminal_and_yes_is_refused_at_once(
    tensorcas: Tensorcas, garbage: Store, command: list[str]
) -> None:
    before = pack_bytes(garbage)
    done = tensorcas(*command, "--root", garbage.uri, "--json", piped="y\n")

    assert (done.status, done.out) == (1, "")
    assert "--yes" in done.err
    assert (pack_bytes(garbage), steps(garbage)) == (before, [2])


def test_json_at_a_terminal_still_asks(tensorcas: Tensorcas, garbage: Store) -> None:
    done = tensorcas("gc", "--root", garbage.uri, "--json", typed="y\n")

    assert done.json["report"]["n_packs"] == 1
    assert done.err.startswith("Delete this, and free ")
