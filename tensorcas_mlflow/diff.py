"""What two checkpoints share and where they differ, told from their manifests: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tensorcas_mlflow.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Tensors of two checkpoints by what became of them, in the order the checkpoints list them."""

    added: tuple[str, ...]
    """Only in the second."""
    removed: tuple[str, ...]
    """Only in the first."""
    changed: tuple[str, ...]
    """In both, with another dtype, shape or other bytes."""
    equal: tuple[str, ...]
    """In both, the same to the bit."""
    added_bytes: int
    removed_bytes: int
    changed_bytes: int
    """Size of what changed, as it is in the second."""
    equal_bytes: int


def diff(before: Manifest, after: Manifest) -> Diff:
    """Compare two checkpoints, tensor by tensor.

    Two tensors of one name are equal if their identities are (`Row.identity`). Checkpoints of one store are compared
    exactly. Where the chunk sizes of two stores differ, or cuts do, equal bytes can count as changed.

    Args:
        before: The first checkpoint.
        after: The second.
    """
    old, new = before.by_name.numbers, after.by_name.numbers
    common = [name for name in new if name in old]
    was, now = (np.array([numbers[name] for name in common], dtype=np.int64) for numbers in (old, new))
    is_equal = before.columns.equal(was, after.columns, now).tolist()
    added = [name for name in new if name not in old]
    removed = [name for name in old if name not in new]
    changed = [name for name, same in zip(common, is_equal, strict=True) if not same]
    equal = [name for name, same in zip(common, is_equal, strict=True) if same]
    return Diff(
        added=tuple(added),
        removed=tuple(removed),
        changed=tuple(changed),
        equal=tuple(equal),
        added_bytes=_size(after, added),
        removed_bytes=_size(before, removed),
        changed_bytes=_size(after, changed),
        equal_bytes=_size(after, equal),
    )


def _size(manifest: Manifest, names: Iterable[str]) -> int:
    return int(manifest.columns.n_bytes[manifest.numbers(names)].sum())
