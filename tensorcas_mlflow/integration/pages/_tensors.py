"""The data of a page that its script shows: a table of tensors that folds, and steps to choose from."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tensorcas_mlflow.integration.pages._facts import Tensors
from tensorcas_mlflow.integration.pages._render import visible

_MOST_NAME = 300
STATE_BYTES = 20
"""What a page says of the change of one tensor, compressed and in base64."""
_PAGE_BLOCK = 4096
_LEVEL = 6
"""Of compression. Level 9 takes three times as long, for 2 percent less."""

Value = tuple[float | None, float | None, float | None]
"""How much a tensor changed: relative norm, share of equal elements, largest change; None for what is not known."""


def packed_facts(
    tensors: Tensors,
    steps: Sequence[Mapping[str, Any]],
    *,
    at: int,
    values: Mapping[int, Value],
    is_estimate: bool = False,
    bits: bytes = b"",
    more: Mapping[str, Any],
) -> str:
    """Return the data of a page for its script: compressed JSON, a line break and bits, in base64.

    Args:
        tensors: The tensors.
        steps: The steps that the page can show: ``step``, ``created``, ``n``, ``nChanged``, ``changedBytes``,
            ``stored`` and ``isDropped`` of each.
        at: Index of the step that it shows first.
        values: How much tensors changed at that step, by number.
        is_estimate: Whether ``values`` are estimates.
        bits: See ``more``.
        more: Either ``state``, for each tensor a number of ``states``, pairs of a class of the style and words; or
            ``first`` and ``from``, as `Changes` has them, with a bit in ``bits`` for each step from there and each
            tensor, each step a whole number of bytes.
    """
    dtypes, dtype = _numbered(tensors.dtypes)
    shapes, shape = _numbered([shape_text(each) for each in tensors.shapes])
    facts: dict[str, Any] = {
        "names": [visible(name, _MOST_NAME) for name in tensors.names],
        "dtypes": [visible(each, _MOST_NAME) for each in dtypes],
        "dtype": dtype,
        "shapes": shapes,
        "shape": shape,
        "bytes": list(tensors.n_bytes),
        "steps": steps,
        "at": at,
        "valuesAt": at,
        "values": {number: [_rounded(each) for each in value] for number, value in values.items()} or None,
        "isEstimate": is_estimate,
        **more,
    }
    line = json.dumps(facts, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return base64.b64encode(zlib.compress(line.encode() + b"\n" + bits, _LEVEL)).decode()


def _numbered(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the distinct texts, and the number of each text among them."""
    number = {each: at for at, each in enumerate(dict.fromkeys(texts))}
    return list(number), [number[each] for each in texts]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape for people."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, shape)) or "scalar"


def whole_blocks(n_bytes: int) -> int:
    """Round the size of a page up."""
    return -(-n_bytes // _PAGE_BLOCK) * _PAGE_BLOCK
