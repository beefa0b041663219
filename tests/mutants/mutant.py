"""A fault in our own code, and the test that must see it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tensorcas_mlflow", "flavors/tensorcas_flavors")
_DEFINITION = re.compile(r"^[ \t]*(?:(?:async[ ]+)?def[ ]+|class[ ]+)?(\w+)\s*[\[(:=]", re.MULTILINE)
_MOST_NAMED = 10
"""Places that an error names one by one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The package without one rule, and the test that injects the fault which the rule is for.

    No path is written down: a mutant survives a move of its module and of its test, a new layout of the code, and a
    changed comment.
    """

    fault: str
    """The fault that the test injects, in a few words; no two mutants have the same."""
    test: str
    """The test's name, ``test_…``, ``test_…[parameters]`` or ``TestClass::test_…``. It may be a long test."""
    definition: str
    """The function, class or constant to change, such as ``Store.commit``; modules and packages are not named.

    Where several modules define that name, exactly one definition holds ``before``.
    """
    before: str
    """An expression or statements. Exactly one place of the definition has the same syntax tree.

    ``...`` stands for any expression; alone in a body, for any statements; alone in a call, for any arguments.
    """
    after: str
    """The expression or statements to put there; nothing deletes the statements."""

    def apply(self) -> tuple[str, str]:
        """Return the path of the changed module, from the project's root, and its new text."""
        candidates = _definers(PACKAGES, self.definition)
        parts = [(path, part) for path in candidates for name, part in _parse(path) if name == self.definition]
        places = [(path, place) for path, part in parts for place in self._places_in(part)]
        if len(places) != 1:
            defined = ", ".join(candidates) or "no module"
            found = ", ".join(f"{path}:{place[0].lineno}" for path, place in places) or f"not there{self._elsewhere()}"
            raise ValueError(f"{self.definition} is defined in {defined}; `before` is {found}:\n{self.before}")
        [(path, place)] = places
        return path, _replace(_text(path), place, self.after)

    def node_id(self) -> str:
        """Return the test's id for pytest."""
        name, bracket, parameters = self.test.partition("[")
        paths = _definers(("tests",), name.replace("::", "."))
        if len(paths) != 1:
            raise ValueError(f"{name} is defined in {paths or 'no file of tests'}; name exactly one test")
        return f"{paths[0]}::{name}{bracket}{parameters}"

    def _elsewhere(self) -> str:
        """Name the definitions that hold ``before``; the code may have moved to one of them."""
        words = re.findall(r"[^\W\d]\w*", self.before)
        found = [
            f"{name} ({path}:{place[0].lineno})"
            for path in _paths(PACKAGES)
            if all(word in _text(path) for word in words)  # parsing all takes many seconds
            for name, part in _parse(path)
            if not isinstance(part, ast.ClassDef)  # its methods are named
            for place in self._places_in(part)
        ]
        if len(found) > _MOST_NAMED:
            return f", but in {len(found)} other places"
        return f", but in {', '.join(found)}" if found else " nor anywhere else"

    def _places_in(self, part: ast.stmt) -> list[list[ast.expr] | list[ast.stmt]]:
        """Find the code to replace: one expression, or statements that follow each other."""
        nodes = list(_walk(ast.Module([part], [])))
        expression = _expression(self.before)
        if expression is not None and _expression(self.after) is not None:
            return [[node] for node in nodes if isinstance(node, ast.expr) and _is_like(node, expression)]
        wanted = _statements(self.before)
        bodies = [body for node in nodes for _, body in ast.iter_fields(node) if _is_body(body)]
        runs = [body[at : at + len(wanted)] for body in bodies for at in range(len(body) - len(wanted) + 1)]
        return [run for run in runs if all(map(_is_like, run, wanted))]


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Return the mutants of each ``of_<subject>.py`` beside this file, which lists some as ``MUTANTS``."""
    subjects = sorted(path.stem for path in Path(__file__).parent.glob("of_*.py"))
    return tuple(each for name in subjects for each in importlib.import_module(f"tests.mutants.{name}").MUTANTS)


def _definers(folders: tuple[str, ...], name: str) -> list[str]:
    """Find the modules that define a name; parse only those that may, as parsing all takes many seconds."""
    first, *others = (_candidates(folders)[word] for word in name.split("."))
    return [path for path in first if all(path in other for other in others) and name in _names(path)]


@cache
def _candidates(folders: tuple[str, ...]) -> dict[str, list[str]]:
    """Map each word that begins a line like a definition to the modules that have such a line."""
    found = defaultdict(list)
    for path in _paths(folders):
        for word in dict.fromkeys(_DEFINITION.findall(_text(path))):
            found[word].append(path)
    return found


@cache
def _paths(folders: tuple[str, ...]) -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def _names(path: str) -> frozenset[str]:
    return frozenset(name for name, _ in _parse(path))


@lru_cache(maxsize=16)  # syntax trees are large
def _parse(path: str) -> list[tuple[str, ast.stmt]]:
    return [*_named(ast.parse(_text(path)).body)]


def _named(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield all functions, classes and constants, with qualified names; a nested function is part of the outer one."""
    for part in body:
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name, part
            case ast.ClassDef(name=name):
                yield prefix + name, part
                yield from _named(part.body, f"{prefix}{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, part


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but nothing inside an f-string: Python 3.11 does not say where that stands."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.JoinedStr):
            left.extend(reversed([*ast.iter_child_nodes(node)]))


@cache
def _expression(text: str) -> ast.expr | None:
    if not text:  # () would be a tuple
        return None
    try:
        return ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:
        return None


@cache
def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text)).body


def _is_body(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _is_ellipsis(node: object) -> bool:
    match node:
        case ast.Constant(value=value):
            return value is ...
        case ast.Expr(value=value):
            return _is_ellipsis(value)
    return False


def _is_like(found: object, wanted: object) -> bool:
    """Compare two parts of syntax trees, of which ``wanted`` may have ellipses."""
    if isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) == 1 and _is_ellipsis(wanted[0]):
            return True
        return len(found) == len(wanted) and all(map(_is_like, found, wanted))
    if isinstance(wanted, ast.expr_context):  # a snippet that is assigned to is parsed as one that is read
        return True
    if not isinstance(wanted, ast.AST):
        return type(found) is type(wanted) and found == wanted
    if isinstance(found, ast.expr) and _is_ellipsis(wanted):
        return True
    if isinstance(wanted, ast.Call) and isinstance(found, ast.Call) and wanted.args and _is_ellipsis(wanted.args[0]):
        return _is_like(found.func, wanted.func)
    return type(found) is type(wanted) and all(
        _is_like(getattr(found, field), getattr(wanted, field)) for field in wanted._fields
    )


def _replace(text: str, place: list[ast.expr] | list[ast.stmt], new: str) -> str:
    """Put other code where some nodes of a module stand, and leave the rest of its text alone."""
    lines = text.encode().splitlines(keepends=True)  # a column counts bytes
    first, last = place[0], place[-1]
    assert last.end_lineno is not None
    begin = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + (last.end_col_offset or 0)
    if isinstance(first, ast.expr):
        new = f"({new})"
    else:
        new = textwrap.indent(textwrap.dedent(new).strip() or "pass", " " * first.col_offset).lstrip()
    return (text.encode()[:begin] + new.encode() + text.encode()[end:]).decode()
