"""The program: its parser, and the exit status of a command."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NoReturn

import tensorcas_mlflow
from tensorcas_mlflow.cli._command import JSON, ROOT, Command, refuse_second
from tensorcas_mlflow.cli._output import complain
from tensorcas_mlflow.errors import CorruptError, TensorCasError

_OPTIONS = {
    "overwrite=True": "--overwrite",
    "allow_left_out=True": "--skip-unknown",
    "in TENSORCAS_STORE": "by --root or TENSORCAS_STORE",
    "(mlflow.tensorcas.delete_checkpoint)": "(tensorcas delete)",
    "and name=": "and --name ",
    "and step=": "and --step ",
    "pass format=": "pass --file-format (convert: --out-format)",
}
"""Words of messages for callers in Python, and their command-line equivalents."""

DONE, FAILED, INTERRUPTED, UNREAD = 0, 1, 130, 141
"""Exit statuses. argparse adds 2 for a command line it cannot read, and commands add some of their own."""

_MODULES = {
    "_look": "list stats du show diff lineage explain",
    "_maintenance": "init verify repair optimize delete",
    "_gc": "gc",
    "_adopt": "adopt",
    "_transfer": "copy import export convert",
    "_completion": "completion",
}
"""The commands of each module, so that a command waits for the import of its own module alone."""

_EXAMPLES = """\
examples:
  tensorcas list --root /data/mlflow            list the content of the store, by run
  tensorcas stats --root /data/mlflow           count duplicates, and bytes on disk
  tensorcas du vision                           find the runs that take most bytes, in an experiment
  tensorcas show baseline --step 20             show the tensors of one checkpoint
  tensorcas show models:/digits@champion        show the tensors of a registered model
  tensorcas diff 8f3c21 --steps 10 20           compare two checkpoints
  tensorcas lineage 8f3c21                      find the models that a model was made from
  tensorcas verify --full                       read every chunk and compare it with its digest
  tensorcas repair --from /backup/mlflow        repair the store from a backup
  tensorcas delete --run 8f3c21 --step 3        delete one checkpoint
  tensorcas gc                                  delete the content that no checkpoint needs
  tensorcas optimize                            store everything in less space
  tensorcas copy /data/mlflow /backup/mlflow    back a store up, or update the backup
  tensorcas import m.safetensors --run 8f3c21 --step 0   make a checkpoint of a file
  tensorcas export --run 8f3c21 m.safetensors   write the tensors of a checkpoint into a file
  tensorcas convert m.pt m.safetensors          write the tensors of a file into another format
  tensorcas adopt mlruns --dry-run              say what a store would save for existing runs

exit status: 0 done, 1 error, 2 wrong usage, 3 verify found problems or repair left some, 4 copy kept differences,
5 diff found a difference, 130 interrupted
"""


def _commands(first: str | None) -> Iterator[Command]:
    modules = [module for module, names in _MODULES.items() if first in names.split()] or _MODULES
    for module in modules:
        yield from import_module(f"tensorcas_mlflow.cli.{module}").COMMANDS


class _Parser(argparse.ArgumentParser):
    """A parser that takes options between arguments, and whose errors name the word that was probably meant."""

    _is_between = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse words, those of a command in any order: ``export RUN --step 3 FILE``."""
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if has_commands or self._is_between:
            return super().parse_known_args(args, namespace)
        self._is_between = True  # the call below comes back here, for options and then for arguments
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_between = False

    def error(self, message: str) -> NoReturn:
        """Report a wrong use; see `argparse.ArgumentParser.error`."""
        unknown = re.search(r"COMMAND: invalid choice: '(.*?)'|unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            import difflib  # only a typing error needs it

            command, option = unknown.groups()
            known = " ".join(_MODULES.values()).split() if command else self._options()
            if command:
                message = f"there is no command {command!r}"
            close = difflib.get_close_matches(command or option, known, n=1)
            message += f": did you mean {close[0]!r}?" if close else f"; `{self.prog} --help` lists all"
        elif message.endswith("required: COMMAND"):
            message += f"; `{self.prog} --help` lists all"
        super().error(message)

    def _options(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        options: list[str] = []
        for action in self._actions:
            options += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                options += [option for made in action.choices.values() for option in made._options()]
        return options


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The commands. An option before a command is not given again after it."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        before = vars(namespace).pop("given_once", set())
        super().__call__(parser, namespace, values, option_string)
        for dest in sorted(before & vars(namespace).get("given_once", set())):
            refuse_second(namespace.parser, f"--{dest}")


class _Version(argparse.Action):
    """Prints the version, and leaves; it is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(f"tensorcas {tensorcas_mlflow.__version__}")
        parser.exit(DONE)


def parser(first: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of the program; its results have the function of the command as ``act``.

    Args:
        first: The first word to parse. If it is a command, the parser knows only the commands of its module.
    """
    # SUPPRESS keeps an option given before the command from being reset by the default of the one after it.
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for shared in (ROOT, JSON):
        shared.add_to(common)
    program = _Parser(
        prog="tensorcas",
        description="Work on a store of deduplicated checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    program.add_argument("--version", action=_Version, nargs=0, help="print the version, and leave")
    commands = program.add_subparsers(action=_Commands, required=True, metavar="COMMAND", title="commands")
    for command in _commands(first):
        made = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog="examples:\n" + "".join(f"  tensorcas {line}\n" for line in command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[common],
        )
        for each in command.options:
            each.add_to(made)
        made.set_defaults(parser=made, act=command.run)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after ``tensorcas``; None for those of this process.

    Returns:
        The exit status: 0; 1 after an error, reported in one line on standard error; 130 after an interrupt; 141 if
        the reader of the output went away; or one of the command's own.

    Raises:
        SystemExit: The words are no command (2), or ask for help (0).
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser(words[0] if words else None).parse_args(words)
    try:
        status: int = options.act(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it exits, and would report the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except CorruptError as error:
        _fail(f"{error}; `tensorcas verify` lists all damage, `tensorcas repair` repairs it as far as possible")
        return FAILED
    except (TensorCasError, ValueError, OSError, ImportError, MemoryError) as error:
        _fail(str(error) or type(error).__name__)
        return FAILED
    except Exception as error:
        if not _is_mlflows(error):
            raise
        _fail(" ".join(str(error).split()))
        return FAILED
    return status


def _fail(reason: str) -> None:
    for in_python, here in _OPTIONS.items():
        reason = reason.replace(in_python, here)
    complain(f"error: {reason}")


def _is_mlflows(error: Exception) -> bool:
    """Tell whether an error is MLflow's own, without importing MLflow."""
    exceptions = sys.modules.get("mlflow.exceptions")
    return exceptions is not None and isinstance(error, exceptions.MlflowException)
