"""Comparison of two checkpoints, tensor by tensor and number by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorcas_mlflow.chunking import Offsets
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.reader._contents import Contents
from tensorcas_mlflow.reader._part import PartContents
from tensorcas_mlflow.reader._reader import CheckpointReader
from tensorcas_mlflow.reader._stored import RowContents
from tensorcas_mlflow.reader._value_diff import ValueChange, ValueDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDiff:
    """The result of `diff`: names of tensors by what became of them, in the order of the checkpoints.

    It is true if anything differs: ``if diff(before, after): …``.
    """

    added: tuple[str, ...]
    """Only in the second."""
    removed: tuple[str, ...]
    """Only in the first."""
    changed: tuple[str, ...]
    """In both, with another dtype, shape or other bytes."""
    equal: tuple[str, ...]
    """In both, the same to the bit."""
    other: tuple[str, ...]
    """Content beside the tensors that differs.

    ``skeleton`` (what is left of a model without its tensors), ``left_out`` (tensors that no array holds),
    ``metadata``, ``adapter``, ``order`` (the order of the tensors that both have), and ``bytes`` (what a file of
    another format holds besides the tensors that can be read). Skeletons and files are compared by their bytes, so
    those of equal objects may differ.
    """
    added_bytes: int
    removed_bytes: int
    changed_bytes: int
    """Size of what changed, as it is in the second."""
    equal_bytes: int
    values: Mapping[str, ValueChange] = field(default_factory=dict)
    """How far the numbers of changed tensors are apart, where they have one dtype and shape in both, if it was asked
    for."""

    @property
    def is_equal(self) -> bool:
        """True if nothing differs: then, and only then, the checkpoints have one `CheckpointReader.digest`."""
        return not (self.added or self.removed or self.changed or self.other)

    def __bool__(self) -> bool:
        return not self.is_equal


def diff(before: CheckpointReader, after: CheckpointReader, *, values: bool = False) -> CheckpointDiff:
    """Compare two checkpoints, steps, models or files, of one store or of several.

    Tensors and skeletons are equal if their digests are (`CheckpointReader.digest`), which are known without reading
    them. They are read only where the two are cut into different chunks, or one is a foreign file. A reader of a part
    (`CheckpointReader.below`) counts all of the checkpoint's other content as the part's.

    Args:
        before: The first.
        after: The second.
        values: Whether to read what has changed, and say by how much.

    Raises:
        TensorCasError: What has to be read cannot be.
    """
    old, new = before._row_of(), after._row_of()
    common = [name for name in new if name in old]
    is_equal = _are_equal(before, after, common)
    changed = [name for name, same in zip(common, is_equal, strict=True) if not same]
    equal = [name for name, same in zip(common, is_equal, strict=True) if same]
    added = [name for name in new if name not in old]
    removed = [name for name in old if name not in new]
    others, its_others = before._other_content(), after._other_content()
    kinds = {kind for kind in others.keys() | its_others.keys() if others.get(kind) != its_others.get(kind)}
    if common != [name for name in old if name in new]:
        kinds.add("order")
    return CheckpointDiff(
        added=tuple(added),
        removed=tuple(removed),
        changed=tuple(changed),
        equal=tuple(equal),
        other=tuple(sorted(kinds)),
        added_bytes=after._n_bytes_of(added),
        removed_bytes=before._n_bytes_of(removed),
        changed_bytes=after._n_bytes_of(changed),
        equal_bytes=after._n_bytes_of(equal),
        values=_values(before, after, changed) if values else {},
    )


def _are_equal(before: CheckpointReader, after: CheckpointReader, names: Sequence[str]) -> list[bool]:
    old, new = before._row_of(), after._row_of()
    was, now = (np.array([numbers[name] for name in names], dtype=np.int64) for numbers in (old, new))
    one, other = before._contents, after._contents
    stored, its_stored = _rows_of(one, was), _rows_of(other, now)
    proven = np.zeros(len(names), dtype=bool)
    refuted = np.zeros(len(names), dtype=bool)
    if stored is not None and its_stored is not None:
        # Equal chunks are equal bytes, however they were cut. All of them are compared at once.
        (manifest, rows), (its_manifest, its_rows) = stored, its_stored
        proven = manifest.columns.equal(rows, its_manifest.columns, its_rows)
        if manifest.chunk_bytes == its_manifest.chunk_bytes:
            # Of what is cut alike, different chunks are different bytes.
            refuted = ~(proven | _has_cuts(manifest, rows) | _has_cuts(its_manifest, its_rows))
    left = [at for at in np.flatnonzero(~(proven | refuted)).tolist() if _are_alike(one, was[at], other, now[at])]
    found = zip(before._identity_bytes(was[left]), after._identity_bytes(now[left]), strict=True)
    proven[left] = [digests == its_digests for digests, its_digests in found]
    return proven.tolist()


def _are_alike(one: Contents, row: int, other: Contents, its: int) -> bool:
    spec, its_spec = one.specs.spec(row), other.specs.spec(its)
    return (spec.dtype, spec.shape) == (its_spec.dtype, its_spec.shape)


def _rows_of(contents: Contents, rows: Offsets) -> tuple[Manifest, Offsets] | None:
    """Find tensors among the rows of a manifest; None where they are not of one."""
    if isinstance(contents, PartContents):
        return _rows_of(contents.whole, contents.row_of[rows])
    return (contents.manifest, contents.row_of[rows]) if isinstance(contents, RowContents) else None


def _has_cuts(manifest: Manifest, rows: Offsets) -> np.ndarray[Any, np.dtype[np.bool_]]:
    cuts = manifest.columns.cuts
    return np.zeros(len(rows), dtype=bool) if cuts is None else cuts.given[rows]


def _values(before: CheckpointReader, after: CheckpointReader, names: Sequence[str]) -> dict[str, ValueChange]:
    specs = {name: before.spec(name) for name in names}
    alike = [name for name in names if specs[name].n_bytes and specs[name] == after.spec(name)]
    found: dict[str, ValueDifference] = {}
    # How tensors are divided into pieces follows from their sizes alone, so both come in the same ones.
    for (name, was), (_, now) in zip(before.stream(alike), after.stream(alike), strict=True):
        if name not in found:
            found[name] = ValueDifference(specs[name].numpy_dtype)
        found[name].add(was, now)
    return {name: difference.result() for name, difference in found.items()}
