"""Recipes: blobs that say how to make chunks of other chunks (``docs/format.md``, Recipes)."""

from __future__ import annotations

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.errors import CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout._keys import list_blobs
from tensorcas_mlflow.layout._manifest import MAX_BYTES, Manifest

RECIPES = "recipes"
"""Prefix of the keys of recipes."""
_N_DIGITS = 8


def recipe_key(name: str) -> str:
    """Return the key of a recipe."""
    return f"{RECIPES}/{name}"


def new_recipe_name(recipe: Manifest, of: str) -> str:
    """Return the name of a new recipe.

    Args:
        recipe: The recipe; its metadata has a nonce, so that no two have one digest.
        of: Digest of the manifest for which it was found. Its readers look for its recipes first.
    """
    return f"{recipe.digest}.{of[:_N_DIGITS]}"


def is_recipe_of(name: str, of: str) -> bool:
    """Tell whether a recipe was found for the manifest of a digest, going by its name."""
    return name.rpartition(".")[2] == of[:_N_DIGITS]


def list_recipes(backend: Backend) -> dict[str, int]:
    """List the recipes of a store: names and sizes."""
    return {info.key.removeprefix(f"{RECIPES}/"): info.size for info in list_blobs(backend, RECIPES)}


def read_recipe(backend: Backend, name: str) -> Manifest:
    """Read a recipe: its products are the chunks of the manifest's rows, its inputs the `stored_digests`.

    Args:
        backend: Backend of the store.
        name: Name of the recipe.

    Raises:
        BlobNotFoundError: There is none.
        CorruptError: It is damaged, or no recipe.
        NewerFormatError: A later release wrote it.
    """
    key = recipe_key(name)
    blob = backend.get(key, max_bytes=MAX_BYTES)
    try:
        return Manifest.from_blob(blob, name, is_recipe=True).labelled(f"recipe {name[:16]}…")
    except NewerFormatError as error:
        raise NewerFormatError(f"{key!r}", error.version, error.supported) from error
    except FormatError as error:
        raise CorruptError(key, getattr(error, "reason", str(error))) from error
