"""Options of all commands: an option that takes one value takes it once."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path

import pytest

from tensorcas_mlflow.cli._command import Once
from tensorcas_mlflow.cli._main import parser
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas

_VALUES = {"percentage": "3%", "duration": "3h", "size": "3MB", "part": "1/3"}
"""A value of each type that does not read a number."""


def single_valued() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return each option with one value, of each command, and words to give for it."""
    found = []
    for name, made in commands().items():
        for action in made._actions:
            if action.option_strings and isinstance(action, Once):
                n_values = action.nargs if isinstance(action.nargs, int) else 1
                value = next(iter(action.choices or ["3"]))
                value = _VALUES.get(getattr(action.type, "__name__", ""), value)
                found.append((name, action.option_strings[0], (str(value),) * n_values))
    return found


def commands() -> dict[str, ArgumentParser]:
    [action] = [each for each in parser()._actions if isinstance(each, _SubParsersAction)]
    return action.choices


@pytest.mark.parametrize(("command", "option", "values"), single_valued())
def test_an_option_given_twice_is_refused(
    tensorcas: Tensorcas, command: str, option: str, values: tuple[str, ...]
) -> None:
    done = tensorcas(command, option, *values, option, *values)

    assert done.status == 2
    assert f"{option} is given twice" in done.err


def test_every_option_with_a_value_is_taken_once_or_is_a_list() -> None:
    lists = {(name, each.dest) for name, made in commands().items() for each in made._actions if "Append" in str(each)}

    for name, made in commands().items():
        for action in made._actions:
            takes_value = action.option_strings and action.nargs != 0
            assert not takes_value or isinstance(action, Once) or (name, action.dest) in lists
    assert ("delete", "step") in lists


CONTRADICTIONS = [("--root", "a", "list", "--root", "b"), ("init", "x", "--database", "--no-database")]


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(tensorcas: Tensorcas, words: tuple[str, ...]) -> None:
    done = tensorcas(*words)

    assert done.status == 2
    assert " is given twice" in done.err


def test_an_option_before_the_command_is_used(tensorcas: Tensorcas, tmp_path: Path) -> None:
    Store.init(tmp_path)

    assert tensorcas("--root", tmp_path, "--json", "list").json["store"]
