"""Wrong places, ids, steps and files: every command ends with a documented status and one line that says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcas_mlflow
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.arrays import ArrayTensors, write

Tensorcas = Callable[..., Any]

RUN, TWIN, OTHER = "a1b2c3d4" + "0" * 24, "a1b2c3d4" + "1" * 24, "f" * 32

PLACES = {
    "nothing": "nowhere",
    "an empty folder": "empty",
    "a file": "file",
    "below a file": "file/below",
    "above stores": "parent",
    "a store": "store",
    "below a store": "store/below",
    "a store's own folder": "store/.tensorcas/packs",
    "a damaged store": "damaged",
    "a store's folder that is a file": "odd",
    "a format that is a folder": "folders",
    "a file with unreadable parents": "/proc/1/mem",
    "a device": "/dev/null",
    "an empty text": "",
    "a blank": " ",
    "no UTF-8": "\udcff",
    "a very long name": "x" * 5000,
    "a very deep path": "tensorcas:///" + "y/" * 3000,
    "a scheme alone": "tensorcas:",
    "a relative URI": "tensorcas:nowhere",
    "a host": "tensorcas://host/store",
    "a query": "tensorcas:///store?a=b",
    "a bucket of no name": "tensorcas-s3://",
    "an unknown scheme": "tensorcas-foo://b/x",
    "a container of no account": "tensorcas-az://c/x",
    "plain S3": "s3://bucket/x",
    "HTTP": "http://127.0.0.1:1/x",
    "a run's artifact": "runs:/x/y",
    "a model": "models:/m/1",
    "artifacts of a server": "mlflow-artifacts:/2",
    "artifacts of nobody": "mlflow-artifacts:",
    "artifacts of a host": "mlflow-artifacts://127.0.0.1:1/2",
    "artifacts of a port": "mlflow-artifacts://5000/2",
    "half an IPv6 address": "mlflow-artifacts://[::1/2",
    "half an IPv6 address of ours": "tensorcas://[::1/2",
}
COMMANDS = [
    "list",
    "list --run x",
    "stats",
    "stats --run x",
    "stats --by run",
    "stats --by step --run x",
    f"show --run {RUN}",
    f"show --run {RUN} --step 9",
    f"show --run {RUN} --name nobody --tree",
    f"diff --run {RUN} --steps 1 2 --values",
    f"diff --run {RUN} --run x --step 1",
    "verify",
    "verify --full",
    f"explain --run {RUN} --tensor nobody",
    f"delete --run {RUN} --step 9 --yes",
    "gc --dry-run",
    "gc --yes --abandon nobody",
    "gc --orphans --dry-run",
    "optimize --dry-run",
    "import nowhere.npz --run r --step 1",
    "import file --run r --step 1",
    "import bad.npz --run r --step 1",
    "import empty --run r --step 1",
    f"import good.npz --run {RUN} --step 1",
    "import good.npz --run a/b --step 1 --name a/b",
    f"export --run {RUN} out.unknown",
    f"export --run {RUN} file/out.npz",
    f"export --run {RUN} empty --file-format npz",
    f"export --run {RUN} out.npz --match nobody",
    f"export --run {RUN} out --file-format serverlessllm --partitions 99999 --dry-run",
    "repair --dry-run",
    "repair --dry-run --from nowhere",
]
OF_PLACES = [
    "init PLACE --chunk-bytes 3",
    "copy PLACE copied --dry-run",
    "copy store PLACE --dry-run",
    "copy PLACE PLACE --dry-run",
    "import PLACE --run r --step 1 --root empty-store",
    "convert PLACE out.npz --dry-run",
    "convert good.npz PLACE --out-format npz --dry-run",
    "repair --dry-run --root store --from PLACE",
]
ENDS = {0, 1, 2, 3, 4, 5}
"""The exit statuses on the page, without that of an interrupt."""


def fill(root: Path, *runs: str) -> Store:
    store = Store.init(root)
    for run in runs:
        for step in (1, 2):
            with store.write_checkpoint({"w": np.arange(300.0) + step}, flavor="generic") as pending:
                pending.commit(RefTarget(run_id=run, step=step))
    return store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with all kinds of places in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("store", "parent/one", "parent/two"):
        fill(tmp_path / name, RUN)
    fill(tmp_path / "empty-store")
    for name in ("empty", "store/below", "damaged/.tensorcas", "folders/.tensorcas/format", "odd"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("file", "damaged/.tensorcas/format", "odd/.tensorcas"):
        (tmp_path / name).write_text("no such thing")
    write(ArrayTensors({"w": np.ones(3)}), tmp_path / "good.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4 and so on")
    return tmp_path


def assert_ends_well(done: Any) -> None:
    assert done.status in ENDS
    assert "Traceback" not in done.err
    if done.status == 1:
        [line] = done.err.splitlines()
        assert line.startswith("tensorcas: error: ")
        assert len(line) > len("tensorcas: error: ") + 20


SOON = ("nothing", "a file", "above stores", "a store", "a damaged store", "plain S3", "artifacts of a server")


@pytest.mark.long
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=() if place in SOON else pytest.mark.long) for place in PLACES]
)
def test_every_command_reports_a_wrong_place_in_one_line(tensorcas: Tensorcas, folder: Path, place: str) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in [*COMMANDS, *OF_PLACES]:
        words = [PLACES[place] if word == "PLACE" else word for word in command.split()]
        if command in COMMANDS:
            words = ["--root", PLACES[place], *words]
        assert_ends_well(tensorcas(*words))

    assert {path for path, data in before.items() if path.read_bytes()[: len(data)] != data} == set()


@pytest.mark.parametrize("uri", ["garbage://x", "sqlite:////nonexistent/x/y.db", "http://127.0.0.1:1", "file"])
def test_a_wrong_tracking_store_is_reported_in_one_line(
    tensorcas: Tensorcas, folder: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = Store.open(folder / "store")
    with store.write_checkpoint({"w": np.ones(3)}) as pending:
        pending.commit(RefTarget(run_id=RUN, path=f"1/{RUN}/artifacts/data/x.arrow"))
    done = tensorcas("gc", "--orphans", "--yes", "--grace", "0", "--root", "store", "--tracking-uri", uri)

    assert done.status == 1
    assert_ends_well(done)
    assert len(store.checkpoints()) == 3


def test_a_place_above_stores_is_reported_with_their_names(tensorcas: Tensorcas, folder: Path) -> None:
    done = tensorcas("list", "--root", "parent")

    assert done.status == 1
    assert f"below it at 'tensorcas://{folder}/parent/one', 'tensorcas://{folder}/parent/two'" in done.err


def test_an_empty_root_is_not_the_working_directory(
    tensorcas: Tensorcas, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "store")
    done = tensorcas("gc", "--yes", "--root", "")

    assert done.status == 1
    assert "--root is empty" in done.err


@pytest.mark.parametrize("place", ["mlflow-artifacts:/2", "mlflow-artifacts://127.0.0.1:1/2"])
def test_artifacts_of_a_server_need_its_address(tensorcas: Tensorcas, folder: Path, place: str) -> None:
    done = tensorcas("list", "--root", place)

    assert done.status == 1
    assert "name it in MLFLOW_TRACKING_URI" in done.err


def test_messages_name_options_instead_of_python_arguments(tensorcas: Tensorcas, folder: Path) -> None:
    taken = tensorcas("import", "good.npz", "--run", RUN, "--step", "1", "--root", "store")
    (folder / "there.npz").write_text("there")
    written = tensorcas("export", "--run", RUN, "there.npz", "--root", "store")
    nowhere = tensorcas("list", "--root", "nowhere")

    assert "pass --overwrite" in taken.err
    assert "pass --overwrite" in written.err
    assert "by --root or TENSORCAS_STORE" in nowhere.err


# --- ids


@pytest.fixture
def runs(folder: Path) -> Path:
    """A store of two runs whose ids begin alike, of another one, and of two that no MLflow has made."""
    fill(folder / "runs", RUN, TWIN, OTHER, "f" * 8, "training")
    return folder / "runs"


def test_the_beginning_of_an_id_names_a_run(tensorcas: Tensorcas, runs: Path, folder: Path) -> None:
    short = RUN[:9]
    for words in (
        ["list", "--run", short],
        ["stats", "--run", short],
        ["stats", "--by", "step", "--run", short],
        ["show", "--run", short],
        ["diff", "--run", short, "--steps", "1", "2"],
        ["explain", "--run", short],
        ["delete", "--run", short, "--step", "1", "--yes"],
    ):
        done = tensorcas(*words, "--root", runs)
        assert (done.status, done.err) == (5 if words[0] == "diff" else 0, "")
    assert sorted(ref.run_id for ref in Store.open(runs).checkpoints() if ref.step == 1) == sorted(
        [TWIN, OTHER, "f" * 8, "training"]
    )
    assert tensorcas("copy", runs, "copied", "--run", short).status == 0
    assert {ref.run_id for ref in Store.open(folder / "copied").checkpoints()} == {RUN}
    tensorcas("import", "good.npz", "--run", short, "--step", "7", "--root", runs)
    assert [ref.run_id for ref in Store.open(runs).checkpoints() if ref.step == 7] == [RUN]


def test_the_beginning_of_several_ids_is_refused_with_all_of_them(tensorcas: Tensorcas, runs: Path) -> None:
    for words in (["list"], ["delete", "--step", "1", "--yes"], ["import", "good.npz", "--step", "9"]):
        done = tensorcas(*words, "--run", RUN[:8], "--root", runs)

        assert done.status == 1
        assert f"2 runs begin with 'a1b2c3d4': give more of one of '{RUN}', '{TWIN}'" in done.err
    assert len(Store.open(runs).checkpoints()) == 10


def test_fewer_than_six_characters_of_an_id_name_no_run(tensorcas: Tensorcas, runs: Path) -> None:
    for short in (RUN[:5], "train", RUN[:9].upper()):
        assert tensorcas("list", "--run", short, "--root", runs).status == 1
    assert f"run {'f' * 8}\n" in tensorcas("list", "--run", "f" * 8, "--root", runs).out
    assert OTHER in tensorcas("list", "--run", "f" * 7, "--root", runs).out


# --- what is not there


def test_copy_of_an_empty_path_copies_nothing(tensorcas: Tensorcas, folder: Path) -> None:
    (folder / "store/notes").mkdir()
    (folder / "store/notes/a.txt").write_text("a")
    done = tensorcas("copy", "store", "copied", "--path", "notes", "--path", "no/such")

    assert done.status == 1
    assert "there is nothing at 'no/such'" in done.err
    assert not (folder / "copied").exists()
    assert tensorcas("copy", "store", "copied", "--path", "notes").status == 0
    assert (folder / "copied/notes/a.txt").read_text() == "a"


@pytest.mark.parametrize("place", ["s3://bucket/x.npz", "gs://bucket/x.npz", "runs:/x/y.npz", "file:///tmp/x.npz"])
def test_nothing_is_written_to_a_uri_that_looks_like_a_path(tensorcas: Tensorcas, folder: Path, place: str) -> None:
    before = sorted(os.listdir(folder))
    for words in (["convert", "good.npz", place], ["export", "--root", "store", "--run", RUN, place]):
        done = tensorcas(*words)

        assert done.status == 1
        assert "is a URI, and what is written goes to a path of this machine" in done.err
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["lits"], "there is no command 'lits': did you mean 'list'?"),
        (["frobnicate"], "there is no command 'frobnicate'; `tensorcas --help` lists all"),
        (["diff", "--run", "x", "--valeus"], "unrecognized arguments: --valeus: did you mean '--values'?"),
        (["--jsn", "list"], "did you mean '--json'?"),
        (["stats", "--zzzz"], "unrecognized arguments: --zzzz; `tensorcas --help` lists all"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_word_with_a_typing_error_is_answered_by_the_word_that_was_meant(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert answer in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tensorcas {tensorcas_mlflow.__version__}\n"
