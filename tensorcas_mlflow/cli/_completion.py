"""The command ``completion``: it prints a shell's script that completes commands, options and files."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator

from tensorcas_mlflow.cli._command import Command, option
from tensorcas_mlflow.cli._output import say

SHELLS = ("bash", "zsh", "tcsh")
_PATHS = {"root", "place", "what", "path", "out", "source", "destination", "sources"}
"""Options and arguments whose values may be files or folders."""


def complete(options: Namespace) -> int:
    """Print the script of a shell."""
    import shtab  # only this command needs it

    from tensorcas_mlflow.cli._main import parser

    program = parser()
    for each in _all_actions(program):
        if each.dest in _PATHS:
            each.complete = shtab.FILE  # type: ignore[attr-defined]
    say(shtab.complete(program, shell=options.shell))
    return 0


def _all_actions(program: ArgumentParser) -> Iterator[Action]:
    for each in program._actions:
        yield each
        if isinstance(each, _SubParsersAction):
            for command in each.choices.values():
                yield from _all_actions(command)


COMMANDS = (
    Command(
        name="completion",
        help="print a script that completes commands and options in a shell",
        examples=["completion bash", "completion zsh"],
        options=[option("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")],
        run=complete,
    ),
)
