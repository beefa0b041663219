"""Outline of a checkpoint: layers and experts, found from patterns in tensor names."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.tensors import Offsets, distinct, offsets_of
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import PartNotFoundError
from tensorcas_mlflow.layout.manifests import Specs

NUMBER = "\n"
"""Stands for a number in a pattern; no name has a line break."""

_MOST_DIGITS = 18
"""Longest number in digits; a longer one does not fit into 64 bits and is text."""
_ZERO, _NINE, _DOT = ord("0"), ord("9"), ord(".")


class Patterns(NamedTuple):
    """Names, each as a pattern and the numbers in it. A number is a whole part of a name, between dots."""

    texts: Sequence[str]
    """The distinct patterns in order of first occurrence, with `NUMBER` in place of each number."""
    pattern: Offsets
    """Index of each name's pattern."""
    numbers: Offsets
    """The numbers of all names, one after the other."""
    number_at: Offsets
    """Start of each name's numbers in ``numbers``, and at the end the end of the last one's."""

    @classmethod
    def of(cls, names: Texts) -> Patterns:
        """Find the patterns of names.

        100,000 names take some tens of milliseconds, because their bytes are processed in bulk.

        Args:
            names: The names.
        """
        at, data = np.asarray(names.at, dtype=np.int64), names.data
        begins, ends = _numbers_in(at, data)
        of_name = np.searchsorted(at, begins, side="right") - 1
        counts = np.bincount(of_name, minlength=len(names)) if len(names) else np.empty(0, np.int64)
        texts, pattern = _patterns(at, data, begins, ends)
        return cls(texts=texts, pattern=pattern, numbers=_values(data, begins, ends), number_at=offsets_of(counts))

    def slot(self, rows: Any, nth: Any) -> Offsets:
        """Return one of the numbers of some names.

        Args:
            rows: The names.
            nth: Position of the number in its name, for each or for all.
        """
        values: Offsets = self.numbers[self.number_at[rows] + nth]
        return values

    def rows_by_pattern(self) -> list[Offsets]:
        """Return, for each pattern, its names, ascending."""
        order = np.argsort(self.pattern, kind="stable")
        borders = np.searchsorted(self.pattern[order], np.arange(1, len(self.texts)))
        return list(np.split(order, borders)) if self.texts else []


def _numbers_in(at: Offsets, data: Any) -> tuple[Offsets, Offsets]:
    """Find the numbers in names: the start of each, and one past its end."""
    n_bytes = len(data)
    is_border = np.zeros(n_bytes + 1, dtype=bool)
    is_border[at] = True  # a name begins here, and the one before has ended
    is_digit = (data >= _ZERO) & (data <= _NINE)
    is_dot = data == _DOT
    starts = is_digit & is_border[:-1]
    starts[1:] |= is_digit[1:] & is_dot[:-1]
    begins = np.flatnonzero(starts)
    # The end of the digits that start there: the next place with another character, or the start of another name.
    stops = is_border.copy()
    stops[:-1] |= ~is_digit
    places = np.flatnonzero(stops)
    ends = places[np.searchsorted(places, begins, side="right")] if len(begins) else begins
    is_whole = is_border[ends]
    inside = np.flatnonzero(~is_whole)
    is_whole[inside] = is_dot[ends[inside]]
    is_whole &= ends - begins <= _MOST_DIGITS
    return begins[is_whole], ends[is_whole]


def _values(data: Any, begins: Offsets, ends: Offsets) -> Offsets:
    values = np.zeros(len(begins), dtype=np.int64)
    for nth in range(int((ends - begins).max(initial=0))):
        longer = np.flatnonzero(ends - begins > nth)
        values[longer] = values[longer] * 10 + (data[begins[longer] + nth] - _ZERO)
    return values


def _patterns(at: Offsets, data: Any, begins: Offsets, ends: Offsets) -> tuple[list[str], Offsets]:
    written = data.copy()
    written[begins] = ord(NUMBER)
    steps = np.zeros(len(data) + 1, dtype=np.int8)
    steps[begins + 1] += 1
    steps[ends] -= 1
    is_kept = steps[:-1].cumsum(dtype=np.int8) == 0
    written = written[is_kept]
    kept_before = np.concatenate(([0], is_kept.cumsum()))
    offsets = kept_before[at]
    different, numbers = Texts(offsets, written).distinct()
    return different, np.array(numbers, dtype=np.int64)


_LAYERS = re.compile(
    r"(?P<stack>(?:[^#]*?\.)??(?:[a-z_]+_)?(?:layers?|h|blocks?|resblocks|stages?))\.(?P<layer>#)(?=\.|$)"
)
"""``model.layers.#`` (Llama, Mistral, Mixtral, Qwen, DeepSeek, Gemma), ``transformer.h.#`` (GPT-2, Falcon),
``encoder.layer.#`` (BERT, ViT), ``encoder.block.#`` (T5), ``blocks.#`` (timm, MPT), ``down_blocks.#`` (diffusers)."""
_STAGES = re.compile(r"(?P<stack>(?:[^#]*?\.)??layer)(?P<stage>[0-9]{1,3})\.(?P<layer>#)(?=\.|$)")
"""``layer1.#`` to ``layer4.#``: torchvision's ResNet and its kin. Blocks count through all stages."""
_ANY = re.compile(r"(?P<stack>(?:[^#]*?(?=\.))??)\.?(?P<layer>#)(?=\.|$)")
"""``#.weight``, ``features.#.weight``: a `torch.nn.Sequential` in a model without other layers."""
_NO_STACKS = re.compile(r"(?:^|\.)(?:state|param_groups|optimizers?|schedulers?|__[a-z]+__)(?:\.|$)")
"""Names with numbers that count neither layers nor experts."""

_EXPERT = re.compile(r"(?:^|\.)(?:[a-z]+_)??experts\.(?P<expert>#)(?=\.|$)")
"""``mlp.experts.#`` (Qwen-MoE, DeepSeek), ``block_sparse_moe.experts.#`` (Mixtral)."""
_FUSED = re.compile(r"(?:^|\.)(?:(?:local_)?experts\.(?!#)|block_sparse_moe\.(?:input|output)_linear\.weight$)")
"""``mlp.experts.gate_up_proj``: one tensor for all experts of a layer, one row per expert (Llama 4, gpt-oss, Granite,
and in newer releases of transformers all)."""
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg)(?:\.(?:layer|linear|classifier|proj))?(?:\.weight)?$")
"""``mlp.gate.weight``: it has one row per expert."""


class NameReading(NamedTuple):
    """Layer, stage and expert in one pattern of names."""

    stack: str
    """Stack of the layers, such as ``model.layers``; "" for a plain `Sequential`."""
    layer: int
    """Index of the pattern's number that counts layers."""
    stage: int = 0
    """Stages come one after the other, each with layers of its own."""
    expert: int | None = None
    """Index of the pattern's number that counts experts; None if the pattern does not belong to one expert."""
    is_fused: bool = False
    """True if the tensor holds all experts of a layer, one after the other."""
    is_router: bool = False
    """True if the tensor has a row for each expert."""


def read_pattern(text: str) -> NameReading | None:
    """Parse a pattern by the naming of known frameworks; None if it names no such layer."""
    if NUMBER not in text:
        return None
    text = _written(text)
    match = _STAGES.match(text)
    if match is not None:
        return _reading(text, match, stage=int(match["stage"]))
    match = _LAYERS.match(text)
    return None if match is None or _NO_STACKS.search(match["stack"]) else _reading(text, match)


def read_any(text: str) -> NameReading | None:
    """Parse a pattern in a checkpoint without known names: the first number counts layers."""
    match = _ANY.match(_written(text))
    return None if match is None or _NO_STACKS.search(match["stack"]) else _reading(_written(text), match)


def _written(text: str) -> str:
    # A literal "#" in a name is no number.
    return text.replace("#", "_").replace(NUMBER, "#")


def _reading(text: str, match: re.Match[str], stage: int = 0) -> NameReading:
    rest = text[match.end() :]
    n_before = text.count("#", 0, match.end())
    expert = _EXPERT.search(rest)
    return NameReading(
        stack=match["stack"],
        layer=n_before - 1,
        stage=stage,
        expert=None if expert is None else n_before + rest.count("#", 0, expert.start("expert")),
        is_fused=expert is None and _FUSED.search(rest) is not None,
        is_router=_ROUTER.search(rest) is not None,
    )


_HOLES = ("{layer}", "{expert}")
_ANYTHING = "[^.]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """A rule for a model's names of layers and experts, for models unknown to the reader.

    ```python
    Naming(layer="net.stage{layer}.", expert="net.stage{layer}.moe.{expert}.")
    Naming(layer="net.stage{layer}.", expert="net.stage{layer}.moe.w[{expert}]")
    ```

    A pattern matches the start of a name, up to a dot or the end. ``{layer}`` and ``{expert}`` match numbers, ``*``
    matches anything without a dot. With ``[{expert}]`` at the end, experts are the rows of the matching tensors.
    """

    layer: str
    expert: str | None = None

    def __post_init__(self) -> None:
        if self.layer.count("{layer}") != 1 or "{expert}" in self.layer:
            raise ValueError(f"a pattern of layers has {{layer}} once and no {{expert}}, unlike {self.layer!r}")
        if self.expert is not None and [self.expert.count(each) for each in ("{layer}", "{expert}")] != [1, 1]:
            raise ValueError(f"a pattern of experts has {{layer}} and {{expert}} once, unlike {self.expert!r}")

    @property
    def _has_fused(self) -> bool:
        """True if experts are rows of a tensor."""
        return self.expert is not None and self.expert.endswith("[{expert}]")

    def _layer_regex(self) -> re.Pattern[str]:
        """Return the pattern for the start of a layer's tensor names."""
        return _regex(self.layer)

    def _expert_regex(self) -> re.Pattern[str] | None:
        """Return the pattern for the start of experts' tensor names; None if the rule has none."""
        return None if self.expert is None else _regex(self.expert.removesuffix("[{expert}]"))


def _regex(pattern: str) -> re.Pattern[str]:
    written = "".join(
        rf"(?P<{part[1:-1]}>[0-9]{{1,18}})" if part in _HOLES else _ANYTHING if part == "*" else re.escape(part)
        for part in re.split(r"(\{layer\}|\{expert\}|\*)", pattern.removesuffix("."))
    )
    # A number matches as a whole: a wildcard never takes a part of its digits.
    written = written.replace(_ANYTHING + "(?P", r"(?:[^.]*[^.0-9])?(?P").replace(")" + _ANYTHING, r")(?![0-9])[^.]*")
    return re.compile(written + r"(?=\.|$)")


_NONE = -1
_MOST_EXPERTS = 1 << 16
"""No model has more; forged shapes may."""
_MOST_LISTED, _MOST_CHARACTERS = 50, 100
"""Bounds on the untrusted names and numbers in a message."""


class Part(NamedTuple):
    """A tensor, or some rows of one."""

    row: int
    """Its number among all tensors."""
    rows: slice | None = None
    """Rows of axis 0; None for all of it."""
    is_one: bool = False
    """True if it is one row, without axis 0."""


class Assignment(NamedTuple):
    """For each tensor, the facts in its name; -1 for a missing one."""

    stacks: tuple[str, ...]
    """The stacks of layers, in the order of the checkpoint."""
    stack: Any
    """Index into ``stacks``."""
    layer: Any
    expert: Any
    is_fused: Any
    """True if it holds all experts of its layer."""
    is_router: Any


class Outline:
    """The layers and experts of a checkpoint. Made from names and shapes alone, once."""

    def __init__(self, specs: Specs, naming: Naming | None = None) -> None:
        """Describe tensors.

        Args:
            specs: All of them.
            naming: How they are named; unless given, as the frameworks do.
        """
        self._specs = specs
        self._naming = naming

    @Lazy
    def patterns(self) -> Patterns:
        """The names, as patterns."""
        return Patterns.of(self._specs.names)

    @Lazy
    def assignment(self) -> Assignment:
        """The layer and expert of each tensor, by its name."""
        if self._naming is not None:
            return _by_naming(self._specs.names.to_list(), self._naming)
        return _by_patterns(self.patterns)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks of layers: ``model.layers``, or ``encoder.layers`` and ``decoder.layers``."""
        return self.assignment.stacks

    def layers(self, stack: str | None = None) -> list[int]:
        """List the layers of a stack, ascending; raises as `rows_of_layer`."""
        found = self.assignment
        numbers = distinct(found.layer[found.stack == self._stack(stack)])
        return [int(number) for number in numbers]

    def experts(self, layer: int, stack: str | None = None) -> list[int]:
        """List the experts of a layer, ascending; empty if it has none. Raises as `rows_of_layer`."""
        return self.experts_among(self.rows_of_layer(layer, stack))

    def experts_among(self, rows: Offsets) -> list[int]:
        """List the experts in the given tensors of a layer."""
        experts = self.assignment.expert[rows]
        fused = self._fused(rows)
        return sorted({*experts[experts >= 0].tolist(), *range(fused[0] if fused else 0)})

    def rows_of_layer(self, layer: int, stack: str | None = None) -> Offsets:
        """Find the tensors of a layer, in their order.

        Args:
            layer: Its number, as in the names; with stages, counted through all of them from 0.
            stack: The stack of the layer; optional if there is only one.

        Raises:
            PartNotFoundError: There is no such layer; the message lists the existing ones.
            TypeError: The number is none.
            ValueError: There are several stacks and none is given, or there is no such stack.
        """
        layer = operator.index(layer)
        found, which = self.assignment, self._stack(stack)
        rows: Offsets = np.flatnonzero((found.layer == layer) & (found.stack == which))
        if len(rows) == 0:
            known = self.layers(found.stacks[which])
            of_stack = f" of {found.stacks[which]!r}" if found.stacks[which] else ""
            raise PartNotFoundError(f"layer {layer}{of_stack}", f"there are layers {number_ranges(known)}")
        return rows

    def parts_of_expert(self, layer: int, expert: int, stack: str | None = None) -> list[Part]:
        """Find the tensors of one expert, and its rows of fused tensors.

        Raises:
            PartNotFoundError: There is no such expert, or no such layer.
            ValueError: See `rows_of_layer`.
        """
        rows, expert = self.rows_of_layer(layer, stack), operator.index(expert)
        found = self.assignment
        is_its = (found.expert[rows] == expert) & (found.expert[rows] != _NONE)
        parts = [Part(row=int(row)) for row in rows[is_its]]
        fused = self._fused(rows)
        if fused is not None and 0 <= expert < fused[0]:
            n_experts, whole = fused
            for row in whole:
                n_rows = self._specs.shape(row)[0] // n_experts
                chosen = slice(expert * n_rows, (expert + 1) * n_rows)
                parts.append(Part(row=row, rows=chosen, is_one=n_rows == 1))
        if not parts:
            known = self.experts(layer, stack)
            what = f"there are experts {number_ranges(known)}" if known else "no name shows one (see Naming)"
            raise PartNotFoundError(f"expert {expert} in layer {layer}", what)
        return sorted(parts, key=lambda part: part.row)

    def rows_for_expert(self, layer: int, expert: int, stack: str | None = None) -> Offsets:
        """Find the tensors of a layer that may hold a part of an expert, by their names alone."""
        rows, found = self.rows_of_layer(layer, stack), self.assignment
        is_its = (found.expert[rows] == expert) & (found.expert[rows] != _NONE)
        some: Offsets = rows[is_its | found.is_fused[rows]]
        return some

    def _fused(self, rows: Offsets) -> tuple[int, list[int]] | None:
        """Return the number of experts in the fused tensors of a layer, and these tensors; None without any.

        The number is the router's number of rows. Without a router, it is the number of rows common to all fused
        tensors, one of which must have at least three dimensions.
        """
        found = self.assignment
        fused = rows[found.is_fused[rows]].tolist()
        shapes = {row: self._specs.shape(row) for row in fused}
        fused = [row for row in fused if shapes[row] and shapes[row][0]]
        if not fused:
            return None
        routers = [self._specs.shape(row) for row in rows[found.is_router[rows]].tolist()]
        sizes = {shape[0] for shape in routers if len(shape) == 2}
        if len(sizes) == 1:
            n_experts = sizes.pop()
        else:
            lengths = {shapes[row][0] for row in fused}
            if len(lengths) > 1 or max(len(shapes[row]) for row in fused) < 3:
                return None
            n_experts = lengths.pop()
        if not 0 < n_experts <= _MOST_EXPERTS:
            return None
        whole = [row for row in fused if shapes[row][0] % n_experts == 0]
        return (n_experts, whole) if whole else None

    def _stack(self, stack: str | None) -> int:
        stacks = self.assignment.stacks
        if stack is not None:
            if stack not in stacks:
                raise ValueError(f"there are no layers of {stack!r}; there are some of {_listed(stacks)}")
            return stacks.index(stack)
        if len(stacks) > 1:
            raise ValueError(f"there are layers of {_listed(stacks)}: pass one as stack=")
        if not stacks:
            raise PartNotFoundError("layers", "no tensor's name shows one (see Naming)")
        return 0


def _by_patterns(patterns: Patterns) -> Assignment:
    readings = _kept([read_pattern(text) for text in patterns.texts], read_any, patterns)
    number_of: dict[str, int] = {}
    for reading in readings:
        if reading is not None:
            number_of.setdefault(reading.stack, len(number_of))
    stacks = tuple(number_of)
    of_pattern = np.array(
        [_columns(reading, number_of) for reading in readings] or np.empty((0, 6)), dtype=np.int64
    ).reshape(-1, 6)
    stack, layer_slot, stage, expert_slot, is_fused, is_router = of_pattern[patterns.pattern].T
    layer, expert = np.full(len(stack), _NONE), np.full(len(stack), _NONE)
    has_layer, has_expert = np.flatnonzero(stack >= 0), np.flatnonzero(expert_slot >= 0)
    layer[has_layer] = patterns.slot(has_layer, layer_slot[has_layer])
    expert[has_expert] = patterns.slot(has_expert, expert_slot[has_expert])
    has_stages = np.zeros(len(stacks) + 1, dtype=bool)  # the last one is for tensors without a stack
    has_stages[stack[stage > 0]] = True
    mine = np.flatnonzero(has_stages[stack])
    layer[mine] = _counted_through(stack[mine], stage[mine], layer[mine])
    return Assignment(
        stacks=stacks, stack=stack, layer=layer, expert=expert, is_fused=is_fused > 0, is_router=is_router > 0
    )


def _counted_through(stack: Any, stage: Any, layer: Any) -> Any:
    """Number the layers of each stack from 0, through all of its stages."""
    order = np.lexsort((layer, stage, stack))
    sorts = [numbers[order] for numbers in (stack, stage, layer)]
    begins, other_stage, other_layer = (np.append(True, each[1:] != each[:-1])[: len(each)] for each in sorts)
    nth = (begins | other_stage | other_layer).cumsum()
    found = np.empty(len(order), dtype=np.int64)
    found[order] = nth - np.maximum.accumulate(np.where(begins, nth, 0))
    return found


def _kept(
    readings: list[NameReading | None], other: Callable[[str], NameReading | None], patterns: Patterns
) -> list[NameReading | None]:
    """Read patterns in another way if nothing was found in any."""
    return readings if any(readings) else [other(text) for text in patterns.texts]


def _columns(reading: NameReading | None, number_of: Mapping[str, int]) -> tuple[int, ...]:
    if reading is None:
        return (_NONE, 0, 0, _NONE, 0, 0)
    expert = _NONE if reading.expert is None else reading.expert
    stack = number_of[reading.stack]
    return (stack, reading.layer, reading.stage, expert, int(reading.is_fused), int(reading.is_router))


def _by_naming(names: list[str], naming: Naming) -> Assignment:
    layer, expert = np.full(len(names), _NONE), np.full(len(names), _NONE)
    is_fused = np.zeros(len(names), dtype=bool)
    of_layer, of_expert = naming._layer_regex(), naming._expert_regex()
    for row, name in enumerate(names):
        match = of_layer.match(name)
        if match is not None:
            layer[row] = int(match["layer"])
        match = _match(of_expert, name)
        if match is not None:
            layer[row] = int(match["layer"])
            if naming._has_fused:
                is_fused[row] = True
            else:
                expert[row] = int(match["expert"])
    stack = np.where(layer >= 0, 0, _NONE)
    stacks = (naming.layer,) if (layer >= 0).any() else ()
    none = np.zeros(len(names), dtype=bool)
    return Assignment(stacks=stacks, stack=stack, layer=layer, expert=expert, is_fused=is_fused, is_router=none)


def _match(regex: re.Pattern[str] | None, name: str) -> re.Match[str] | None:
    return None if regex is None else regex.match(name)


def _listed(stacks: tuple[str, ...]) -> str:
    listed = ", ".join(f"{stack!r:.{_MOST_CHARACTERS}}" for stack in stacks[:_MOST_LISTED])
    return listed + (" …" if len(stacks) > _MOST_LISTED else "") or "nothing"


def number_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ``0..3, 7``; of very many runs the first."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        elif len(runs) == _MOST_LISTED:
            return ", ".join("..".join(map(str, run)) for run in runs) + " …"
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs) or "none"
