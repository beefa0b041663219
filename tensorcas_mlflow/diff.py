"""What two checkpoints share and where they differ, told from their manifests: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorcas_mlflow.manifest import Manifest, Row


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
    old, new = before.by_name, after.by_name
    common = [name for name in new if name in old]
    is_equal = [_same(old[name], new[name]) for name in common]
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


def _same(one: Row, other: Row) -> bool:
    # What an identity is the digest of. Compared as it is, 100,000 tensors cost no hashing.
    return (
        one.spec.dtype == other.spec.dtype
        and one.spec.shape == other.spec.shape
        and one.digests.tobytes() == other.digests.tobytes()
    )


def _size(manifest: Manifest, names: Iterable[str]) -> int:
    return sum(manifest.by_name[name].spec.n_bytes for name in names)
