"""Declarations: a command, its options, and the options' values.

One word has one meaning in all commands, so options of several commands are declared here once. A share is a percentage
with its sign (``30%``), a duration has a unit (``24h``), and zero needs neither. A size has a unit (``5GB``).
"""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tensorcas_mlflow.base.engines import ENGINES, Engine, open_engine
from tensorcas_mlflow.base.text import seconds_in, size_in


class Once(argparse.Action):
    """Stores the value of an option, and refuses a second one, which argparse would take for the first in silence."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        note_given(parser, namespace, self)
        setattr(namespace, self.dest, values)


class _OnceOrNo(argparse.BooleanOptionalAction):
    """An option ``--this`` or ``--no-this``, given once."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        note_given(parser, namespace, self)
        super().__call__(parser, namespace, values, option_string)


def note_given(parser: ArgumentParser, namespace: Namespace, action: argparse.Action) -> None:
    """Note that an option is given, and refuse the second time."""
    given: set[str] = vars(namespace).setdefault("given_once", set())
    if action.dest in given:
        refuse_second(parser, action.option_strings[0])
    given.add(action.dest)


def refuse_second(parser: ArgumentParser, option: str) -> NoReturn:
    """Refuse an option that is given twice."""
    parser.error(f"{option} is given twice, and this command takes it once: run the command once for each value")


@dataclass(frozen=True, slots=True)
class Option:
    """One option or positional argument, as `argparse.ArgumentParser.add_argument` takes it."""

    words: tuple[str, ...]
    settings: dict[str, Any]

    def add_to(self, parser: ArgumentParser) -> None:
        """Declare the option to a parser."""
        once = {"action": Once} if self.words[0].startswith("-") else {}
        parser.add_argument(*self.words, **{**once, **self.settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: its words, its help, and its function."""

    name: str
    help: str
    """One line in the imperative, without a capital letter and a full stop."""
    examples: Sequence[str]
    """Command lines without the program's name."""
    options: Sequence[Option] = ()
    run: Callable[[Namespace], int]
    """Function from the parsed options to the exit status."""


def option(*words: str, **settings: Any) -> Option:
    """Declare an option, or, for a word without dashes, a positional argument."""
    return Option(words, settings)


def flag(*words: str, help: str) -> Option:
    """Declare an option without a value."""
    return option(*words, action="store_true", help=help)


def switch(*words: str, help: str) -> Option:
    """Declare an option ``--this`` with its opposite ``--no-this``; None if neither is given."""
    return option(*words, action=_OnceOrNo, help=help)


def repeated(word: str, **settings: Any) -> Option:
    """Declare a repeatable option."""
    return option(word, action="append", default=[], **settings)


# --- values; like all types of argparse they raise ArgumentTypeError


def duration(text: str) -> float:
    """Read a duration such as ``90s``, ``30m``, ``24h`` or ``30d``, as seconds."""
    seconds = seconds_in(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 30m, 24h or 30d")
    return seconds


def percentage(text: str) -> float:
    """Read a percentage such as ``30%``, as a number from 0 to 1."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    share = 0.0 if found is None else float(found[1]) / 100
    if (found is None and text != "0") or share > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage, 0% to 100%")
    return share


def part(text: str) -> tuple[int, int]:
    """Read ``K/N``, the K-th of N parts."""
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of several parts, such as 3/7")
    return int(k), int(n)


def size(text: str) -> int:
    """Read a number of bytes such as ``5GB`` or ``512MiB``."""
    n_bytes = size_in(text)
    if n_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 5GB or 512MiB")
    return n_bytes


def count(text: str) -> int:
    """Read a whole number from 1 on."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


# --- options of several commands

ROOT = option(
    "--root",
    metavar="PATH-OR-URI",
    help="the store: its root or any place below it, as a path or a URI such as tensorcas:///absolute/path; or the "
    "name or id of an experiment or run of MLflow, runs:/…, or models:/… (default: the environment variable "
    "TENSORCAS_STORE, else the working directory)",
)
PLACE = option("place", nargs="?", metavar="PLACE", help="the store, as for --root")
CHECKPOINT = option(
    "what",
    nargs="?",
    metavar="CHECKPOINT",
    help="a run (its name, its id, six or more characters of it, or runs:/ID), a model (models:/NAME/VERSION, "
    "models:/NAME@ALIAS, its id), or an artifact (its URI or path)",
)
JSON = option("--json", action="store_true", help="answer with one JSON document instead of text")
ONLY_RUN = option("--run", metavar="RUN", help="only the content of this run, by id, beginning of it, or name")
RUN = option("--run", metavar="RUN", help="the run of the checkpoint; the same as CHECKPOINT")
STEPS = (
    repeated("--step", metavar="N", type=int, help="step of the checkpoint, if CHECKPOINT is a run (repeatable)"),
    option("--steps", metavar="N", type=int, nargs="+", default=[], help="the steps of several checkpoints of a run"),
)
LAST_STEP = option("--step", metavar="N", type=int, help="step of the checkpoint (default: the last one)")
NAME = option(
    "--name",
    help="one of several checkpoints of a step: the name of its series ('' for none), the id of its model, its "
    "artifact path, or its key in the store",
)
NEW_NAME = option("--name", help="name of the series, if a run has several")
OVERWRITE = flag("--overwrite", help="replace existing content (default: refuse)")
DRY_RUN = flag("--dry-run", help="print the plan and stop")
YES = flag("-y", "--yes", help="do not ask for confirmation")
QUIET = flag("-q", "--quiet", help="print no progress")
ABANDON = repeated(
    "--abandon",
    metavar="KEY",
    help="give up the blob of this key, which the command named before: a save or a collector that is certainly dead, "
    "or bytes that nobody can read (repeatable)",
)
WORKERS = (
    option("--jobs", type=count, metavar="N", help="work in N processes of this machine (default: 1, with all cores)"),
    option(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="work in processes of this machine (default), or in the workers of a Ray cluster",
    ),
)


def engine_of(options: Namespace) -> Engine | None:
    """Open the engine of the options `WORKERS`; None for this process alone."""
    if options.engine != "local" and options.jobs is not None:
        options.parser.error(f"--jobs is for processes of this machine; --engine {options.engine} uses its cluster")
    try:
        return open_engine(options.engine, options.jobs)
    except ImportError as error:
        options.parser.error(f"--engine {options.engine} needs a package that is not installed: {error}")
        raise


TRACKING_URI = "--tracking-uri"
