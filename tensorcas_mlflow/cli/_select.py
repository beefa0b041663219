"""Selection: the store and the checkpoint for a command."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tensorcas_mlflow.backends import Root
from tensorcas_mlflow.base import config
from tensorcas_mlflow.cli._output import steps_text
from tensorcas_mlflow.errors import CheckpointNotFoundError, StoreNotFoundError
from tensorcas_mlflow.layout import DEFAULT_NAME, Ref
from tensorcas_mlflow.store import Store, stores_below

_N_LISTED = 10
_MOST_FOLDERS = 20_000
"""Most local folders to search for stores below a place without one."""
_MOST_STORES = 100

_FULL_ID = re.compile(r"[0-9a-f]{32}")
_SHORT_ID = re.compile(r"[0-9a-f]{6,31}")
"""The beginning of a run's id, long enough to stand for it."""


def root_of(options: Namespace) -> str:
    """Return the place given to a command.

    Raises:
        ValueError: ``--root`` is empty, as an unset shell variable is.
    """
    root: str | None = getattr(options, "root", None)
    if root == "":
        raise ValueError("--root is empty: name a place, or leave --root out for TENSORCAS_STORE or this folder")
    return root or config.store_uri() or "."


def store_of(options: Namespace) -> Store:
    """Open the store at the place of a command, or the nearest one above.

    Raises:
        StoreNotFoundError: There is none.
    """
    return store_at(root_of(options))


def store_at(root: str) -> Store:
    """Open the store at a place, or the nearest one above; raise as `store_of` does."""
    if root.startswith("mlflow-artifacts:"):
        from tensorcas_mlflow.integration.server_store import find_carrier

        return find_carrier(root)[0]
    place = Root.parse(root)
    try:
        return Store.find(place)[0]
    except StoreNotFoundError as error:
        below = [each.uri for each in islice(stores_below(place, most_folders=_MOST_FOLDERS), _MOST_STORES)]
        raise StoreNotFoundError(error.uri, tuple(below)) from None


def checkpoint_of(options: Namespace) -> tuple[Store, Ref]:
    """Open the store of a command and find the checkpoint of ``--run``, ``--step`` and ``--name``."""
    store = store_of(options)
    return store, the_one(
        store.checkpoints(), CheckpointQuery(run_id=options.run, step=options.step, name=options.name)
    )


def is_json(options: Namespace) -> bool:
    """Tell whether a command answers in JSON."""
    return getattr(options, "json", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Description of a checkpoint by a command's options."""

    run_id: str
    step: int | None
    """None for the last one."""
    name: str | None
    """None for any; the empty text for a checkpoint without a name."""

    def __str__(self) -> str:
        step = "the last step" if self.step is None else f"step {self.step}"
        name = f" named {self.name!r}" if self.name else " without a name" if self.name == "" else ""
        return f"{step} of run {self.run_id!r}{name}"

    def is_named(self, ref: Ref) -> bool:
        """Tell whether a checkpoint has the name, as its series, model id, artifact path or key."""
        if self.name == "":
            return ref.name is None and ref.model_id is None
        return self.name is None or self.name in (ref.name, ref.model_id, ref.path, ref.copy_path, ref.key)


def is_short_id(run_id: str) -> bool:
    """Tell whether a text may be the beginning of an id from MLflow."""
    return _SHORT_ID.fullmatch(run_id) is not None


def full_run_id(refs: Sequence[Ref], run_id: str) -> str:
    """Complete the beginning of an id from MLflow; return any other id unchanged.

    Raises:
        ValueError: Several runs begin with it.
    """
    runs = {ref.run_id for ref in refs if ref.run_id is not None}
    if run_id in runs or not is_short_id(run_id):
        return run_id
    found = sorted(each for each in runs if each.startswith(run_id) and _FULL_ID.fullmatch(each))
    if len(found) > 1:
        more = f" and {len(found) - _N_LISTED} more" if len(found) > _N_LISTED else ""
        listed = ", ".join(map(repr, found[:_N_LISTED]))
        raise ValueError(f"{len(found)} runs begin with {run_id!r}: give more of one of {listed}{more}")
    return found[0] if found else run_id


def of_run(refs: Sequence[Ref], run_id: str) -> list[Ref]:
    """Return the refs of a run, given its id or the beginning of it.

    Raises:
        CheckpointNotFoundError: The run has none.
        ValueError: Several runs begin with it.
    """
    run_id = full_run_id(refs, run_id)
    found = [ref for ref in refs if ref.run_id == run_id]
    if not found:
        runs = list(dict.fromkeys(ref.run_id for ref in reversed(refs) if ref.run_id is not None))
        more = f" and {len(runs) - _N_LISTED} more" if len(runs) > _N_LISTED else ""
        known = f"runs {', '.join(map(repr, runs[:_N_LISTED]))}{more}" if runs else ""
        raise CheckpointNotFoundError(f"of run {run_id!r}", known)
    return found


def _is_default(ref: Ref) -> bool:
    """Tell whether a checkpoint is of the default series."""
    return ref.model_id is None and _series(ref) in ("", DEFAULT_NAME)


def _series(ref: Ref) -> str:
    """Name the model or series of a checkpoint, or else its place."""
    return next((each for each in (ref.model_id, ref.name, ref.path, ref.copy_path, ref.uri) if each is not None), "")


def _check_is_one_series(found: Sequence[Ref], wanted: CheckpointQuery) -> None:
    names = sorted({_series(ref) for ref in found})
    if len(names) > 1:
        raise ValueError(f"{wanted} may be of {len(names)} series or models, give --name, one of {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_LISTED} more" if len(names) > _N_LISTED else ""
    return f"{', '.join(map(repr, names[:_N_LISTED]))}{more}"


def the_one(refs: Sequence[Ref], wanted: CheckpointQuery) -> Ref:
    """Find the checkpoint selected by a command's options.

    Without a step and a name it is the last one of the default series, as in Python. In a run without that series it is
    the last one of the only series or model.

    Raises:
        CheckpointNotFoundError: There is none.
        ValueError: There are several; the message lists them.
    """
    of_all_kinds = of_run(refs, wanted.run_id)
    of_its_run = [ref for ref in of_all_kinds if ref.kind == "checkpoint"]
    found = [ref for ref in of_its_run if wanted.is_named(ref)]
    step = wanted.step
    if step is None:
        if wanted.name is None:
            found = [ref for ref in found if _is_default(ref)] or found
            _check_is_one_series(found, wanted)
        step = max((ref.step for ref in found if ref.step is not None), default=None)
    found = [ref for ref in found if ref.step == step]
    if not found:
        steps = sorted({ref.step for ref in of_its_run if ref.step is not None})
        files = [ref.path for ref in of_all_kinds if ref.path is not None] if not of_its_run else []
        known = f"steps {steps_text(steps)}" if steps else f"files {_listed(files)}" if files else ""
        raise CheckpointNotFoundError(f"for {wanted}", known)
    if len(found) > 1:
        names = [ref.name if ref.name is not None else ref.model_id or "" for ref in found]
        if len(set(names)) < len(names):
            names = [ref.key for ref in found]
        raise ValueError(f"{wanted} is {len(found)} checkpoints, give --name as well, one of {_listed(names)}")
    return found[0]
