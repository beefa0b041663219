"""Repair of damaged recipes: from another store that has the same one, or into quarantine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Manifest, list_recipes, read_recipe, recipe_key
from tensorcas_mlflow.maintenance._quarantine import keep_blob
from tensorcas_mlflow.maintenance._recipe_rows import RecipeRows, rows_of_recipe
from tensorcas_mlflow.maintenance._verify_recipes import fault_of_recipe
from tensorcas_mlflow.store import Store


def read_for_repair(
    backend: Backend,
) -> tuple[dict[str, RecipeRows], dict[str, CorruptError | BackendError]]:
    """Read the recipes of a store.

    Returns:
        The rows of those that can be read, and the errors of the others, by name.

    Raises:
        NewerFormatError: A later release wrote one.
        BackendError: The storage failed to list them.
    """
    found: dict[str, RecipeRows] = {}
    faults: dict[str, CorruptError | BackendError] = {}
    for name in sorted(list_recipes(backend)):
        try:
            recipe = read_recipe(backend, name)
        except BlobNotFoundError:
            continue
        except (CorruptError, BackendError) as error:
            faults[name] = error
        else:
            found[name] = rows_of_recipe(name, recipe)
    return found, faults


@dataclass(slots=True)
class MendedRecipes:
    """Result of the repair of recipes."""

    restored: list[str] = field(default_factory=list)
    """Keys of damaged recipes that another store has."""
    gone: list[str] = field(default_factory=list)
    """Keys of those that no other store has: their bytes are in quarantine."""
    left: dict[str, str] = field(default_factory=dict)
    """Keys of those that were left alone, and why."""


def find_recipe(name: str, others: Sequence[Store]) -> Manifest | None:
    """Find the same recipe in other stores, under any name.

    Args:
        name: Name of the damaged one, which begins with its digest.
        others: Stores in the order in which to ask them.
    """
    for other in others:
        with suppress(NotFoundError, FormatError, BackendError):
            for each in list_recipes(other.backend):
                if each[:64] == name[:64]:
                    return read_recipe(other.backend, each)
    return None


def mend_recipes(store: Store, bad: Mapping[str, str], found: Mapping[str, Manifest]) -> MendedRecipes:
    """Replace damaged and wrong recipes, and put those that no other store has into quarantine.

    Such a recipe makes nothing that counts. So its bytes may go once quarantine has them. The new
    one is written first, under a new name: names are never used again.

    Args:
        store: Store that is repaired.
        bad: Reasons why recipes cannot be read, or make other bytes than they say, by name.
        found: The same recipes of other stores, by the name here; see `find_recipe`. A wrong recipe is wrong there too.

    Raises:
        BackendError: The storage failed; another repair goes on from there.
    """
    done = MendedRecipes()
    backend = store.backend
    for name, reason in bad.items():
        key = recipe_key(name)
        try:
            now = fault_of_recipe(store, name)
        except BackendError as error:
            done.left[key] = error.reason
            continue
        if now is None:
            done.left[key] = "it is right now: check the memory and the disks of this machine"
            continue
        if name in found:
            backend.put_new(recipe_key(f"{name[:64]}.{uuid.uuid4().hex[:8]}"), [found[name].to_blob()])
        keep_blob(backend, key, reason)
        backend.delete(key)
        (done.restored if name in found else done.gone).append(key)
    return done
