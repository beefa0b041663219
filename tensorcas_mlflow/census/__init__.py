"""What a store's manifests and packs say, remembered from one collection to the next.

Manifests and packs never change and their names are never used again, so what one of them said when it was read is
true for ever. `Census` gathers such facts, writes them into one blob of the store, and reads them back; a collection
then reads only what has come since (``docs/format.md``, Census).
"""

from tensorcas_mlflow.census._blob import census_bytes, read_census
from tensorcas_mlflow.census._census import PREFIX, Census
from tensorcas_mlflow.census._facts import NO_BASE, Facts, RefSeen, facts_of_manifests, facts_of_packs, merge_facts

__all__ = [
    "NO_BASE",
    "PREFIX",
    "Census",
    "Facts",
    "RefSeen",
    "census_bytes",
    "facts_of_manifests",
    "facts_of_packs",
    "merge_facts",
    "read_census",
]
