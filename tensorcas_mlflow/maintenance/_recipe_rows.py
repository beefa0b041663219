"""The rows of recipes as arrays: the chunks that each row makes, and those that it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from tensorcas_mlflow.backends import Backend, map_requests
from tensorcas_mlflow.base.digest import Digests, unique_rows
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError
from tensorcas_mlflow.layout import Manifest, Mask, list_recipes, read_recipe
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, RowNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRows:
    """Rows of recipes. A row is made of its own inputs, whatever becomes of the other rows of its recipe.

    Chunks are digests, or what `with_chunks` has put in their place.
    """

    names: tuple[str, ...]
    """Names of the recipes."""
    recipe: RowNumbers
    """For each row a position in ``names``, ascending."""
    products: Any
    """Chunks that the rows make, each once for each row."""
    product_row: RowNumbers
    """For each of ``products`` its row, ascending."""
    inputs: Any
    """Chunks that the rows take, each once for each row."""
    input_row: RowNumbers
    """For each of ``inputs`` its row, ascending."""

    def __len__(self) -> int:
        return len(self.recipe)

    def of(self, names: Collection[str]) -> Mask:
        """Return for each row whether it is of one of some recipes."""
        chosen = np.array([name in names for name in self.names], dtype=bool)
        rows: Mask = chosen[self.recipe]
        return rows

    def recipes_with(self, rows: Mask) -> frozenset[str]:
        """Return the names of the recipes of some rows."""
        return frozenset(self.names[number] for number in np.unique(self.recipe[rows]))

    def complete(self, there: Mask) -> Mask:
        """Return for each row whether all its inputs are there, given for each of ``inputs``."""
        rows: Mask = np.bincount(self.input_row[~there], minlength=len(self)) == 0
        return rows

    def making(self, wanted: Mask) -> Mask:
        """Return for each row whether it makes a wanted product, given for each of ``products``."""
        rows: Mask = np.bincount(self.product_row[wanted], minlength=len(self)) > 0
        return rows

    def made_by(self, rows: Mask) -> Any:
        """Return the products of some rows, which may repeat."""
        return self.products[rows[self.product_row]]

    def taken_by(self, rows: Mask) -> Any:
        """Return the inputs of some rows, which may repeat."""
        return self.inputs[rows[self.input_row]]

    def only(self, there: Mask) -> RecipeRows:
        """Keep the rows whose inputs are all there; see `complete`."""
        rows = self.complete(there)
        number, makes, takes = np.cumsum(rows) - 1, rows[self.product_row], rows[self.input_row]
        return replace(
            self,
            recipe=self.recipe[rows],
            products=self.products[makes],
            product_row=number[self.product_row[makes]],
            inputs=self.inputs[takes],
            input_row=number[self.input_row[takes]],
        )

    def with_chunks(self, find: Callable[[Digests], RowNumbers]) -> RecipeRows:
        """Put something else in the place of digests, such as their positions in a table."""
        return replace(self, products=find(self.products), inputs=find(self.inputs))


def rows_of_recipe(name: str, recipe: Manifest) -> RecipeRows:
    """Return the rows of one recipe, in the order of its ``derived``."""
    derived = recipe.derived
    products, product_row = _distinct(recipe, np.arange(len(derived)), [each.row for each in derived])
    sources = [row for each in derived for row in each.sources]
    of_source = np.repeat(np.arange(len(derived)), [len(each.sources) for each in derived])
    inputs, input_row = _distinct(recipe, of_source, sources)
    return RecipeRows(
        names=(name,),
        recipe=np.zeros(len(derived), dtype=np.int64),
        products=products,
        product_row=product_row,
        inputs=inputs,
        input_row=input_row,
    )


def _distinct(recipe: Manifest, of: RowNumbers, rows: Collection[int]) -> tuple[Digests, RowNumbers]:
    """Return the chunks of rows of a table, each once for each of the numbers ``of`` that the rows belong to."""
    table, numbers = recipe.table, np.array(rows, dtype=np.int64)
    chunks = table.chunks_of(numbers)
    n_chunks = table.chunk_at[numbers + 1] - table.chunk_at[numbers]
    digests, _, chunk = unique_rows(table.digests[chunks])
    pairs = np.unique(np.repeat(of, n_chunks) * max(1, len(digests)) + chunk)
    at, chunk = np.divmod(pairs, max(1, len(digests)))
    return digests[chunk], at


def join_rows(parts: Iterable[RecipeRows]) -> RecipeRows:
    """Join the rows of different recipes, in the order given. Their chunks are digests."""
    parts = list(parts)
    n_names = np.cumsum([0, *(len(part.names) for part in parts)])
    n_rows = np.cumsum([0, *map(len, parts)])
    none = np.empty(0, dtype=np.int64)
    numbered = list(enumerate(parts))
    return RecipeRows(
        names=tuple(name for part in parts for name in part.names),
        recipe=np.concatenate([none, *(part.recipe + n_names[n] for n, part in numbered)]),
        products=np.concatenate([NO_DIGESTS, *(part.products for part in parts)]),
        product_row=np.concatenate([none, *(part.product_row + n_rows[n] for n, part in numbered)]),
        inputs=np.concatenate([NO_DIGESTS, *(part.inputs for part in parts)]),
        input_row=np.concatenate([none, *(part.input_row + n_rows[n] for n, part in numbered)]),
    )


T = TypeVar("T")


def read_recipes(
    backend: Backend, *, known: Mapping[str, T]
) -> tuple[dict[str, Manifest | T], dict[str, CorruptError]]:
    """Read the recipes of a store, in a remote store many at once.

    Args:
        backend: Backend of the store.
        known: What is to stand for some of them, which are not read again.

    Returns:
        The recipes by name, ascending; and the errors of those that cannot be read.

    Raises:
        NewerFormatError: A later release wrote one.
        BackendError: The storage failed.
    """

    def read(name: str) -> Manifest | T | CorruptError | None:
        if name in known:
            return known[name]
        try:
            return read_recipe(backend, name)
        except BlobNotFoundError:
            return None
        except CorruptError as error:
            return error

    recipes: dict[str, Manifest | T] = {}
    faults: dict[str, CorruptError] = {}
    names = sorted(list_recipes(backend))
    for name, found in zip(names, map_requests(backend, read, names), strict=True):
        if isinstance(found, CorruptError):
            faults[name] = found
        elif found is not None:
            recipes[name] = found
    return recipes, faults


def read_recipe_rows(
    backend: Backend, known: Mapping[str, RecipeRows]
) -> tuple[dict[str, RecipeRows], dict[str, CorruptError]]:
    """Read the rows of the recipes of a store, by name; see `read_recipes`."""
    found, faults = read_recipes(backend, known=known)
    rows = {name: rows_of_recipe(name, each) if isinstance(each, Manifest) else each for name, each in found.items()}
    return rows, faults
