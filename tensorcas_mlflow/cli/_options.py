"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import argparse
import math

from tensorcas_mlflow._texts import size_in


def add_checkpoint(made: argparse.ArgumentParser, *, step_help: str, is_step_required: bool) -> None:
    """Add the options that name one checkpoint."""
    made.add_argument("--run", metavar="ID", required=True, help="the run it belongs to")
    made.add_argument("--step", metavar="N", type=int, required=is_step_required, help=step_help)
    made.add_argument(
        "--name",
        help="where a run has several of one step: the name of its series ('' for none), its model's id, its "
        "artifact path, or its key in the store",
    )


def add_yes(made: argparse.ArgumentParser) -> None:
    """Add the option of commands that ask before they delete."""
    made.add_argument("-y", "--yes", action="store_true", help="do not ask before deleting")


def hours(text: str) -> float:
    """Read a number of hours; like the others here it is for argparse, and raises what that reports."""
    return _number(text, most=math.inf, what="a number of hours")


def part(text: str) -> float:
    """Read a number from 0 to 1."""
    return _number(text, most=1.0, what="a number from 0 to 1")


def percent(text: str) -> float:
    """Read a number of percent, as a number from 0 to 1."""
    return _number(text.removesuffix("%"), most=100.0, what="a number of percent, 0 to 100") / 100


def share_of(text: str) -> tuple[int, int]:
    """Read ``K/N``, one of several parts."""
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of several parts, such as 3/7")
    return int(k), int(n)


def _number(text: str, *, most: float, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most or math.isinf(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


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
