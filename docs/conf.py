"""Settings of the documentation site, which `make docs` builds."""

import argparse
import re
from typing import Any

project = "tensorcas-mlflow"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "tensorcas-mlflow"
html_extra_path = ["llms.txt"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# `hex` marks bytes that a test parses, which Pygments does not know.
suppress_warnings = ["misc.highlighting_failure"]
default_role = "code"
"""Role of `names in single backticks` in docstrings."""
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def _rewrite_fences(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turn code between fences, as our docstrings have it, into a directive of reStructuredText."""
    text = _FENCE.sub(_directive, "\n".join(lines))
    lines[:] = text.splitlines()


def _directive(found: re.Match[str]) -> str:
    code = "\n".join(f"    {line}" if line else "" for line in found[2].splitlines())
    return f".. code-block:: {found[1]}\n\n{code}\n"


_fields: dict[str, list[str]] = {}
"""Docstrings of fields, by name, as they were before napoleon."""


def _keep_field(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Remember the docstring of a field: napoleon takes the text before a colon for the field's type."""
    if what == "attribute":
        _fields[name] = lines[:]


def _restore_field(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    if name in _fields:
        lines[:] = _fields.pop(name)


_COMMAND = re.compile(r"^## `tensorcas (\w+)`\n", flags=re.MULTILINE)


def _read_page(app: Any, docname: str, source: list[str]) -> None:
    if docname == "command-line":
        source[0] = with_help(source[0])


def with_help(page: str) -> str:
    """Put what ``tensorcas COMMAND --help`` says below the heading of each command on the page of the command line."""
    from tensorcas_mlflow.cli._main import parser

    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return _COMMAND.sub(lambda found: f"{found[0]}\n{_help_of(commands.choices[found[1]])}\n", page)


def _help_of(command: argparse.ArgumentParser) -> str:
    """Return the help of one command as Markdown: its purpose, its words and options, and its examples."""
    lines = [command.description or "", "", "| option | means |", "|---|---|"]
    formatter = command._get_formatter()
    for action in command._actions:
        if action.dest not in ("help", "root", "json"):
            words = ", ".join(f"`{word}`" for word in action.option_strings)
            value = "" if action.nargs == 0 else f" `{formatter._format_args(action, action.dest.upper())}`"
            means = re.sub(r"([*|<])", r"\\\1", formatter._expand_help(action))
            lines.append(f"| {words}{value} | {means} |")
    lines += ["", "```sh", *re.findall("^  (.+)$", command.epilog or "", flags=re.MULTILINE), "```"]
    return "\n".join(lines) + "\n"


_MADE_BY_CALLS = {f"tensorcas_mlflow.Checkpoint{name}" for name in ("Info", "Reader", "Record")}


def _hide_constructor(
    app: Any, what: str, name: str, obj: object, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Hide the arguments of classes that users do not make themselves."""
    return ("", None) if name in _MADE_BY_CALLS else (signature, returned)


def setup(app: Any) -> None:
    """Connect the hooks of this file to Sphinx. Napoleon has the priority 500."""
    app.connect("source-read", _read_page)
    app.connect("autodoc-process-docstring", _rewrite_fences, priority=400)
    app.connect("autodoc-process-docstring", _keep_field, priority=450)
    app.connect("autodoc-process-docstring", _restore_field, priority=550)
    app.connect("autodoc-process-signature", _hide_constructor)
