"""Behaviour of all commands: the place of the store, the exit status, and the output at the terminal."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.cli.conftest import save
from tests.file_formats.arrays import ArrayTensors, write

Tensorcas = Callable[..., Any]

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
PROGRAM = [sys.executable, "-c", "import sys; from tensorcas_mlflow.cli import main; sys.exit(main())"]
COMMANDS = [
    "list",
    "stats",
    "du",
    "show",
    "diff",
    "lineage",
    "verify",
    "init",
    "delete",
    "gc",
    "copy",
    "import",
    "export",
    "convert",
    "adopt",
    "completion",
]

HOSTILE = "red\x1b[31m\r\n\x07\u202eback\udc80"


@pytest.fixture
def hostile(tmp_path: Path) -> Store:
    """A store in which every name that can be chosen is hostile to a terminal."""
    store = Store.init(tmp_path / "hostile")
    name = HOSTILE.replace("\r\n", "").replace("\udc80", "")
    for step in (1, 2):
        with store.write_checkpoint({name: np.full(3, step)}, flavor=name) as pending:
            pending.commit(
                RefTarget(run_id=HOSTILE, step=step, name=HOSTILE, metrics={HOSTILE: 1.0}, model_id=HOSTILE, uri="x")
            )
    with store.write_checkpoint({name: np.full(3, 3)}, flavor=name) as pending:
        pending.commit(RefTarget(run_id=HOSTILE, step=3, path=HOSTILE, uri=HOSTILE))
    return store


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TENSORCAS_STORE"}
    return subprocess.run(
        [*PROGRAM, *map(str, words)],
        env=environment | options.pop("env", {}),
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


# --- the place


def test_root_and_json_stand_before_or_after_the_command(tensorcas: Tensorcas, store: Store) -> None:
    after = tensorcas("list", "--root", store.uri, "--json")
    before = tensorcas("--json", "--root", store.uri, "list")

    assert before.status == after.status == 0
    assert before.json == after.json


def test_root_before_and_after_the_command_is_refused(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("--root", "/nowhere", "--json", "list", "--root", store.uri)

    assert (done.status, done.out) == (2, "")
    assert "--root is given twice" in done.err


def test_the_environment_names_the_store_if_root_does_not(
    tensorcas: Tensorcas, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORCAS_STORE", store.uri)
    Store.init(tmp_path / "empty")

    assert "run train" in tensorcas("list").out
    assert "run train" not in tensorcas("list", "--root", tmp_path / "empty").out


def test_the_working_directory_is_the_default_place(
    tensorcas: Tensorcas, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store.init(tmp_path / "store")
    below = tmp_path / "store" / "below"
    below.mkdir()
    monkeypatch.chdir(below)

    assert tensorcas("list").out.startswith(f"store {store.uri}\n")


def test_a_place_without_a_store_is_an_error_with_a_remedy(tensorcas: Tensorcas, tmp_path: Path) -> None:
    for command in (["list"], ["stats"], ["verify"], ["gc"], ["show", "--run", "x"]):
        done = tensorcas(*command, "--root", tmp_path)

        assert (done.status, done.out) == (1, "")
        assert done.err.startswith("tensorcas: error: there is no store at")
        assert "tensorcas init" in done.err


def test_a_root_of_an_unknown_scheme_is_an_error(tensorcas: Tensorcas) -> None:
    done = tensorcas("list", "--root", "s3://bucket/x")

    assert done.status == 1
    assert len(done.err.splitlines()) == 1


# --- how it ends


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["list", "--jsonx"],
        ["show", "--step", "1"],
        ["show", "--run", "x", "--step", "one"],
        ["delete", "--run", "x"],
        ["gc", "--grace", "-1"],
        ["gc", "--grace", "nan"],
        ["gc", "--grace", "soon"],
        ["gc", "--grace", "24"],
        ["gc", "--quarantine", "1h30m"],
        ["gc", "--max-waste", "0.3"],
        ["gc", "--max-waste", "150%"],
        ["gc", "--max-waste", "nan%"],
        ["list", "somewhere", "else"],
        ["list", "somewhere", "--root", "else"],
        ["show"],
        ["show", "a", "--run", "b"],
        ["completion", "fish"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_prints_the_usage(tensorcas: Tensorcas, words: list[str]) -> None:
    done = tensorcas(*words)

    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("usage: tensorcas")


@pytest.mark.long
def test_an_interrupt_exits_with_130_without_a_traceback(store: Store) -> None:
    # A prompt waits for an answer that does not come.
    words = ["delete", "--run", "train", "--step", "1", "--root", store.uri]
    with subprocess.Popen(
        [*PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        told = ""
        while "[y/N]" not in told:
            told += process.stderr.read(1)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)

    assert process.returncode == 130
    assert rest.strip() == "tensorcas: interrupted"
    assert len(store.checkpoints()) == 6


@pytest.mark.long
def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    with store.write_checkpoint({f"layer.{n}.weight": np.float32(n) for n in range(5000)}) as pending:
        pending.commit(RefTarget(run_id="run", step=1))
    with subprocess.Popen(
        [*PROGRAM, "show", "--run", "run", "--root", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()

    assert (process.returncode, told) == (141, b"")


@pytest.mark.long
def test_missing_standard_input_counts_as_no(store: Store) -> None:
    done = run("delete", "--run", "train", "--step", "1", "--root", store.uri, stdin=subprocess.DEVNULL)

    assert (done.returncode, done.stdout) == (0, "nothing was deleted\n")


# --- what reaches the terminal


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["stats"],
        ["stats", "--run", HOSTILE],
        ["stats", "--by", "step"],
        ["show", "--run", HOSTILE, "--step", "1"],
        ["diff", "--run", HOSTILE, "--steps", "1", "2"],
        ["delete", "--run", HOSTILE, "--step", "1"],
        ["delete", "--run", HOSTILE, "--step", "3"],
        ["gc", "--orphans", "--grace", "0"],
        ["show", "--run", "nobody"],
        ["show", "--run", HOSTILE, "--step", "9"],
        ["list", "--root", HOSTILE],
    ],
    ids=repr,
)
def test_names_in_a_store_reach_the_terminal_escaped(tensorcas: Tensorcas, hostile: Store, words: list[str]) -> None:
    done = tensorcas(*([] if "--root" in words else ["--root", hostile.uri]), *words)
    written = (done.out + done.err).replace("\n", "")

    assert written.isprintable()
    assert len(done.err.splitlines()) <= 1


def test_verify_escapes_names(tensorcas: Tensorcas, hostile: Store) -> None:
    for info in list(hostile.backend.list("packs")):
        hostile.backend.delete(info.key)
    done = tensorcas("verify", "--root", hostile.uri)

    assert done.status == 3
    assert done.out.replace("\n", "").isprintable()


def test_json_holds_exact_names_in_ascii(tensorcas: Tensorcas, hostile: Store) -> None:
    words = ["--root", hostile.uri, "--json"]
    listed = tensorcas("list", *words)
    shown = tensorcas("show", "--run", HOSTILE, "--step", "1", *words)

    for done in (listed, shown):
        assert done.out.replace("\n", "").isprintable()
        assert done.out.isascii()
    assert listed.status == 0, listed.err
    assert listed.json["runs"][0]["run_id"] == HOSTILE
    assert shown.json["checkpoint"]["metrics"] == {HOSTILE: 1.0}


@pytest.mark.long
def test_an_ascii_terminal_is_no_error(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    with store.write_checkpoint({"größe": np.ones(1)}, flavor="ü") as pending:
        pending.commit(RefTarget(run_id="模型", step=1))
    done = run("list", "--root", tmp_path, env={"PYTHONIOENCODING": "ascii"})

    assert done.returncode == 0
    assert "run \\u6a21\\u578b" in done.stdout


# --- help and the page


@pytest.mark.parametrize("words", [[], *([command] for command in COMMANDS)], ids=" ".join)
def test_examples_in_help_texts_are_valid_commands(tensorcas: Tensorcas, words: list[str]) -> None:
    from tensorcas_mlflow.cli._main import parser

    done = tensorcas(*words, "--help")
    examples = re.findall(r"^  tensorcas (.*?)(?:  .*)?$", done.out.partition("examples:")[2], re.MULTILINE)

    assert done.status == 0
    assert examples
    for example in examples:
        assert callable(parser().parse_args(example.split()).act)


def json_on_the_page() -> dict[str, Any]:
    """The examples of answers, by command, with the checkpoints that the page writes out only once."""
    page = PAGE.read_text()
    found = re.findall(r"^## `tensorcas (\w+).*?^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    texts = dict(found)
    named = json.loads(texts["list"])["runs"][0]["checkpoints"][0]
    checkpoint = {name: value for name, value in named.items() if name != "model_name"}
    for said, meant in (("<a checkpoint>", checkpoint), ("<a checkpoint, as above>", named)):
        texts = {command: text.replace(f'"{said}"', json.dumps(meant)) for command, text in texts.items()}
    return {command: json.loads(text) for command, text in texts.items()}


def keys_of(value: Any) -> Any:
    """The keys of a document, and of the first element of each list in it."""
    if isinstance(value, dict):
        return {name: keys_of(inner) for name, inner in value.items() if name != "metrics" and name != "metadata"}
    return [keys_of(value[0])] if isinstance(value, list) and value else None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("init", ["--root", "NEW"]),
        ("list", []),
        ("stats", []),
        ("show", ["--run", "train", "--step", "1"]),
        ("explain", ["--run", "train", "--step", "1"]),
        ("diff", ["--run", "train", "--steps", "1", "2"]),
        ("du", ["--by", "run"]),
        ("lineage", ["tuned"]),
        ("verify", []),
        ("delete", ["--run", "train", "--step", "1", "--yes"]),
        ("gc", ["--yes"]),
        ("optimize", ["--yes"]),
        ("copy", ["SRC", "NEW"]),
        ("import", ["FILE", "--run", "new", "--step", "1", "--skip-unknown"]),
        ("export", ["--run", "train", "--step", "1", "NEW", "--file-format", "npz"]),
        ("convert", ["FILE", "NEW", "--out-format", "torch", "--skip-unknown"]),
    ],
)
def test_the_documentation_page_shows_the_json_keys_of_each_command(
    tensorcas: Tensorcas, store: Store, tmp_path: Path, command: str, words: list[str]
) -> None:
    write(ArrayTensors({"w": np.ones(3)}), tmp_path / "file.npz")
    places = {"NEW": str(tmp_path / "new"), "SRC": store.uri, "FILE": str(tmp_path / "file.npz")}
    words = [places.get(word, word) for word in words]
    packs = [info.key for info in store.backend.list("packs")]
    for key in {"verify": packs, "copy": packs}.get(command, []):
        store.backend.delete(key)
    if command == "gc":
        for ref in store.checkpoints():
            store.drop(ref)
    if command == "lineage":
        weights = {name: np.random.default_rng(9).normal(size=5000) for name in ("a", "b")}
        save(store, weights | {"head": np.ones(5000)}, run_id="base", step=1)
        save(store, weights | {"new": np.arange(5000.0), "head": np.zeros(5000)}, run_id="tuned", step=1)
    place = [] if command in ("copy", "init") else ["--root", store.uri]
    answered = tensorcas(*place, "--json", command, *words).json

    shown = json_on_the_page()[command]
    if command == "list":
        first = answered["runs"][0]
        first["files"] = answered["runs"][-1]["files"]
    if command == "verify":
        answered["problems"].sort(key=lambda problem: not problem["tensors"])  # of others than tensors it says less
    assert keys_of(answered) == keys_of(shown)


def test_the_documentation_page_shows_the_help_of_every_command() -> None:
    from tensorcas_mlflow.cli._main import parser

    page = PAGE.read_text()
    built = runpy.run_path(str(PAGE.with_name("conf.py")))["with_help"](page)
    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]

    assert sorted(re.findall(r"^## `tensorcas (\w+)`$", page, re.MULTILINE)) == sorted(commands.choices)
    assert len(page.splitlines()) <= 400
    for name, command in commands.choices.items():
        section = built.partition(f"## `tensorcas {name}`\n")[2].partition("\n## ")[0].replace("\\", "")
        assert section.startswith(f"\n{command.description}\n")
        for action in command._actions:
            if action.dest not in ("help", "root", "json"):
                assert all(f"`{option}`" in section for option in action.option_strings)
                assert (action.help or "").partition("%")[0].partition("\\")[0] in section
        assert all(f"\n{example.strip()}\n" in section for example in (command.epilog or "").splitlines()[1:])
