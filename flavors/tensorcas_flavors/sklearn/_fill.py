"""Filling of a live scikit-learn model with the arrays, trees and plain values of a stored one, without its pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorcas_flavors._facts import LivePlace, misfit
from tensorcas_flavors.sklearn._checks import check_objects, resizable
from tensorcas_flavors.sklearn._facts import ABSENT, Change, ModelFacts, plan_changes
from tensorcas_flavors.sklearn._parts import (
    RANDOM,
    ROWS,
    SEEDS,
    STRINGS,
    UNNAMED,
    TakenEstimatorParts,
    fill_booster,
    split_family,
    split_off,
    unpack,
)
from tensorcas_flavors.sklearn._trees import build_trees
from tensorcas_flavors.sklearn._walk import is_fortran, packed
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError


class ModelFill:
    """Replacement of the parts of a live model; nothing changes before all of them are known to fit."""

    def __init__(
        self, adapter: str, model: Any, parts: TakenEstimatorParts, tensors: Mapping[str, Array], facts: ModelFacts
    ) -> None:
        """Find a stored value for each part of a model.

        Args:
            adapter: The adapter's name, for errors.
            model: The live model.
            parts: Taken from the live model.
            tensors: The rows of the stored model; this object may use their memory.
            facts: Of the stored model.

        Raises:
            AdapterError: The stored model has another structure, or its arrays are damaged.
        """
        self._adapter = adapter
        self._graph = parts.graph
        self._tensors, self._boosters = split_off(tensors)
        self._live_boosters = {path: booster for path, (booster, _) in parts.boosters.items()}
        self._arrays: dict[int, tuple[Array, Array]] = {}
        self._trees: list[tuple[Any, Any]] = []
        has_seeds = SEEDS in tensors
        self._changes = list(plan_changes(adapter, model, parts, facts, tensors, has_seeds=has_seeds))
        self._aliases = facts.aliases
        self._check_names(parts, facts.numbers)
        self._find_arrays(parts)
        self._find_trees(parts)
        self._find_seeds()
        self._try_boosters()

    def apply(self) -> None:
        """Give the model the stored values.

        Arrays are replaced, not written to: a live one may be the data that the model was fitted to.

        Raises:
            AdapterError: The stored arrays would lead compiled code out of bounds. The model stays as it was.
        """
        undo = [_put(change) for change in self._changes]
        try:
            check_objects(self._adapter, self._graph.objects, lambda live: self._arrays.get(id(live), (live, live))[1])
        except BaseException:
            for back in reversed(undo):
                back()
            raise
        for live, values in self._arrays.values():
            places = self._graph.places[id(live)]
            if None in places:
                live[...] = values
                continue
            for place in places:
                if place is not None:
                    place.put(values)
        for tree, new_tree in self._trees:
            for attributes, key in self._graph.trees[id(tree)]:
                attributes[key] = new_tree
        for path, booster in self._live_boosters.items():
            fill_booster(self._boosters[path], booster)
        for part in self._graph.objects:
            _recompute(part)

    def _check_names(self, parts: TakenEstimatorParts, numbers: list[str]) -> None:
        live = {*parts.arrays, *parts.families, *parts.trees, *self._live_boosters}
        beside = (SKELETON, SEEDS, STRINGS, *numbers)
        stored = {name for name in self._tensors if name not in beside and not name.endswith(ROWS)}
        stored |= self._boosters.keys()
        differing = [
            name
            for name in sorted(live ^ stored)
            if not name.startswith(RANDOM)
            and not (name in parts.arrays and self._aliases.get(name) in stored)
            and not (name in stored and self._is_copy(name, self._graph.aliases.get(name)))
        ]
        if differing:
            raise self._misfit(f"only one of the two has {', '.join(map(repr, differing[:5]))}")

    def _is_copy(self, name: str, other: str | None) -> bool:
        """Tell whether two stored arrays are equal, so that one live array in both places can have their values."""
        one, two = (self._tensors.get(each) for each in (name, other or ""))
        return one is not None and two is not None and one.dtype == two.dtype and one.tobytes() == two.tobytes()

    def _find_arrays(self, parts: TakenEstimatorParts) -> None:
        found: list[tuple[Array, Array]] = []
        for name, live in parts.arrays.items():
            if name.startswith(UNNAMED):
                self._check_equal(name, live)
            elif not name.startswith(RANDOM):
                found.append((live, self._tensors[name if name in self._tensors else self._aliases[name]]))
        for name, members in parts.families.items():
            stored = list(split_family(self._adapter, self._tensors, name))
            if len(stored) != len(members):
                raise self._misfit(f"it has {len(members)} arrays {name!r} and {len(stored)} are stored")
            # Each member gets memory of its own, as it had.
            found.extend((live, values.copy()) for live, values in zip(members, stored, strict=True))
        resizables = resizable(self._graph.objects)
        for live, values in found:
            may_differ = id(live) in resizables and None not in self._graph.places[id(live)]
            fits = live.ndim == values.ndim if may_differ else live.shape == values.shape
            if not fits or packed(live.dtype) != values.dtype:
                ours, theirs = (f"{array.dtype} of shape {array.shape}" for array in (live, values))
                raise self._misfit(f"an array of {ours} cannot take one of {theirs}")
            if None in self._graph.places[id(live)] and not live.flags.writeable:
                raise self._misfit(f"an array of {live.dtype} of shape {live.shape} is read-only in it")
            self._arrays[id(live)] = live, unpack(values, "F" if is_fortran(live) else "C", live.dtype)

    def _find_trees(self, parts: TakenEstimatorParts) -> None:
        for name, (shape, trees) in parts.trees.items():
            built = build_trees(self._adapter, self._tensors[name], shape)
            if len(built) != len(trees) or any(id(tree) not in self._graph.trees for tree in trees):
                raise self._misfit(f"it has {len(trees)} trees to fill and {len(built)} are stored")
            self._trees.extend(zip(trees, built, strict=True))

    def _find_seeds(self) -> None:
        """Plan the change of the seeds of single trees."""
        seeded, seeds = self._graph.seeded, self._tensors.get(SEEDS)
        if seeds is None:
            return
        if seeds.dtype.kind != "i" or seeds.shape != (len(seeded),):
            raise self._misfit(f"it has {len(seeded)} seeds of trees, and {seeds.size} are stored")
        self._changes += [
            Change(LivePlace(held, "random_state"), seed) for held, seed in zip(seeded, seeds.tolist(), strict=True)
        ]

    def _try_boosters(self) -> None:
        """Load each stored booster into a new one first: after that nothing can fail."""
        for rows in self._boosters.values():
            from xgboost import Booster

            fill_booster(rows, Booster())

    def _check_equal(self, name: str, live: Array) -> None:
        """Refuse another array that no attribute holds, since it cannot be filled."""
        stored = self._tensors[name]
        if live.dtype != stored.dtype or live.shape != stored.shape or live.tobytes() != stored.tobytes():
            raise self._misfit(f"{name!r} differs and is held by no attribute")

    def _misfit(self, reason: str) -> AdapterError:
        return misfit(self._adapter, reason)


def _put(change: Change) -> Callable[[], None]:
    """Put a value into a live model, and return a function that undoes it."""
    place, value = change
    container, key = place
    if not isinstance(container, dict):
        before = place.get()
        place.put(value)
        return lambda: place.put(before)
    copied = dict(container)
    if value is ABSENT:
        del container[key]
    else:
        container[key] = value

    def undo() -> None:
        # The attributes get back their order, too.
        container.clear()
        container.update(copied)

    return undo


def _recompute(part: Any) -> None:
    """Let an estimator of scikit-learn recompute the attributes that it does not pickle."""
    if type(part).__module__.startswith("sklearn.") and hasattr(part, "__setstate__"):
        state = part.__getstate__()
        if isinstance(state, dict) and vars(part).keys() - state.keys():
            part.__setstate__(state)
