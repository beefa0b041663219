"""Check of recipes: each is read, its inputs are looked up, and a full verification evaluates it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, distinct_digests, hex_of
from tensorcas_mlflow.errors import CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Derivation, Manifest, Mask, Table, read_recipe, recipe_key
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, is_among, read_recipes
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
        made: set[bytes] = set()
        for name, recipe in self._recipes.items():
            key = recipe_key(name)
            reasons = {each.row: _fault_of_inputs(recipe, each, table, damaged) for each in recipe.derived}
            found = _evaluate(self._store, recipe) if full else {}
            wrong = {row: reason for row, reason in found.items() if reasons[row] is None}
            if wrong:
                self.wrong[name] = next(iter(wrong.values()))
            for row, reason in ({**reasons, **wrong}).items():
                texts = [digest.tobytes() for digest in recipe.rows[row].digests]
                if reason is None:
                    made.update(texts)
                else:
                    lost |= dict.fromkeys(texts, (key, reason))
        is_held = table.find(np.frombuffer(b"".join(lost), np.uint8).reshape(-1, DIGEST_BYTES)) >= 0
        lost = {text: fault for (text, fault), held in zip(lost.items(), is_held.tolist(), strict=True) if not held}
        return {text: fault for text, fault in {**lost, **damaged}.items() if text not in made}


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


def _fault_of_inputs(
    recipe: Manifest, each: Derivation, table: Table, damaged: Mapping[bytes, tuple[str, str]]
) -> str | None:
    """Return the reason why packs do not give the inputs of a row of a recipe; None if they do."""
    chunks = recipe.table.chunks_of(np.array(each.sources, dtype=np.int64))
    inputs = distinct_digests([recipe.table.digests[chunks]])
    missing = np.flatnonzero(table.find(inputs) < 0)
    if len(missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"no pack that can be read holds its input, chunk {hex_of(inputs[missing[0]])}{more}"
    for digest in inputs if damaged else ():
        if (fault := damaged.get(digest.tobytes())) is not None:
            return f"its input, chunk {hex_of(digest)} in {fault[0]}, is damaged: {fault[1]}"
    return None
