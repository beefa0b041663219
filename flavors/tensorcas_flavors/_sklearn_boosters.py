"""XGBoost's boosters inside scikit-learn models: their rows are those of the adapter for XGBoost, under the path."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError

_XGBOOST = XGBoostAdapter()


def is_booster(part: object) -> bool:
    """Tell whether an object is an `xgboost.Booster`, without importing XGBoost."""
    return type(part).__qualname__ == "Booster" and type(part).__module__ == "xgboost.core"


def is_foreign_booster(part: object) -> bool:
    """Tell whether an object is a `lightgbm.Booster`: its model is a text, and what its attributes hold varies."""
    return type(part).__qualname__ == "Booster" and type(part).__module__ == "lightgbm.basic"


def booster_rows(path: str, booster: Any) -> dict[str, Array]:
    """Return the rows of a booster.

    Raises:
        AdapterError: It has not been trained, or holds what cannot be stored exactly.
    """
    return {f"{path}/{name}": row for name, row in _XGBOOST.extract(booster).items()}


def booster_paths(names: Collection[str]) -> list[str]:
    """Return the paths of the boosters among names of rows."""
    return [name.removesuffix(f"/{SKELETON}") for name in names if name.endswith(f"/{SKELETON}")]


def split_off(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return the rows that belong to no booster, and those of each booster by its path."""
    rest = dict(tensors)
    boosters = {}
    for path in booster_paths(tensors):
        names = [name for name in rest if name.startswith(f"{path}/")]
        boosters[path] = {name.removeprefix(f"{path}/"): rest.pop(name) for name in names}
    return rest, boosters


def booster_cuts(path: str, rows: Mapping[str, Array]) -> dict[str, Sequence[int]]:
    """Say where a booster's rows are cut; see `Adapter.cuts`."""
    return {f"{path}/{name}": ends for name, ends in _XGBOOST.cuts(rows).items()}


def make_booster(rows: Mapping[str, Array]) -> Any:
    """Return the booster of some rows.

    Raises:
        AdapterError: They are not those of a booster.
    """
    booster = _XGBOOST.reconstruct(rows)
    if not is_booster(booster):
        raise AdapterError(_XGBOOST.name, f"a {type(booster).__name__} is stored where a booster was")
    return booster


def fill_booster(rows: Mapping[str, Array], booster: Any) -> None:
    """Give a live booster the stored trees and all that goes with them; no pickle is read.

    Raises:
        AdapterError: The rows are not those of a booster; the live one is as it was.
    """
    _XGBOOST.reconstruct(rows, booster)
