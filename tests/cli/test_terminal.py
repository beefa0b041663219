"""Output at a terminal: tables that fit it, colors, and a bar for long work; and none of these in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.base.progress import Progress, counted
from tensorcas_mlflow.cli._output import ratio_text
from tensorcas_mlflow.cli._progress import figures_text, share_of, time_text
from tensorcas_mlflow.cli._tables import folded_lines, plain_lines
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.zygote import Program, run_program

PROGRAM = "import sys; from tensorcas_mlflow.cli import main; sys.exit(main())"
SLOWLY = f"import tensorcas_mlflow.cli._progress as p; p._PATIENCE_S = p._PAUSE_S = 0.0; {PROGRAM}"
"""The program, with a bar from the first moment on: the tests' stores take no second."""
ESCAPE = "\x1b["
TIMES = "\N{MULTIPLICATION SIGN}"


def at_terminal(*words: str | Path, program: str = PROGRAM, columns: int = 80, **environment: str) -> tuple[int, str]:
    """Run a command at a terminal; return its status and all that it prints there."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = ("NO_COLOR", "COLUMNS", "TENSORCAS_STORE", "MLFLOW_TRACKING_URI")
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    running = Program(program, *words, stdio=(its, its, its), env={**kept, "TERM": "xterm-256color", **environment})
    os.close(its)
    told = b""
    try:
        while data := os.read(own, 1 << 16):
            told += data
    except OSError:  # the other end is closed
        pass
    os.close(own)
    return running.wait(60), told.decode().replace("\r\n", "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = Store.init(tmp_path / "store")
    for step in range(1, 4):
        tensors = {"a long name of a tensor that no narrow terminal holds": np.full(40_000, step), "b": np.ones(3)}
        with store.write_checkpoint(tensors) as save:
            save.commit(RefTarget(run_id="train", step=step))
    return tmp_path / "store"


# --- tables


ROWS = [["model:m-0123456789abcdef", "12.0 MB"], ["file a", "1 B"]]


def test_plain_tables_align_columns_across_sections() -> None:
    lines = plain_lines([("first", ROWS[:1]), ("second", ROWS[1:])], heading=["what", "size"], right={1}, indent=2)

    assert lines == [
        f"  {'what':24}  {'size':>7}",
        "first",
        "  model:m-0123456789abcdef  12.0 MB",
        "second",
        f"  {'file a':24}  {'1 B':>7}",
    ]


def test_tables_at_a_wide_terminal_have_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    sections = [("first", ROWS[:1]), ("second", ROWS[1:])]

    assert folded_lines(sections, right={1}, indent=2, width=80) == plain_lines(sections, right={1}, indent=2)


def test_narrow_terminals_fold_names_and_never_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    lines = folded_lines([("", ROWS)], right={1}, width=24)

    assert max(map(len, lines)) <= 24
    assert [line.rstrip().endswith(size) for line, size in ((lines[0], "12.0 MB"), (lines[-1], "1 B"))] == [True, True]
    assert "".join(line.split("  ")[0].strip() for line in lines[:-1]) == "model:m-0123456789abcdef"


def test_a_table_without_rows_prints_its_heading_alone() -> None:
    assert plain_lines([("", [])], heading=["what", "size"], right={1}) == ["what  size"]
    assert plain_lines([]) == folded_lines([], width=80) == []


def test_cells_are_no_markup() -> None:
    assert "[bold]x[/bold]" in "\n".join(folded_lines([("", [["[bold]x[/bold]"]])], width=80))


@pytest.mark.long
def test_a_terminal_gets_styles_unless_no_color_says_otherwise(root: Path) -> None:
    status, styled = at_terminal("show", "train", "--root", root, columns=120)
    _, plain = at_terminal("show", "train", "--root", root, columns=120, NO_COLOR="1")
    _, dumb = at_terminal("show", "train", "--root", root, columns=120, TERM="dumb")

    assert status == 0
    assert ESCAPE in styled
    assert ESCAPE not in plain + dumb
    assert re.sub(r"\x1b\[[\d;]*m", "", styled) == plain == dumb


@pytest.mark.long
def test_a_pipe_gets_plain_text_of_any_width(root: Path) -> None:
    done = run_program(PROGRAM, "show", "train", "--root", root)

    assert ESCAPE not in done.stdout
    assert "a long name of a tensor that no narrow terminal holds  int64" in done.stdout


@pytest.mark.long
def test_a_pipe_does_not_wait_for_the_library_of_the_terminal(root: Path) -> None:
    script = (
        "import sys; from tensorcas_mlflow.cli import main; "
        f"main(['list', '--root', {str(root)!r}]); main(['verify', '--full', '--root', {str(root)!r}]); "
        "print(sorted({'rich', 'shtab', 'mlflow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=root)

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.long
def test_a_narrow_terminal_shows_every_number(root: Path) -> None:
    _, told = at_terminal("show", "train", "--root", root, columns=40, NO_COLOR="1")

    assert " 320000 " in told
    assert max(map(len, told.splitlines()[6:-1])) <= 40


# --- progress


@pytest.mark.parametrize(
    ("progress", "elapsed_s", "said"),
    [
        (Progress(done_bytes=0, n_bytes=1000), 0.0, "0 B of 1.0 KB, 0%"),
        (Progress(done_bytes=250, n_bytes=1000), 2.0, "250 B of 1.0 KB, 25%, 125 B/s, 0:06 left"),
        (Progress(done_bytes=1000, n_bytes=1000), 2.0, "1.0 KB of 1.0 KB, 100%, 500 B/s, 0:00 left"),
        (Progress(done_bytes=500, n_done=1, n=4), 10.0, "1 of 4, 500 B, 25%, 50 B/s, 0:30 left"),
        (Progress(done_bytes=500), 10.0, "500 B, 50 B/s"),
        (Progress(done_bytes=0, n_bytes=0), 10.0, "0 B, 0 B/s"),
    ],
)
def test_progress_says_the_share_the_rate_and_the_time_left(progress: Progress, elapsed_s: float, said: str) -> None:
    assert figures_text(progress, elapsed_s) == said


def test_the_share_is_of_bytes_or_else_of_items_and_never_more_than_all() -> None:
    assert share_of(Progress(done_bytes=3, n_bytes=2)) == 1.0
    assert share_of(Progress(done_bytes=3, n_done=1, n=2)) == 0.5
    assert share_of(Progress(done_bytes=3)) is None


def test_times_have_hours_where_they_need_them() -> None:
    assert [time_text(each) for each in (0, 59.6, 61, 3600, 36_061)] == ["0:00", "1:00", "1:01", "1:00:00", "10:01:01"]


def test_counted_bytes_never_exceed_their_total() -> None:
    told: list[Progress] = []
    add = counted(told.append, 10)
    for _ in range(3):
        add(4)

    assert [(each.done_bytes, each.n_bytes) for each in told] == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize(("whole", "part", "said"), [(23, 10, "2.3"), (10, 10, ""), (1, 10, ""), (5, 0, "")])
def test_a_ratio_is_said_only_if_something_is_smaller(whole: int, part: int, said: str) -> None:
    assert ratio_text(whole, part) == (f"{said} {TIMES} smaller" if said else "")


def commands(root: Path, folder: Path) -> dict[str, list[str | Path]]:
    np.savez(folder / "file.npz", w=np.arange(100_000.0))
    return {
        "reading": ["repair", "--dry-run", root],
        "copying": ["copy", root, folder / "copy"],
        "importing": ["import", folder / "file.npz", "--run", "new", "--step", "1", "--root", root],
    }


@pytest.mark.long
def test_long_work_shows_a_bar_at_a_terminal(root: Path, tmp_path: Path) -> None:
    for what, words in commands(root, tmp_path).items():
        status, told = at_terminal(*words, program=SLOWLY, columns=160)

        assert status == 0, told
        assert re.search(rf"{what}.*\d%, .*B/s", told), (what, told)
        if what == "importing":
            assert set(re.findall(r" of ([\d.]+ \w+), \d+%", told)) == {"800.0 KB"}


@pytest.mark.long
def test_work_that_says_nothing_shows_a_bar_too(root: Path) -> None:
    silent = f"""
import time
import tensorcas_mlflow.cli._progress as p
import tensorcas_mlflow.maintenance._optimize as o
p._PATIENCE_S = p._PAUSE_S = 0.0
p._TICK_S = 0.05
execute = o._execute
def slow(*arguments):
    time.sleep(0.5)
    return execute(*arguments)
o._execute = slow
{PROGRAM}"""
    status, told = at_terminal("optimize", "--yes", "--root", root, program=silent)

    assert status == 0
    assert re.search(r"optimizing .*0:00 so far", told)


@pytest.mark.long
def test_quiet_dumb_terminals_and_short_work_have_no_bar(root: Path) -> None:
    words = ["verify", "--full", root]
    for told in (
        at_terminal(*words, "--quiet", program=SLOWLY),
        at_terminal(*words, program=SLOWLY, TERM="dumb"),
        at_terminal(*words, program=PROGRAM),
    ):
        assert told == (0, "3 checkpoints and files, 3 packs, 7 chunks, every one read: no problem found\n")


@pytest.mark.long
def test_a_pipe_gets_no_progress(root: Path, tmp_path: Path) -> None:
    for words in commands(root, tmp_path).values():
        done = run_program(SLOWLY, *words)

        assert (done.returncode, done.stderr) == (0, "")


# --- completion


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command_and_option(shell: str) -> None:
    without_mlflow = "import sys; from tensorcas_mlflow.cli import main; main(); sys.exit('mlflow' in sys.modules)"
    command = [sys.executable, "-c", without_mlflow, "completion", shell]
    script = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    for word in ("list", "adopt", "repair", "dry-run", "max-waste"):
        assert word in script


@pytest.mark.long
def test_bash_completes_commands(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(run_program(PROGRAM, "completion", "bash", check=True).stdout)
    ask = f"source {tmp_path}/script; COMP_WORDS=(tensorcas op); COMP_CWORD=1; _shtab_tensorcas; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)

    assert done.stdout.split() == ["optimize"]
