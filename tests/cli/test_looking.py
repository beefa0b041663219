"""``list``, ``stats``, ``show``, ``diff`` and ``verify`` on a real store."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Root
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import diff
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.backends.objects.servers import S3Server
from tests.stored_bytes import bytes_below

Tensorcas = Callable[..., Any]


TIMES = "\N{MULTIPLICATION SIGN}"
DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d"


def root(store: Store) -> str:
    return store.uri


def save(store: Store, tensors: dict[str, Any], **target: Any) -> None:
    with store.write_checkpoint(tensors, flavor="test") as pending:
        pending.commit(RefTarget(**target))


def damage(store: Store) -> None:
    """Delete the pack of the first step."""
    first = min(store.backend.list("packs"), key=lambda info: (info.modified_s, info.key))
    store.backend.delete(first.key)


# --- list


def test_list_prints_what_each_run_keeps(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("list", "--root", root(store))
    lines = re.sub(DATE, "DATE", done.out).splitlines()

    assert done.status == 0
    assert lines == [
        f"store {store.uri}",
        "run train",
        "  checkpoints       steps 1, 2, 3  8.1 KB  DATE  test",
        "  model m-1         step 3           24 B  DATE  test",
        "run other",
        "  ema               step 1           24 B  DATE  test",
        "no run",
        "  file notes/a.txt                 4.0 KB  DATE  -",
    ]


def test_list_of_one_run_leaves_out_the_others(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("list", "--run", "other", "--root", root(store))

    assert re.sub(DATE, "DATE", done.out).splitlines()[1:] == ["run other", "  ema  step 1  24 B  DATE  test"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (range(1, 11), "steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        (range(1, 21), "steps 1..20 (20 checkpoints)"),
        (range(-100, 1100, 100), "steps -100..1000 by 100 (12 checkpoints)"),
        ([*range(11), 99], "steps 0..99 (12 checkpoints)"),
    ],
)
def test_list_prints_more_than_ten_steps_as_a_range(
    tensorcas: Tensorcas, tmp_path: Path, steps: list[int], said: str
) -> None:
    store = Store.init(tmp_path)
    for step in steps:
        save(store, {}, run_id="long", step=step)

    assert f"  checkpoints  {said}  0 B  " in tensorcas("list", "--root", tmp_path).out
    listed = tensorcas("list", "--root", tmp_path, "--json").json
    assert [entry["step"] for entry in listed["runs"][0]["checkpoints"]] == list(steps)


def test_list_in_json_prints_every_field(tensorcas: Tensorcas, store: Store) -> None:
    listed = tensorcas("list", "--root", root(store), "--json").json
    [train, other, none] = listed["runs"]

    assert (listed["store"], train["run_id"], none["run_id"]) == (store.uri, "train", None)
    assert [entry["step"] for entry in train["checkpoints"]] == [1, 2, 3]
    assert (train["models"][0]["model_id"], train["models"][0]["path"]) == ("m-1", "models/m-1/checkpoint.arrow")
    assert (none["files"][0]["path"], none["files"][0]["bytes"]) == ("notes/a.txt", 4000)
    [ema] = other["checkpoints"]
    assert (ema["name"], ema["parent_step"], ema["metrics"], ema["flavor"]) == ("ema", 0, {"loss": "nan"}, "test")
    assert store.ref(ema["key"]) is not None


def test_an_unknown_run_is_reported_with_the_known_ones(tensorcas: Tensorcas, store: Store) -> None:
    for command in ("list", "stats", "show"):
        done = tensorcas(command, "--run", "nobody", "--root", root(store))

        assert done.status == 1
        assert done.err == "tensorcas: error: there is no checkpoint of run 'nobody'; there are runs 'train', 'other'\n"


# --- stats


def bytes_at(root: Root) -> int:
    """Bytes of everything below a root, as somebody sees it who knows of no store."""
    if root.is_local:
        return bytes_below(root.folder)
    server = S3Server(endpoint=os.environ["AWS_ENDPOINT_URL"])
    return sum(found["Size"] for found in server.client().list_objects_v2(Bucket=root.container)["Contents"])


def test_stats_count_every_byte_on_disk(tensorcas: Tensorcas, store: Store) -> None:
    on_disk = bytes_at(Root.parse(store.uri))
    found = tensorcas("stats", "--root", root(store), "--json").json

    assert found["disk_bytes"] == found["disk"]["total"] == on_disk
    assert (found["runs"], found["checkpoints"], found["files"]) == (2, 5, 1)
    assert found["total_bytes"] == 3 * 8120 + 2 * 24 + 4000
    assert f"{on_disk:,} bytes on disk" in tensorcas("stats", "--root", root(store)).out


def test_stats_of_a_run_count_only_that_run(tensorcas: Tensorcas, store: Store) -> None:
    found = tensorcas("stats", "--run", "train", "--root", root(store), "--json").json

    assert (found["run_id"], found["checkpoints"], found["steps"]) == ("train", 4, [1, 2, 3])
    assert (found["total_chunks"], found["unique_chunks"], found["dedup_ratio"]) == (7, 5, 0.7143)
    assert "run train, 4 checkpoints" in tensorcas("stats", "--run", "train", "--root", root(store)).out


def test_stats_say_how_many_times_smaller_a_store_is(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    weights = np.random.default_rng(0).normal(size=100_000)
    for step in range(4):
        save(store, {"w": weights}, run_id="r", step=step)
    told = tensorcas("stats", "--root", root(store)).out
    found = tensorcas("stats", "--root", root(store), "--json").json

    assert f", {found['total_bytes'] / found['disk_bytes']:.1f} {TIMES} smaller\n" in told
    assert f"ratio 0.25 (4.0 {TIMES} fewer)\n" in told


def test_du_counts_what_a_deletion_of_each_run_frees(tensorcas: Tensorcas, store: Store) -> None:
    found = tensorcas("du", root(store), "--json").json
    by_run = tensorcas("stats", "--by", "run", "--root", root(store), "--json").json
    said = tensorcas("du", root(store), "--top", "1").out.splitlines()

    assert found == by_run
    sizes = [share["exclusive_bytes"] for share in found["shares"]]
    assert sizes == sorted(sizes, reverse=True)
    assert said[1].split() == ["experiment", "run", "kept", "exclusive", "shared", "marginal"]


def test_stats_by_run_print_exclusive_and_shared_bytes(tensorcas: Tensorcas, store: Store) -> None:
    found = tensorcas("stats", "--by", "run", "--root", root(store), "--json").json
    shares = {share["run_id"]: share for share in found["shares"]}
    said = tensorcas("stats", "--by", "step", "--root", root(store), "--top", "1").out.splitlines()

    assert found["needed_bytes"] == sum(share["marginal_bytes"] for share in found["shares"])
    assert found["needed_bytes"] == found["exclusive_bytes"] + found["shared_bytes"]
    assert shares["train"]["refs"] == 4
    assert said[1].split() == ["experiment", "run", "step", "kept", "exclusive", "shared", "marginal"]
    assert len(said) == 5
    assert said[3].startswith("and ")
    assert " needed by all: " in said[4]


def test_stats_by_step_of_one_run_print_only_its_steps(tensorcas: Tensorcas, store: Store) -> None:
    found = tensorcas("stats", "--by", "step", "--run", "train", "--root", root(store), "--json").json

    assert {(share["run_id"], share["step"]) for share in found["shares"]} == {("train", step) for step in (1, 2, 3)}


@pytest.mark.parametrize("words", [["--top", "3"], ["--by", "run", "--top", "0"], ["--by", "epoch"]])
def test_stats_refuse_top_without_by_and_invalid_values(tensorcas: Tensorcas, store: Store, words: list[str]) -> None:
    assert tensorcas("stats", "--root", root(store), *words).status == 2


# --- show


def test_show_prints_the_tensors_of_a_checkpoint(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("show", "--run", "train", "--step", "2", "--root", root(store))
    lines = done.out.splitlines()

    assert lines[0] == "run train step 2"
    assert "  flavor: test" in lines
    assert lines[-4:] == [
        "tensor  dtype    shape  bytes  chunks",
        "fixed   float64  1000    8000       1",
        "w       float32  10x3     120       1",
        "2 tensors, 8,120 bytes, 2 chunks, 2 of them different",
    ]


def test_show_in_json_prints_metrics_and_tensors(tensorcas: Tensorcas, store: Store) -> None:
    found = tensorcas("show", "--run", "other", "--root", root(store), "--json").json

    assert (found["checkpoint"]["step"], found["checkpoint"]["metrics"]) == (1, {"loss": "nan"})
    assert found["tensors"] == [{"name": "w", "dtype": "float64", "shape": [3], "n_bytes": 24, "n_chunks": 1}]
    assert (found["n_tensors"], found["n_bytes"], found["n_chunks"], found["n_unique_chunks"]) == (1, 24, 1, 1)


def test_show_with_tree_prints_the_structure_of_a_checkpoint(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    layers = {f"layers.{n}.{name}": np.zeros((2, 3), "f4") for n in range(3) for name in ("q", "k")}
    save(store, {**layers, "norm": np.zeros(5)}, run_id="r", step=1)
    words = ["show", "--run", "r", "--tree", "--root", root(store)]

    assert tensorcas(*words).out.splitlines() == [
        "run r step 1: 7 tensors, 184 B (float32 144 B, float64 40 B)",
        "layers of layers: 0..2",
        "layers.0..2  144 B  in 3",
        "  q          float32 2x3  72 B  in 3",
        "  k          float32 2x3  72 B  in 3",
        "norm         float64 5  40 B",
    ]
    found = tensorcas(*words, "--json").json
    assert found["stacks"] == [{"name": "layers", "layers": [0, 1, 2], "bytes": [48, 48, 48], "n_experts": 0}]
    assert [child["name"] for child in found["tree"]["children"]] == ["layers.0..2", "norm"]


def test_show_and_diff_read_no_data(tensorcas: Tensorcas, store: Store) -> None:
    for info in list(store.backend.list("packs")):
        store.backend.delete(info.key)

    assert tensorcas("show", "--run", "train", "--step", "1", "--root", root(store)).status == 0
    assert tensorcas("diff", "--run", "train", "--steps", "1", "2", "--root", root(store)).status == 5


def test_show_without_a_step_shows_the_last_one(tensorcas: Tensorcas, store: Store) -> None:
    save(store, {}, run_id="train", step=12)

    assert tensorcas("show", "--run", "train", "--root", root(store)).out.startswith("run train step 12\n")


def test_without_a_step_and_a_name_every_command_takes_the_last_of_the_default_series(
    tensorcas: Tensorcas, store: Store, tmp_path: Path
) -> None:
    save(store, {"model": np.ones(3)}, run_id="train", step=7, model_id="m-2", copy_path="models/m-2/checkpoint.arrow")
    save(store, {"ema": np.ones(3)}, run_id="train", step=9, name="ema")
    place = ("--run", "train", "--root", store.uri)
    shown = tensorcas("show", *place)
    explained = tensorcas("explain", *place)
    given = tensorcas("export", tmp_path / "x.npz", *place)

    for done in (shown, explained, given):
        assert "run train step 3" in done.out.splitlines()[0], done.err
    assert tensorcas("show", *place, "--json").json["checkpoint"]["step"] == 3
    assert tensorcas("show", *place, "--step", "7", "--json").json["checkpoint"]["model_id"] == "m-2"


def test_a_command_refuses_to_choose_among_series_and_models(tensorcas: Tensorcas, store: Store) -> None:
    save(store, {"w": np.ones(3)}, run_id="new", step=1, name="ema")
    save(store, {"w": np.ones(3)}, run_id="new", step=2, name="ema")
    place = ("--run", "new", "--root", store.uri)
    only = tensorcas("show", *place, "--json").json["checkpoint"]
    save(store, {"w": np.ones(3)}, run_id="new", step=7, model_id="m-3", copy_path="models/m-3/checkpoint.arrow")
    refused = tensorcas("show", *place)

    assert (only["name"], only["step"]) == ("ema", 2)
    assert (refused.status, refused.err) == (
        1,
        "tensorcas: error: the last step of run 'new' may be of 2 series or models, give --name, one of 'ema', 'm-3'\n",
    )


def test_only_delete_refuses_to_choose_among_checkpoints_of_one_step(tensorcas: Tensorcas, store: Store) -> None:
    words = ["show", "--run", "train", "--step", "3", "--root", root(store), "--json"]
    done = tensorcas("delete", *words[1:], "--yes")

    assert done.status == 1
    assert done.err == (
        "tensorcas: error: step 3 of run 'train' is 2 checkpoints, give --name as well, one of '', 'm-1'\n"
    )
    assert len(store.checkpoints()) == 6
    assert tensorcas(*words).json["n_tensors"] == 2
    assert tensorcas(*words, "--name", "m-1").json["n_tensors"] == 1
    assert tensorcas(*words, "--name", "").json["n_tensors"] == 2
    assert tensorcas(*words, "--name", "refs/runs/train/@3").json["n_tensors"] == 2


def test_checkpoints_of_one_step_and_name_are_listed_by_key(tensorcas: Tensorcas, store: Store) -> None:
    save(store, {}, run_id="train", step=3, model_id="m-1", copy_path="models/m-1/checkpoint.arrow")
    done = tensorcas("show", "--run", "train", "--name", "m-1", "--root", root(store))
    keys = [key for key in done.err.split("'") if key.startswith("refs/copies/")]

    assert len(keys) == 2
    for key in keys:
        assert tensorcas("show", "--run", "train", "--name", key, "--root", root(store)).status == 0


def test_an_unknown_step_or_name_is_reported_with_the_known_ones(tensorcas: Tensorcas, store: Store) -> None:
    by_step = tensorcas("show", "--run", "train", "--step", "9", "--root", root(store))
    by_name = tensorcas("show", "--run", "train", "--step", "1", "--name", "ema", "--root", root(store))

    assert (by_step.status, by_name.status) == (1, 1)
    assert "there are steps 1, 2, 3" in by_step.err
    assert "there are series and models '', 'm-1' and steps 1, 2, 3" in by_name.err


# --- diff


def test_diff_prints_what_changed_between_two_steps(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("diff", "--run", "train", "--steps", "1", "2", "--root", root(store))

    assert done.out.splitlines() == [
        "from run train step 1",
        "to   run train step 2",
        "~  w  float32 10x3  120 B",
        "0 added (0 B), 0 removed (0 B), 1 changed (120 B), 1 equal (8.0 KB)",
    ]


def test_diff_prints_the_largest_changes_first(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    save(store, {"small": np.zeros(10), "gone": np.zeros(500), "large": np.zeros(1000)}, run_id="r", step=1)
    save(store, {"small": np.ones(10), "large": np.ones(1000), "new": np.ones(100)}, run_id="r", step=2)
    lines = tensorcas("diff", "r", "--steps", "1", "2", "--root", root(store)).out.splitlines()

    assert [line.split()[:2] for line in lines[2:-1]] == [["~", "large"], ["-", "gone"], ["+", "new"], ["~", "small"]]


def test_diff_with_values_measures_the_change(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    save(store, {"w": np.array([3.0, 4.0, 0.0, 0.0]), "x": np.ones(3)}, run_id="r", step=1)
    save(store, {"w": np.array([3.0, 4.0, 0.0, 0.5]), "x": np.ones(4)}, run_id="r", step=2)
    words = ["diff", "--run", "r", "--steps", "1", "2", "--values", "--root", root(store)]

    assert (
        "~  w  float64 4                8 B  max 0.5 mean 0.125 norm 0.1 equal 75.0%"
        in tensorcas(*words).out.splitlines()
    )
    assert tensorcas(*words, "--json").json["values"] == {
        "w": {
            "max_absolute": 0.5,
            "mean_absolute": 0.125,
            "relative_norm": 0.1,
            "share_equal": 0.75,
            "n_elements": 4,
            "n_not_finite": 0,
        }
    }


def test_diff_of_two_runs_names_each(tensorcas: Tensorcas, store: Store) -> None:
    words = ["diff", "--run", "train", "--step", "1", "--run", "other", "--root", root(store)]
    found = tensorcas(*words, "--json").json

    assert (found["before"]["run_id"], found["after"]["run_id"]) == ("train", "other")
    assert (found["added"], found["removed"], found["changed"], found["equal"]) == ([], ["fixed"], ["w"], [])
    assert "~  w      float32 10x3 -> float64 3   120 B" in tensorcas(*words).out


def test_diff_of_two_names_of_one_step(tensorcas: Tensorcas, store: Store) -> None:
    words = ["--run", "train", "--step", "3", "--name", "", "--name", "m-1", "--root", root(store)]
    found = tensorcas("diff", *words, "--json").json

    assert (found["before"]["model_id"], found["after"]["model_id"]) == (None, "m-1")


def test_diff_reports_content_beside_the_tensors_as_python_does(tensorcas: Tensorcas, tmp_path: Path) -> None:
    with TensorCasStore(tmp_path, run_id="r") as runs:
        for step, scale in enumerate((1.0, 1.0, 2.0)):
            runs.save(SimpleNamespace(coefficients=[scale], table=np.ones((90, 90))), step)
        found = diff(runs.open(0), runs.open(2))
    words = ["diff", "--run", "r", "--root", str(tmp_path)]
    told, said = tensorcas(*words, "--steps", "0", "2"), tensorcas(*words, "--steps", "0", "2", "--json")

    assert (told.status, said.status, said.json["is_equal"]) == (5, 5, False)
    assert said.json["other"] == list(found.other) == ["skeleton"]
    assert "other content differs: skeleton" in told.out.splitlines()
    equal = tensorcas(*words, "--steps", "0", "1", "--json")
    assert (equal.status, equal.json["is_equal"], equal.json["other"]) == (0, True, [])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--step", "1"],
        ["--steps", "1", "2", "--step", "3"],
        ["--step", "1", "--step", "2", "--step", "3"],
        ["--run", "a", "--run", "b", "--steps", "1", "2"],
    ],
    ids=" ".join,
)
def test_diff_refuses_more_or_fewer_than_two_checkpoints(tensorcas: Tensorcas, store: Store, words: list[str]) -> None:
    done = tensorcas("diff", "--run", "train", *words, "--root", root(store))

    assert (done.status, done.out) == (2, "")


# --- verify


def test_verify_of_a_sound_store_exits_with_0(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("verify", "--full", "--root", root(store))

    assert (done.status, done.err) == (0, "")
    assert done.out == "6 checkpoints and files, 5 packs, 6 chunks, every one read: no problem found\n"


@pytest.mark.usefixtures("store_of_files")
def test_verify_exits_with_3_if_it_finds_problems(tensorcas: Tensorcas, store: Store) -> None:
    damage(store)
    done = tensorcas("verify", "--root", root(store))

    assert done.status == 3
    (first, *_) = (line for line in done.out.splitlines() if line.startswith("run train step 1, tensors 'fixed', 'w'"))
    assert "packs/" in first
    assert done.out.splitlines()[-1].endswith("none of them read: 3 problems")


@pytest.mark.usefixtures("store_of_files")
def test_verify_in_json_prints_each_problem(tensorcas: Tensorcas, store: Store) -> None:
    damage(store)
    done = tensorcas("verify", "--root", root(store), "--json")
    found = done.json

    assert (done.status, found["full"], found["n_refs"]) == (3, False, 6)
    assert {problem["checkpoint"] for problem in found["problems"]} == {f"run train step {n}" for n in (1, 2, 3)}
    assert all(problem["tensors"] for problem in found["problems"])
    assert all("packs/" in f"{problem['key']} {problem['reason']}" for problem in found["problems"])


def test_a_command_that_meets_damage_points_to_verify(tensorcas: Tensorcas, store: Store) -> None:
    store.backend.put_new("refs/runs/train/@9", [b"{"])
    done = tensorcas("list", "--root", root(store))

    assert done.status == tensorcas("stats", "--root", root(store)).status == 1
    assert "run train\n  checkpoints" in done.out
    assert "refs/runs/train/@9" in done.err
    assert "`tensorcas verify` lists all damage" in done.err
    assert tensorcas("verify", "--root", root(store)).status == 3


def test_verify_reads_a_part_or_a_sample_and_reports_the_share(tensorcas: Tensorcas, store: Store) -> None:
    parts = [tensorcas("verify", "--part", f"{k}/3", "--root", root(store), "--json").json for k in (1, 2, 3)]
    sample = tensorcas("verify", "--sample", "50%", "--root", root(store), "--json").json
    seed = ["--sample", "50%", "--seed", str(sample["seed"])]
    again = tensorcas("verify", "--full", *seed, "--root", root(store), "--json").json

    assert sum(part["n_read"] for part in parts) == parts[0]["n_chunks"] == 6
    assert [part["part"] for part in parts] == ["1/3", "2/3", "3/3"]
    assert (again["n_read"], again["sample"], again["full"]) == (sample["n_read"], 0.5, True)


@pytest.mark.parametrize(
    "words",
    [["--part", "0/3"], ["--part", "4/3"], ["--part", "x"], ["--sample", "101%"], ["--sample", "50"], ["--seed", "1"]],
)
def test_verify_refuses_an_invalid_part_or_sample(tensorcas: Tensorcas, store: Store, words: list[str]) -> None:
    assert tensorcas("verify", *words, "--root", root(store)).status == 2


def test_show_prints_scalars_and_empty_tensors(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    save(store, {"s": np.float32(1), "e": np.empty((0, 2))}, run_id="run", step=1)
    done = tensorcas("show", "--run", "run", "--root", tmp_path)

    assert [line.split() for line in done.out.splitlines()[-3:-1]] == [
        ["s", "float32", "scalar", "4", "1"],
        ["e", "float64", "0x2", "0", "0"],
    ]


# --- lineage


def test_lineage_prints_the_parent_of_a_model(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    weights = np.random.default_rng(0).normal(0, 0.02, 20_000).astype(np.float32)
    save(store, {"w": weights}, run_id="base", step=1)
    save(store, {"model.w": weights * np.float32(1.0001)}, run_id="tuned", step=2)
    done = tensorcas("lineage", "tuned", "--root", root(store))
    found = tensorcas("lineage", "tuned", "--root", root(store), "--json").json

    assert done.status == 0
    assert done.out.startswith("run tuned step 2:\n  fine-tune of run base step 1 (")
    assert [(each["run_id"], each["kind"], each["changed"]) for each in found["relatives"]] == [
        ("base", "fine-tune", ["model.w"])
    ]


def test_lineage_names_the_later_relatives_of_a_model(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    weights = np.random.default_rng(0).normal(0, 0.02, 20_000).astype(np.float32)
    save(store, {"w": weights}, run_id="base", step=1)
    save(store, {"model.w": weights * np.float32(1.0001)}, run_id="tuned", step=2)
    done = tensorcas("lineage", "base", "--root", root(store))

    assert done.out.startswith("run base step 1:\n  fine-tuned to run tuned step 2 (")


def test_lineage_of_a_run_with_files_alone_names_the_files(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    with store.write_stream(io.BytesIO(bytes(20_000))) as pending:
        pending.commit(RefTarget(run_id="run", path="run/artifacts/m.pt"))
    done = tensorcas("lineage", "run", "--root", root(store))

    assert done.status == 1
    assert "for the last step of run 'run'; there are files 'run/artifacts/m.pt'" in done.err


def test_lineage_of_an_artifact_without_relatives_says_so(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    weights = np.random.default_rng(0).normal(0, 0.02, 20_000).astype(np.float32)
    save(store, {"w": weights}, path="models/m.arrow")

    assert (
        tensorcas("lineage", "models/m.arrow", "--root", root(store)).out
        == "models/m.arrow: no relative in the store\n"
    )
