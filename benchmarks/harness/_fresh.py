"""One sample in a new interpreter: the imports of a first call count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness._cache import drop_from_cache
from benchmarks.harness._series import Series

WHOLE = "whole process"
"""Figure added to those of each program: seconds from the start of the interpreter to its end."""

_BEGIN = "import time\n_begin = time.perf_counter()\n"
_END = """
import json, sys
_seconds = time.perf_counter() - _begin
print(json.dumps({"seconds": _seconds, "modules": len(sys.modules)} | globals().get("figures", {})))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program for a new interpreter. Its time begins before its first import."""

    text: str
    """Python. It may set ``figures``, a dict of numbers to report beside ``seconds`` and ``modules``."""
    args: tuple[str, ...]
    """The ``sys.argv[1:]`` of the program."""
    cold: Path | None = None
    """A folder to drop from the page cache just before; None leaves it warm."""


def interleave_fresh(
    programs: Mapping[str, Program], n_rounds: int, *, n_warm: int = 1
) -> dict[str, dict[str, Series]]:
    """Run each program once in every round, and return its figures by name.

    Args:
        programs: By name.
        n_rounds: How many rounds count.
        n_warm: How many rounds go before them and do not: they fill the file cache with the packages.

    Raises:
        subprocess.CalledProcessError: A program failed.
    """
    names = list(programs)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(-n_warm, n_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figures = _run(programs[name])
            if number >= 0:
                taken[name].append(figures)
    return {
        name: {figure: Series(tuple(each[figure] for each in of_name)) for figure in of_name[0]}
        for name, of_name in taken.items()
    }


def _run(program: Program) -> dict[str, float]:
    if program.cold is not None:
        drop_from_cache(program.cold)
    command = [sys.executable, "-c", f"{_BEGIN}{program.text}{_END}", *program.args]
    begin = time.perf_counter()
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    whole = time.perf_counter() - begin
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {WHOLE: whole}
