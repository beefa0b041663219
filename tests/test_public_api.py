"""The public names and signatures of the package, pinned: a change of the API changes `public_api.txt`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorcas_mlflow as tensorcas

PINNED = Path(__file__).with_name("public_api.txt")
PAGE = Path(__file__).parents[1] / "docs/api.md"
STUB = Path(__file__).parents[1] / "mlflow-stubs/tensorcas.pyi"


def describe() -> str:
    """Write out the public API: one parameter, field or method a line."""
    return "\n".join(line for name in tensorcas.__all__ for line in _lines_of(name, getattr(tensorcas, name))) + "\n"


def _lines_of(name: str, value: object) -> Iterator[str]:
    if value is tensorcas.errors:
        yield "module errors"
        yield from (f"    {each}" for each in _errors())
    elif inspect.isclass(value):
        yield f"class {name}"
        yield from _members(value)
    elif callable(value):
        yield f"def {name}{_signature(value, 4)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _signature(function: object, indent: int) -> str:
    found = inspect.signature(function)  # type: ignore[arg-type]
    parts: list[str] = []
    for name, parameter in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{name}: {parameter.annotation}{default}")
    return f" -> {found.return_annotation}" + "".join(f"\n{' ' * indent}{part}" for part in parts)


def _members(kind: type) -> Iterator[str]:
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            if not field.name.startswith("_"):
                given = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
                yield f"    {field.name}: {field.type}{given}"
    elif kind is not tensorcas.CheckpointReader:  # users do not make one themselves
        yield f"    __init__{_signature(kind.__init__, 8)}"  # type: ignore[misc]
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, classmethod):
            yield f"    classmethod {name}{_signature(member.__func__, 8)}"
        elif inspect.isfunction(member):
            yield f"    def {name}{_signature(member, 8)}"
        elif isinstance(member, property):
            yield f"    property {name}: {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]


def _errors() -> Iterator[str]:
    for name, error in sorted(vars(tensorcas.errors).items()):
        if inspect.isclass(error) and error.__module__ == tensorcas.errors.__name__:
            yield f"{name}({', '.join(base.__name__ for base in error.__bases__)})"


def test_public_names_and_signatures_are_the_pinned_ones() -> None:
    """After an intended change, run ``python -m tests.test_public_api > tests/public_api.txt``."""
    assert describe() == PINNED.read_text(encoding="utf-8")


def test_page_of_the_api_lists_every_public_name() -> None:
    names = re.findall(r"^\| `(\w+)[(`]", PAGE.read_text(encoding="utf-8").split("## Words")[0], re.MULTILINE)

    assert sorted(names) == [name for name in tensorcas.__all__ if name != "__version__"]


def test_stub_of_the_mlflow_module_names_the_public_names() -> None:
    names = re.findall(r"^    (\w+) as \1,$", STUB.read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(names) == [name for name in tensorcas.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", ["TensorCasStore", "CheckpointReader", "Naming", "errors", "__version__"])
def test_names_of_the_store_import_no_mlflow(name: str) -> None:
    script = f"import sys, tensorcas_mlflow; tensorcas_mlflow.{name}; print('mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


def test_import_of_the_package_imports_none_of_its_modules() -> None:
    script = "import sys, tensorcas_mlflow; print([name for name in sys.modules if name.startswith('tensorcas')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "['tensorcas_mlflow']\n"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'log_modle'"):
        tensorcas.log_modle  # type: ignore[attr-defined] # noqa: B018


if __name__ == "__main__":
    sys.stdout.write(describe())
