"""Check of recipes: each is read, its inputs are looked up, and a full verification evaluates it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, distinct_digests, hex_of
from tensorcas_mlflow.errors import CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Manifest, Mask, Table, read_recipe, recipe_key
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, is_among
from tensorcas_mlflow.maintenance._recipe_rows import RecipeRows, read_recipes, rows_of_recipe
from tensorcas_mlflow.maintenance._verify_derived import DerivedChecks
from tensorcas_mlflow.store import Store


class RecipeChecks:
    """The recipes of a store, for its verification."""

    def __init__(self, store: Store) -> None:
        """Read the recipes.

        Args:
            store: Store to check.

        Raises:
            NewerFormatError: A later release wrote one.
            BackendError: The storage failed.
        """
        self._store = store
        self._recipes: dict[str, Manifest] = {}
        self.damaged: dict[str, CorruptError] = {}
        """Errors of recipes that cannot be read, by name."""
        self.wrong: dict[str, str] = {}
        """Reasons why recipes make other bytes than they say, by name; see `find_lost`."""
        self._products: Digests = NO_DIGESTS
        self.refresh()

    def refresh(self) -> None:
        """Read new recipes, and forget those that are gone."""
        self._recipes, self.damaged = read_recipes(self._store.backend, known=self._recipes)
        self._products = distinct_digests(each.digests for each in self._recipes.values())

    def are_products(self, digests: Digests) -> Mask:
        """Return for each chunk whether a recipe says how to make it; `find_lost` tells whether that goes."""
        return is_among(digests, self._products) if len(self._products) else np.zeros(len(digests), dtype=bool)

    def find_lost(
        self, table: Table, damaged: Mapping[bytes, tuple[str, str]], *, full: bool
    ) -> dict[bytes, tuple[str, str]]:
        """Find the chunks that no pack holds and that no recipe makes, though one says so.

        Args:
            table: All chunks that packs hold and that can be decoded as far as is known.
            damaged: Chunks without a sound copy in a pack, with the pack and the reason.
            full: Whether to evaluate the recipes. Those that make other bytes are in `wrong` then.

        Returns:
            For each such chunk, by its digest, the key of a recipe and the reason; also the damaged chunks that no
            recipe makes.
        """
        lost: dict[bytes, tuple[str, str]] = {}
        made: list[Digests] = []
        for name, recipe in self._recipes.items():
            rows = rows_of_recipe(name, recipe)
            faults = _faults_of_inputs(rows, table, damaged)
            found = _evaluate(self._store, recipe) if full else {}
            wrong = {at: found[each.row] for at, each in enumerate(recipe.derived) if each.row in found}
            wrong = {at: reason for at, reason in wrong.items() if at not in faults}
            if wrong:
                self.wrong[name] = next(iter(wrong.values()))
                faults |= wrong
            is_made = ~np.isin(np.arange(len(rows)), [*faults])[rows.product_row]
            made.append(rows.products[is_made])
            for at, digest in zip(rows.product_row[~is_made].tolist(), rows.products[~is_made], strict=True):
                lost[digest.tobytes()] = recipe_key(name), faults[at]
        is_held = table.find(_digests_of(lost)) >= 0
        lost = {text: fault for (text, fault), held in zip(lost.items(), is_held.tolist(), strict=True) if not held}
        lost |= damaged
        is_lost = ~is_among(_digests_of(lost), distinct_digests(made))
        return {text: fault for (text, fault), each in zip(lost.items(), is_lost.tolist(), strict=True) if each}


def fault_of_recipe(store: Store, name: str, products: Digests | None = None) -> str | None:
    """Evaluate a recipe; return the reason why it does not make all that it says, or None.

    Args:
        store: The store.
        name: Name of the recipe.
        products: Evaluate only the rows that make one of these chunks; by default all.
    """
    try:
        recipe = read_recipe(store.backend, name)
    except (NotFoundError, FormatError) as error:
        return str(getattr(error, "reason", error))
    rows: Collection[int] | None = None
    if products is not None:
        rows = set(recipe.columns.rows_of(np.flatnonzero(is_among(recipe.digests, products))).tolist())
    return next(iter(_evaluate(store, recipe, rows).values()), None)


def _evaluate(store: Store, recipe: Manifest, rows: Collection[int] | None = None) -> dict[int, str]:
    """Evaluate rows of a recipe, by default all; return those that do not come out as it says, and why."""
    checks = DerivedChecks(store)
    faults = [*checks.add((), recipe, rows), *checks.finish()]
    return {fault.derivation.row: str(getattr(fault.error, "reason", fault.error)) for fault in faults}


def _faults_of_inputs(rows: RecipeRows, table: Table, damaged: Mapping[bytes, tuple[str, str]]) -> dict[int, str]:
    """Return the reasons why packs do not give the inputs of some rows, by the number of the row."""
    faults: dict[int, str] = {}
    is_damaged = is_among(rows.inputs, _digests_of(damaged))
    for number, digest in zip(rows.input_row[is_damaged].tolist(), rows.inputs[is_damaged], strict=True):
        pack, reason = damaged[digest.tobytes()]
        faults.setdefault(number, f"its input, chunk {hex_of(digest)} in {pack}, is damaged: {reason}")
    missing = np.flatnonzero(table.find(rows.inputs) < 0)
    numbers, first, counts = np.unique(rows.input_row[missing], return_index=True, return_counts=True)
    for number, at, n in zip(numbers.tolist(), missing[first], counts.tolist(), strict=True):
        more = f" and {n - 1} more" if n > 1 else ""
        faults[number] = f"no pack that can be read holds its input, chunk {hex_of(rows.inputs[at])}{more}"
    return faults


def _digests_of(texts: Collection[bytes]) -> Digests:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(-1, DIGEST_BYTES)
