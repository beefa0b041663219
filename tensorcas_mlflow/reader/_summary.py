"""Summary of a checkpoint as a tree or an Arrow table, from names, dtypes and shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.tensors import Offsets, distinct, ranges
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.layout.manifests import Specs
from tensorcas_mlflow.reader._contents import Contents
from tensorcas_mlflow.reader._outline import NUMBER, Outline, Patterns, number_ranges

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_PATTERNS, _MOST_STACKS = 4096, 256
"""Of more the first are shown."""
_MOST_PARTS = 64
"""After this many dots, the rest of a name is one part."""
_MOST_NUMBERS, _MOST_CHARACTERS = 64, 24


class SummaryNode(NamedTuple):
    """A part of a model: a module, all layers of one kind together, or the tensors of one name."""

    name: str
    """Its name below the parent's: numbers as ``0..31``, or ``*`` for many with gaps."""
    n_tensors: int
    n_bytes: int
    n_alike: int = 1
    """Number of parts of one kind shown together, such as layers."""
    dtypes: tuple[str, ...] = ()
    """Of tensors: theirs; empty for a module."""
    shape: tuple[int, ...] | None = None
    """Of tensors: theirs, if all of them have one."""
    children: tuple[SummaryNode, ...] = ()
    """Its parts, in the order of the checkpoint."""


class StackSummary(NamedTuple):
    """Layers of one kind."""

    name: str
    """Such as ``model.layers``; "" for those of a plain `Sequential`."""
    layers: tuple[int, ...]
    """Their numbers, ascending."""
    layer_bytes: tuple[int, ...]
    """The size of each."""
    n_experts: int
    """Most experts in any layer; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The parts of a checkpoint and their sizes; as text, a tree."""

    label: str
    n_tensors: int
    n_bytes: int
    dtypes: dict[str, tuple[int, int]]
    """By dtype the number of tensors and their bytes, most bytes first."""
    stacks: tuple[StackSummary, ...]
    tree: SummaryNode
    """The whole; its name is empty."""
    is_cut: bool
    """True if it omits parts with thousands of distinct names."""
    left_out: Mapping[str, str]
    """Tensors not counted above: unsupported ones by name, with their type."""

    def __str__(self) -> str:
        lines = self._headings()
        table = list(_lines(self.tree.children, 0))
        width = max((len(left) for left, _ in table), default=0)
        lines += [f"{left:<{width}}  {right}" for left, right in table]
        return "\n".join([*lines, "…"] if self.is_cut else lines)

    def _repr_html_(self) -> str:
        from tensorcas_mlflow.base.notebook import line

        more = [line("…")] if self.is_cut else []
        return "\n".join([*map(line, self._headings()), *(_folded(node, 0) for node in self.tree.children), *more])

    def _headings(self) -> list[str]:
        dtypes = ", ".join(f"{name} {size_text(n_bytes)}" for name, (_, n_bytes) in self.dtypes.items())
        lines = [f"{self.label}: {count_text(self.n_tensors, 'tensor')}, {size_text(self.n_bytes)} ({dtypes})"]
        if self.left_out:
            # The import of the file formats takes longer than a summary; most checkpoints leave nothing out.
            from tensorcas_mlflow.file_formats import EXAMPLE_INPUT, OTHER_FILE, left_out_parts

            others = left_out_parts(self.left_out)
            if others:
                types = ", ".join(sorted(set(others.values())))
                lines.append(f"and {count_text(len(others), 'tensor')} of unsupported types ({types})")
            kinds = list(self.left_out.values())
            if EXAMPLE_INPUT in kinds:
                lines.append(f"and {count_text(kinds.count(EXAMPLE_INPUT), 'example input')}, no part of the model")
            if OTHER_FILE in kinds:
                names = ", ".join(name for name, kind in self.left_out.items() if kind == OTHER_FILE)
                lines.append(f"beside it, to be opened by themselves: {names}")
        for stack in self.stacks:
            experts = f", up to {stack.n_experts} experts each" if stack.n_experts else ""
            name = stack.name or "the model"
            lines.append(f"layers of {name}: {number_ranges(stack.layers)}{experts}")
        return lines


def _folded(node: SummaryNode, depth: int) -> str:
    """Return a part of the tree as HTML; the first level is open, and a click opens the others."""
    from tensorcas_mlflow.base.notebook import fold, indented, line

    text = f"{node.name}  {_described(node)}"
    if not node.children:
        return line(text)
    return fold(text, indented("".join(_folded(child, depth + 1) for child in node.children)), is_open=depth == 0)


def _lines(nodes: Sequence[SummaryNode], depth: int) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield "  " * depth + node.name, _described(node)
        yield from _lines(node.children, depth + 1)


def _described(node: SummaryNode) -> str:
    what = size_text(node.n_bytes)
    if node.dtypes:
        shape = "x".join(map(str, node.shape)) or "scalar" if node.shape is not None else "different shapes"
        what = f"{'/'.join(node.dtypes)} {shape}  {what}"
    return f"{what}  in {node.n_alike}" if node.n_alike > 1 else what


def summarize(label: str, specs: Specs, outline: Outline, left_out: Mapping[str, str]) -> Summary:
    """Describe a checkpoint.

    Args:
        label: A name of the checkpoint, for messages.
        specs: Its tensors.
        outline: Of them.
        left_out: Unsupported tensors; see `CheckpointReader.left_out`.
    """
    sizes = specs.n_bytes
    patterns = outline.patterns
    n_bytes = int(sizes.sum())
    leaves = _leaves(specs, patterns)
    return Summary(
        label=label,
        n_tensors=len(specs),
        n_bytes=n_bytes,
        dtypes=_dtypes(specs),
        stacks=tuple(_stacks(specs, outline)),
        tree=_Branch("", leaves).node(),
        is_cut=len(leaves) < len(patterns.texts) or len(outline.stacks) > _MOST_STACKS,
        left_out=left_out,
    )


def _dtypes(specs: Specs) -> dict[str, tuple[int, int]]:
    counts = np.bincount(specs.dtype, minlength=len(specs.dtypes))
    sizes = np.bincount(specs.dtype, weights=specs.n_bytes, minlength=len(specs.dtypes))
    found = {str(name): (int(counts[at]), int(sizes[at])) for at, name in enumerate(specs.dtypes) if counts[at]}
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _stacks(specs: Specs, outline: Outline) -> Iterator[StackSummary]:
    found = outline.assignment
    names = found.stacks[:_MOST_STACKS]
    order = np.argsort(found.stack, kind="stable")
    borders = np.searchsorted(found.stack[order], np.arange(len(names) + 1)).tolist()
    for name, begin, end in zip(names, borders, borders[1:], strict=False):
        yield _stack(name, order[begin:end], specs, outline)


def _stack(name: str, mine: Offsets, specs: Specs, outline: Outline) -> StackSummary:
    found = outline.assignment
    layers = distinct(found.layer[mine])
    which = np.searchsorted(layers, found.layer[mine])
    sizes = np.bincount(which, weights=specs.n_bytes[mine], minlength=len(layers))
    n_experts = 0
    has_expert = np.flatnonzero(found.expert[mine] >= 0)
    if len(has_expert):
        numbers = distinct(found.expert[mine[has_expert]])
        nth = np.searchsorted(numbers, found.expert[mine[has_expert]])
        pairs = distinct(which[has_expert] * len(numbers) + nth)
        n_experts = int(np.bincount(pairs // len(numbers)).max())
    fused = distinct(which[found.is_fused[mine]])
    if len(fused):
        by_layer = mine[np.argsort(which, kind="stable")]
        ends = np.bincount(which).cumsum()
        for layer, end in zip(fused.tolist(), ends[fused].tolist(), strict=True):
            begin = int(ends[layer - 1]) if layer else 0
            n_experts = max(n_experts, len(outline.experts_among(by_layer[begin:end])))
    return StackSummary(
        name=name,
        layers=tuple(layers.tolist()),
        layer_bytes=tuple(int(size) for size in sizes),
        n_experts=n_experts,
    )


class _Leaf(NamedTuple):
    """The tensors of one pattern."""

    parts: tuple[str, ...]
    """The pattern's parts, with the numbers in their places."""
    keys: tuple[str, ...]
    """The parts, with `NUMBER` in place of numbers, as a key for parts of one kind."""
    counts: tuple[int, ...]
    """Number of distinct numbers in each part; 1 for a text."""
    n_tensors: int
    n_bytes: int
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None


def _leaves(specs: Specs, patterns: Patterns) -> list[_Leaf]:
    sizes = np.bincount(patterns.pattern, weights=specs.n_bytes, minlength=len(patterns.texts))
    groups = patterns.rows_by_pattern()[:_MOST_PATTERNS]
    firsts = np.array([rows[0] for rows in groups], dtype=np.int64)
    is_alike = _is_alike(specs, groups, firsts)
    leaves = []
    for at, rows in enumerate(groups):
        *keys, last = patterns.texts[at].split(".", _MOST_PARTS - 1)
        keys.append(last if last == NUMBER else last.replace(NUMBER, "#"))
        parts, counts, nth = [], [], 0
        for key in keys:
            if key == NUMBER:
                numbers = distinct(patterns.slot(rows, nth))
                parts.append(_numbers_text(numbers))
                counts.append(len(numbers))
                nth += 1
            else:
                parts.append(key)
                counts.append(1)
        codes = distinct(specs.dtype[rows]).tolist() if len(specs.dtypes) > 1 else [int(specs.dtype[rows[0]])]
        leaves.append(
            _Leaf(
                parts=tuple(parts),
                keys=tuple(keys),
                counts=tuple(counts),
                n_tensors=len(rows),
                n_bytes=int(sizes[at]),
                dtypes=tuple(str(specs.dtypes[code]) for code in codes),
                shape=specs.shape(int(firsts[at])) if is_alike[at] else None,
            )
        )
    return leaves


def _is_alike(specs: Specs, groups: list[Offsets], firsts: Offsets) -> Any:
    """Return the groups with all tensors of the first one's shape."""
    if not groups:
        return np.empty(0, dtype=bool)
    rows, which = np.concatenate(groups), np.repeat(np.arange(len(groups)), [len(rows) for rows in groups])
    begins, model = specs.shape_at[rows], specs.shape_at[firsts][which]
    counts = specs.shape_at[rows + 1] - begins
    differs = counts != specs.shape_at[firsts + 1][which] - model
    left = np.flatnonzero(~differs)
    sides = specs.sides[ranges(begins[left], counts[left])] != specs.sides[ranges(model[left], counts[left])]
    differs[np.repeat(left, counts[left])[sides]] = True
    is_alike = np.ones(len(groups), dtype=bool)
    is_alike[which[differs]] = False
    return is_alike


def _numbers_text(numbers: Offsets) -> str:
    """Write ascending numbers, briefly."""
    if len(numbers) > _MOST_NUMBERS and numbers[-1] - numbers[0] >= len(numbers):
        return "*"
    text = number_ranges(numbers.tolist()) if len(numbers) <= _MOST_NUMBERS else f"{numbers[0]}..{numbers[-1]}"
    return text if len(text) <= _MOST_CHARACTERS else "*"


class _Branch(NamedTuple):
    """A part of the tree, and the leaves below it."""

    name: str
    leaves: list[_Leaf]
    depth: int = 0
    n_alike: int = 1

    def node(self) -> SummaryNode:
        """Make the node, and those below it."""
        ending = [each for each in self.leaves if len(each.keys) == self.depth]
        inner: dict[str, list[_Leaf]] = {}
        for each in self.leaves:
            if len(each.keys) > self.depth:
                inner.setdefault(each.keys[self.depth], []).append(each)
        children = tuple(self._child(leaves).node() for leaves in inner.values())
        if len(children) == 1 and not ending and self.name:
            child = children[0]
            n_alike = child.n_alike if child.dtypes else child.n_alike * self.n_alike
            return child._replace(name=f"{self.name}.{child.name}", n_alike=n_alike)
        leaf = ending[0] if len(ending) == 1 else None
        return SummaryNode(
            name=self.name,
            n_tensors=sum(each.n_tensors for each in self.leaves),
            n_bytes=sum(each.n_bytes for each in self.leaves),
            n_alike=leaf.n_tensors if leaf is not None and not children else self.n_alike,
            dtypes=() if leaf is None else leaf.dtypes,
            shape=None if leaf is None else leaf.shape,
            children=children,
        )

    def _child(self, leaves: list[_Leaf]) -> _Branch:
        widest = max(leaves, key=lambda leaf: leaf.counts[self.depth])
        return _Branch(widest.parts[self.depth], leaves, self.depth + 1, widest.counts[self.depth])


def table_of(contents: Contents, outline: Outline) -> pa.Table:
    """Describe tensors; see `CheckpointReader.table`."""
    import pyarrow as pa

    specs, found = contents.specs, outline.assignment
    dtypes = [str(name) for name in specs.dtypes]
    return pa.table(
        {
            "name": pa.array(specs.names.to_list(), pa.utf8()),
            "dtype": pa.array([dtypes[code] for code in specs.dtype.tolist()], pa.utf8()),
            "shape": pa.ListArray.from_arrays(pa.array(specs.shape_at, pa.int32()), pa.array(specs.sides, pa.int64())),
            "n_bytes": pa.array(specs.n_bytes, pa.int64()),
            "stack": pa.array([found.stacks[at] if at >= 0 else None for at in found.stack.tolist()], pa.utf8()),
            "layer": _or_null(found.layer),
            "expert": _or_null(found.expert),
            "digest": pa.array([known and known.hex() for known in contents.known_identities()], pa.utf8()),
        }
    )


def _or_null(numbers: Any) -> Any:
    import pyarrow as pa

    return pa.array([number if number >= 0 else None for number in numbers.tolist()], pa.int64())
