"""What its users call the array that a pickle is just about to hold, told from what is unfinished on the stack."""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.containers._pickle_machine import Machine
from tensorcas_mlflow.containers._pickle_symbols import DICT, LIST, Made, Symbol, name_of

_MAX_DEPTH = 50
_MAX_PART = 200

HIDDEN = frozenset({"_parameters", "_buffers", "_modules"})
"""Where a torch module keeps what it has; a state dict's names go without."""


def name_of_next(machine: Machine) -> str:
    """Name what a pickle is about to hold by the keys, attributes and positions that lead to it.

    Returns:
        ``steps.scaler.mean_``, say, or ``estimators_.3.tree_.nodes``. "" for what
        lies too deep. The only item of a dict within a dict may lack what comes before its own key.
    """
    stack = machine.stack
    bounds = [0, *machine.marks, len(stack)]
    if len(bounds) > 2 * _MAX_DEPTH:
        return ""
    parts: list[str] = []
    for nth in range(len(bounds) - 1):
        container = stack[bounds[nth] - 1] if nth and bounds[nth] else None
        parts += reversed([*_keys(stack, bounds[nth], bounds[nth + 1], container)])
    return ".".join(part for part in parts if part not in HIDDEN and len(part) <= _MAX_PART)


def _keys(stack: list[Symbol], bottom: int, top: int, container: Symbol) -> Iterator[str]:
    """Say which items of what stands between two marks are unfinished, innermost first.

    Before the unfinished item stand a dict's finished keys and values in turn, or a list's finished elements. An object
    whose state is on its way has a dict above it, and a function whose arguments are, nothing of note.
    """
    in_dict = type(container) is Made and not container.is_made_by(LIST.name)
    in_list = type(container) is Made and container.is_made_by(LIST.name)
    for _ in range(_MAX_DEPTH):
        at = _value_at(stack, bottom, top - 1)
        key = stack[at - 1] if at > bottom else None
        if type(key) is not str and not (in_dict and type(key) is int):
            if in_list and at >= bottom:
                yield str(container.n_elements + at - bottom)
            return
        yield str(key)
        is_pair = in_dict and (at - 1 - bottom) % 2 == 0
        if is_pair or at - 2 < bottom or not _is_dict(stack[at - 2]):
            return
        top = at - 1


def _value_at(stack: list[Symbol], bottom: int, at: int) -> int:
    """Find where the value begins whose top is given: with the object below its state, or functions to be called."""
    if at > bottom and _is_dict(stack[at]) and type(stack[at - 1]) is Made:
        at -= 1
    while at > bottom and name_of(stack[at]) and name_of(stack[at - 1]):
        at -= 1
    return at


def _is_dict(symbol: Symbol) -> bool:
    return type(symbol) is Made and symbol.is_made_by(DICT.name)
