"""What fitting made of a scikit-learn model besides arrays, trees and floats, in a form that needs no pickle to read.

With ``into=`` the pickle is not read, so what lies in it alone cannot be filled in. These facts follow the pickle in
the skeleton, so that a live model which differs in them is refused, and is not left half itself, half the stored one:

* ``sizes``: how many members each ensemble has, by its path;
* ``plain``: whole numbers, booleans and strings that attributes hold, by pattern; a list if they differ;
* ``closed``: a digest of texts and numbers in containers and in arrays that are no tensors (names of classes, a
  vocabulary), by pattern;
* ``foreign``: a digest of what objects of other libraries pickle besides what can be filled in, by path.

The skeleton ends with the facts as JSON; see `with_tail`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from tensorcas_flavors._pickling import dump_skeleton
from tensorcas_flavors._plain_values import read_tail, with_tail
from tensorcas_flavors._sklearn_sizes import n_members
from tensorcas_flavors._sklearn_walk import Graph
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

_END = b"TCSKF1\n"
_DIGEST_BYTES = 8
_REMEDY = "load a new model, without an original"
_TEXTS = (str, bytes, bytearray, int, complex, np.integer, np.bool_, np.str_)
_MAX_TEXT = 64

COUNTERS = frozenset(
    (
        "_max_samples",
        "_n_samples",
        "_n_samples_bootstrap",
        "_n_samples_orig",
        "_no_improvement",
        "_no_improvement_count",
        "converged_",
        "fit_status_",
        "max_samples_",
        "n_estimators_",
        "n_iter_",
        "n_samples_",
        "n_samples_seen_",
        "n_skips_invalid_data_",
        "n_skips_invalid_model_",
        "n_skips_no_inliers_",
        "n_steps_",
        "n_trials_",
        "t_",
    )
)
"""How far a fit went and how much it saw: what another fit to such data may change, and is filled in."""

_CACHES = frozenset(("_cached_dict", "_stop_words_id"))
_OF_OLD_DATA = frozenset(("shape_fit_",))
_OF_A_SEARCH = frozenset(
    (
        "best_index_",
        "max_resources_",
        "min_resources_",
        "n_candidates_",
        "n_iterations_",
        "n_possible_iterations_",
        "n_remaining_candidates_",
        "n_required_iterations_",
        "n_resources_",
    )
)
_STAYING = _CACHES | _OF_OLD_DATA | _OF_A_SEARCH
_STAYING_PARTS = ("random", "seed", "n_jobs", "n_threads")
_SETTINGS = ("_metadata_request", "_sklearn_output_config")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is said at the end of a skeleton; see the head of this module."""

    sizes: dict[str, int] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)


def facts_of(adapter: str, graph: Graph) -> Facts:
    """Return the facts of a model that can be pickled."""
    plain = {
        pattern: _alike([_plain(held[key]) for held, key in found])
        for pattern, found in graph.plain.items()
        if not _stays(pattern)
    }
    closed = {}
    for pattern, parts in graph.closed.items():
        if _stays(pattern):
            continue
        content = [content for part in parts for content in _contents(part)]
        if content:
            closed[pattern] = _digest(*content)
    filled = {*graph.names, *graph.trees, *graph.boosters}
    filled.update(id(number) for found in graph.numbers.values() for _, number in found)
    foreign = {}
    for path, part in graph.foreign.items():
        try:
            foreign[path] = _digest(
                dump_skeleton(adapter, part, lambda held: "filled" if id(held) in filled else None).tobytes()
            )
        except AdapterError:
            # The pickle of the model has none of it either.
            continue
    sizes = {path: n_members(ensemble) for path, ensemble in graph.ensembles.items()}
    return Facts(sizes, plain, closed, foreign)


def with_facts(skeleton: Array, facts: Facts) -> Array:
    """Return a skeleton with facts at its end."""
    given = {name: getattr(facts, name) for name in Facts.__dataclass_fields__ if getattr(facts, name)}
    return with_tail(skeleton, given, _END)


def read_facts(adapter: str, skeleton: Array | None) -> Facts | None:
    """Return the facts at the end of a skeleton, None if there are none there. No pickle is read.

    Raises:
        AdapterError: What is there is damaged.
    """
    tables = read_tail(adapter, skeleton, _END)
    if tables is None:
        return None
    try:
        facts = Facts(**tables)
        tables = [getattr(facts, name) for name in Facts.__dataclass_fields__]
        if not all(isinstance(table, dict) for table in tables) or {type(n) for n in facts.sizes.values()} - {int}:
            raise ValueError("they are of another kind")
    except (ValueError, TypeError) as error:
        raise AdapterError(adapter, f"the end of the skeleton cannot be read: {error}") from error
    return facts


def counters_to_set(graph: Graph, facts: Facts) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield attributes, key and new value of the counters that a live model has and that are stored otherwise.

    Raises:
        OverflowError: A number is too large for the type it has in the live model.
    """
    for pattern, found in graph.plain.items():
        if not is_counter(pattern) or pattern not in facts.plain:
            continue
        stored = facts.plain[pattern]
        stored = stored if isinstance(stored, list) else [stored] * len(found)
        for (held, key), value in zip(found, stored, strict=False):
            is_alike = type(value) in (bool, int) and type(value) is type(_plain(held[key]))
            if is_alike and value >= 0 and held[key] != value:
                yield held, key, type(held[key])(value)


def misfit(live: Facts, stored: Facts) -> str | None:
    """Say in what a live model differs from a stored one so that it cannot become that one without a pickle."""
    # One that is stored alone is missed where it is needed: it cannot be mistaken for the live model's.
    for path, digest in live.foreign.items():
        if stored.foreign.get(path) != digest:
            return (
                f"{path!r} is an object of another library whose pickle differs, and can only be unpickled: {_REMEDY}"
            )
    for what, ours, theirs in (("", live.plain, stored.plain), ("the content of ", live.closed, stored.closed)):
        # What one of the two lacks, such as names of columns that nobody gave or asked for, is left alone.
        for pattern in sorted(ours.keys() & theirs.keys()):
            if not is_counter(pattern) and ours[pattern] != theirs[pattern]:
                mine, its = (repr(value)[:_MAX_TEXT] for value in (ours[pattern], theirs[pattern]))
                return (
                    f"{what}{pattern!r} is {mine} in it, {its} in the stored one, and can only be unpickled: {_REMEDY}"
                )
    return None


def is_counter(pattern: str) -> bool:
    """Tell whether an attribute of that path counts how far a fit went."""
    return pattern.rpartition("/")[2] in COUNTERS


def _stays(pattern: str) -> bool:
    """Tell whether what is found there stays as it is in a live model: settings, random states, reports, caches."""
    *above, name = pattern.split("/")
    is_setting = any(setting in (*above, name) for setting in _SETTINGS)
    return is_setting or name in _STAYING or any(part in name for part in _STAYING_PARTS)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return str(value) if len(value) <= _MAX_TEXT else _digest(value.encode("utf-8", "surrogatepass"))
    return bool(value) if isinstance(value, bool | np.bool_) else int(value)


def _alike(values: list[Any]) -> Any:
    """Return the value that all have, or the list if they differ: a growing ensemble then has the same facts."""
    return values[0] if all(type(value) is type(values[0]) and value == values[0] for value in values) else values


def _contents(part: Any) -> Iterator[bytes]:
    """Yield what a container, or an array that is no tensor, holds itself; not what objects in it hold."""
    if isinstance(part, np.ndarray) and part.dtype != object:
        bare = np.asarray(np.ma.getdata(part))
        # Extended precision has padding bytes of arbitrary value.
        content = repr(bare.tolist()).encode() if bare.dtype.char in "gG" else bare.tobytes()
        yield from (str((bare.dtype, bare.shape)).encode(), content, np.ma.getmaskarray(part).tobytes())
        return
    if isinstance(part, dict):
        held = [f"{_said(key)}: {_said(value)}" for key, value in part.items() if isinstance(value, _TEXTS)]
    else:
        items = part.flat if isinstance(part, np.ndarray) else part
        held = [_said(value) for value in items if isinstance(value, _TEXTS)]
    if held:
        # The same words are found in the order of the texts they were found in.
        is_ordered = not isinstance(part, dict | set | frozenset)
        yield repr(held if is_ordered else sorted(held)).encode()


def _said(value: Any) -> str:
    """Return a value as ASCII that is equal for equal ones, of Python's or numpy's type."""
    if isinstance(value, np.generic):
        value = value.item()
    return ascii(value)


def _digest(*contents: bytes) -> str:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for content in contents:
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.hexdigest()
