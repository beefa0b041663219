"""Recipes: chunks that no pack holds, made of chunks that packs hold (``docs/format.md``, Recipes)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tensorcas_mlflow.backends import Backend, map_requests
from tensorcas_mlflow.base.digest import Digests, as_keys, distinct_digests, unique_rows
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import (
    BlobNotFoundError,
    ChunkNotFoundError,
    CorruptChunkError,
    CorruptError,
    NewerFormatError,
)
from tensorcas_mlflow.layout import Manifest, is_recipe_of, list_recipes, read_recipe

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io._catalog import Catalog
    from tensorcas_mlflow.chunk_io._decode import Wanted
    from tensorcas_mlflow.chunk_io._derive import LastRow


class InputReader(Protocol):
    """Reader that uses no recipe."""

    def read_chunks(self, manifest: Manifest, chunks: Any, outs: Any, *, verify: bool, last: LastRow) -> None:
        """Read chunks of a manifest's content; see `ChunkReader.read_chunks`."""


class NamesChunks(Protocol):
    """Owner of chunks; see `ChunkOwner`."""

    @property
    def label(self) -> str | None:
        """Its name in words."""

    def names(self, chunks: Any) -> tuple[str, ...]:
        """Return the names of some chunks' tensors, by the chunks' numbers."""


_N_AT_ONCE = 32
_MOST_KEPT_BYTES = 64 << 20
"""Bound of the recipes that a process keeps for one store."""


class _Recipe(NamedTuple):
    name: str
    manifest: Manifest
    products: Digests
    """The distinct products, ascending."""
    first: Any
    """For each the number of its first chunk in the recipe."""

    @property
    def n_bytes(self) -> int:
        """About the bytes that it takes in memory."""
        return 2 * len(self.manifest.stream) + self.products.nbytes


class _Products(NamedTuple):
    """Some chunks that one recipe makes."""

    recipe: _Recipe
    at: Any
    """Numbers of the chunks among those that were asked for."""
    chunks: Any
    """For each its number among the chunks of the recipe; ascending."""


class KnownRecipes:
    """The recipes of one store, as far as this process has read them. A recipe never changes. For any thread."""

    def __init__(self, backend: Backend, catalog: Catalog, reader: InputReader | None) -> None:
        """Read nothing yet.

        Args:
            backend: Backend of the store.
            catalog: Catalog of that backend.
            reader: Reader of the inputs, which uses no recipe; None makes nothing.
        """
        self._backend = backend
        self._catalog = catalog
        self._reader = reader
        self._lock = Lock()
        self._known: OrderedDict[str, _Recipe] = OrderedDict()
        """The recipes at hand by name; the oldest of too many are forgotten, and read again."""
        self._n_bytes = 0
        """About the bytes that these take."""
        self._damaged: frozenset[str] = frozenset()
        self.newer: NewerFormatError | None = None
        """The error of a recipe of a later release, which makes nothing here."""
        self._last: tuple[str, LastRow] | None = None
        """The row that was evaluated last, of the recipe of a name."""

    def refresh(self, digests: Digests | None = None, *, of: str | None = None) -> None:
        """List the recipes, read new ones, and forget those that are gone. Damaged ones make nothing.

        Args:
            digests: Read no more once known recipes make all of these chunks; by default read all recipes.
            of: Digest of a manifest: read only the recipes that were found for it.

        Raises:
            BackendError: The storage failed.
        """
        if self._reader is None:
            return
        names = list_recipes(self._backend)
        with self._lock:
            for name in self._known.keys() - names.keys():
                self._n_bytes -= self._known.pop(name).n_bytes
            new = sorted(names.keys() - self._known.keys() - self._damaged)
        if of is not None:
            new = [name for name in new if is_recipe_of(name, of)]
        for begin in range(0, len(new), _N_AT_ONCE):
            if digests is not None and self.make_all(digests):
                return
            some = new[begin : begin + _N_AT_ONCE]
            for name, found in zip(some, map_requests(self._backend, self._read, some), strict=True):
                self._learn(name, found)

    def _learn(self, name: str, found: _Recipe | CorruptError | None) -> None:
        with self._lock:
            if isinstance(found, CorruptError):
                self._damaged |= {name}
            elif found is not None and name not in self._known:
                self._known[name] = found
                self._n_bytes += found.n_bytes
                while self._n_bytes > _MOST_KEPT_BYTES and len(self._known) > 1:
                    self._n_bytes -= self._known.popitem(last=False)[1].n_bytes

    def _read(self, name: str) -> _Recipe | CorruptError | None:
        try:
            manifest = read_recipe(self._backend, name)
        except BlobNotFoundError:
            return None
        except CorruptError as error:
            return error
        except NewerFormatError as error:
            self.newer = error
            return CorruptError(name, str(error))
        products, first, _ = unique_rows(manifest.digests)
        return _Recipe(name, manifest, products, first)

    def make_all(self, digests: Digests) -> bool:
        """Tell whether known recipes make each of some chunks of what packs hold."""
        return bool(len(digests)) and sum(len(each.at) for each in self._find(digests)) == len(digests)

    def inputs_of(self, digests: Digests) -> Digests:
        """Return the distinct chunks that the recipes of some chunks take, ascending."""
        found: list[Digests] = []
        for each in self._find(digests):
            manifest = each.recipe.manifest
            derived = manifest.derivations(distinct(manifest.columns.rows_of(each.chunks)))
            sources = np.array([row for one in derived.values() for row in one.sources], dtype=np.int64)
            found.append(manifest.table.digests[manifest.table.chunks_of(sources)])
        return distinct_digests(found)

    def make(self, wanted: Wanted, numbers: Any, owner: NamesChunks, chunks: Any = None) -> bool:
        """Make some of the wanted chunks in their places, and compare each with its digest.

        Args:
            wanted: Chunks and their places.
            numbers: Numbers of those to make.
            owner: Owner of the chunks, for errors.
            chunks: Numbers by which the owner knows the wanted chunks; by default their own.

        Returns:
            False, and nothing is made, if known recipes do not make all of them.

        Raises:
            ChunkNotFoundError: An input is gone meanwhile.
            CorruptChunkError: An input is damaged, or the function gives other bytes.
        """
        found = list(self._find(wanted.digests[numbers]))
        if self._reader is None or sum(len(each.at) for each in found) < len(numbers):
            return False
        for each in found:
            mine = numbers[each.at]
            outs = [wanted.target.view(number) for number in mine.tolist()]
            recipe, last = each.recipe, self._last_of(each.recipe)
            try:
                self._reader.read_chunks(recipe.manifest, each.chunks, outs, verify=wanted.verify, last=last)
            except (CorruptChunkError, ChunkNotFoundError) as error:
                of_owner = owner.names(mine if chunks is None else chunks[mine])
                raise error.needed_by(owner.label, of_owner) from error
        return True

    def _last_of(self, recipe: _Recipe) -> LastRow:
        from tensorcas_mlflow.chunk_io._derive import LastRow

        last = self._last
        if last is None or last[0] != recipe.name:
            self._last = last = recipe.name, LastRow()
        return last[1]

    def _find(self, digests: Digests) -> Iterator[_Products]:
        """Find rows of recipes that make some chunks, and whose inputs lie in packs; each chunk once.

        Args:
            digests: Digests of the chunks, which may repeat.
        """
        with self._lock:
            known = list(self._known.values())
        keys, is_found = as_keys(digests) if known else None, np.zeros(len(digests), dtype=bool)
        for recipe in known:
            mine = as_keys(recipe.products)
            places = np.minimum(mine.searchsorted(keys), len(mine) - 1)
            at = np.flatnonzero((mine[places] == keys) & ~is_found)
            if len(at):
                chunks = recipe.first[places[at]]
                is_made = self._are_made(recipe.manifest, chunks)
                at, chunks = at[is_made], chunks[is_made]
                is_found[at] = True
                order = np.argsort(chunks, kind="stable")
                yield _Products(recipe, at[order], chunks[order])

    def _are_made(self, recipe: Manifest, chunks: Any) -> Any:
        """Return for some chunks of a recipe whether packs hold the inputs of their rows."""
        rows = recipe.columns.rows_of(chunks)
        wanted = distinct(rows)
        sources = [each.sources for each in recipe.derivations(wanted).values()]
        inputs = [recipe.table.digests[recipe.table.chunks_of(np.array(each, dtype=np.int64))] for each in sources]
        unique, _, number = unique_rows(np.concatenate(inputs))
        is_missing = ~self._catalog.find(unique).found[number]
        of_row = np.repeat(np.arange(len(wanted)), [len(each) for each in inputs])
        n_missing = np.bincount(of_row, weights=is_missing, minlength=len(wanted))
        return (n_missing == 0)[wanted.searchsorted(rows)]
