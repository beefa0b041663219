"""Which installed packages a pickle names, found without reading it."""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Set
from functools import cache
from importlib.metadata import packages_distributions, version
from typing import Any

from tensorcas_flavors._pickling import MAGIC, is_pickle
from tensorcas_mlflow.adapter import Array

_MEMOIZING = frozenset(["BINPUT", "LONG_BINPUT", "MEMOIZE"])
_GETTING = frozenset(["BINGET", "LONG_BINGET"])


def named_modules(skeleton: Array) -> set[str]:
    """Name the top-level modules whose classes and functions a skeleton's pickle refers to. Nothing is unpickled.

    A damaged pickle names what it names before the damage. One that was made to mislead may name others.
    """
    if not is_pickle(skeleton):
        return set()
    modules: set[str] = set()
    memo: dict[Any, str] = {}
    pushed = ["", ""]  # the last two texts pushed: what STACK_GLOBAL takes
    n_memoized = 0
    last = ""
    try:
        for opcode, argument, _ in pickletools.genops(skeleton[len(MAGIC) :].tobytes()):
            name = opcode.name
            if name in _MEMOIZING:
                memo[n_memoized if name == "MEMOIZE" else argument] = last
                n_memoized += 1
                continue
            last = ""
            if "UNICODE" in name:
                last = str(argument)
            elif name in _GETTING:
                last = memo.get(argument, "")
            elif name == "STACK_GLOBAL":
                modules.add(pushed[0].partition(".")[0])
            elif name == "GLOBAL":
                modules.add(str(argument).split(" ")[0].partition(".")[0])
            if last:
                pushed = [pushed[1], last]
    except ValueError:
        pass
    return {module for module in modules if module.isidentifier()}


def pinned_packages(modules: Set[str], *, but: Set[str] = frozenset()) -> list[str]:
    """Pin the installed distributions of modules as pip requirements; what belongs to none is left out.

    Args:
        modules: Top-level names.
        but: Names to leave out, because what is required anyway brings them along.
    """
    wanted = modules - but - sys.stdlib_module_names - {"__main__", "tensorcas_mlflow", "tensorcas_flavors"}
    if not wanted:
        return []
    distributions = {name for module in wanted for name in _distributions().get(module, [])}
    # A local label such as +cpu is on no index.
    return sorted(f"{name}=={version(name).partition('+')[0]}" for name in distributions)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())
