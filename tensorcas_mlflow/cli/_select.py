"""Selection: the store and the checkpoint for a command."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tensorcas_mlflow.backends import Root, is_ours
from tensorcas_mlflow.base import config
from tensorcas_mlflow.cli._output import complain, date_text, steps_text
from tensorcas_mlflow.errors import (
    BackendError,
    CheckpointNotFoundError,
    NotFoundError,
    StoreNotFoundError,
    without_secrets,
)
from tensorcas_mlflow.integration.checkpoints import is_artifact_root, parse_checkpoint_uri
from tensorcas_mlflow.integration.directory import (
    artifact_location,
    database_beside,
    is_uri_of_mlflow,
    local_folder_of,
    models_by_file,
    open_directory,
    refs_at,
    store_at_artifacts,
)
from tensorcas_mlflow.layout import DEFAULT_NAME, Ref
from tensorcas_mlflow.store import Store, stores_below

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.directory import Directory, NamedModel, NamedRun

_N_LISTED = 10
_N_FOLDERS_ABOVE = 2
"""Folders above a store's root to look in for MLflow's database."""
_MOST_FOLDERS = 20_000
"""Most local folders to search for stores below a place without one."""
_MOST_STORES = 100

_RUN_URI = re.compile(r"runs:/+(?P<run_id>[^/]+)/?")
_FULL_ID = re.compile(r"[0-9a-f]{32}")
_MODEL_ID = re.compile(r"m-[0-9a-f]{32}")
_SHORT_ID = re.compile(r"[0-9a-f]{6,31}")
"""The beginning of a run's id, long enough to stand for it."""


def root_of(options: Namespace) -> str:
    """Return the place given to a command.

    Raises:
        ValueError: ``--root`` is empty, as an unset shell variable is.
    """
    return _given_root(options) or "."


def _given_root(options: Namespace) -> str | None:
    root: str | None = getattr(options, "root", None)
    place: str | None = getattr(options, "place", None)
    if root is not None and place is not None:
        options.parser.error("name the place once: as PLACE or by --root")
    for word, given in (("PLACE", place), ("--root", root)):
        if given == "":
            raise ValueError(f"{word} is empty: name a place, or leave it out for TENSORCAS_STORE or this folder")
    return root or place or config.store_uri()


def store_of(options: Namespace) -> Store:
    """Open the store of a command: at its place, or the nearest one above.

    If the place is a run of MLflow and the command is about one run or all, it is about this one.

    Raises:
        StoreNotFoundError: There is none.
    """
    store, run_id = _located(root_of(options))
    if run_id is not None and "run" in options and options.run is None:
        options.run = run_id
    return store


def store_at(place: str) -> Store:
    """Open the store at a place, or the nearest one above.

    Args:
        place: A path, a URI of a store or of MLflow, or the name or id of an experiment or run.

    Raises:
        StoreNotFoundError: There is none.
        NotFoundError: MLflow does not know the run or model of a URI.
        ValueError: Several runs have the name; the message lists them.
    """
    return _located(place)[0]


def _located(place: str) -> tuple[Store, str | None]:
    """Open the store at a place; return it, and the run if the place is one."""
    if place.startswith("mlflow-artifacts:"):
        from tensorcas_mlflow.integration.server_store import find_carrier

        return find_carrier(place)[0], None
    if is_uri_of_mlflow(place):
        run = _RUN_URI.fullmatch(place)
        return store_at_artifacts(_location_of(place))[0], None if run is None else run["run_id"]
    root = Root.parse(place)
    try:
        return Store.find(root)[0], None
    except StoreNotFoundError as error:
        named = _named_place(place)
        if named is not None:
            return store_at_artifacts(named[0])[0], named[1]
        below = [each.uri for each in islice(stores_below(root, most_folders=_MOST_FOLDERS), _MOST_STORES)]
        raise StoreNotFoundError(error.uri, tuple(below)) from None


def _named_place(word: str) -> tuple[str, str | None] | None:
    """Find the artifact location of an experiment or a run by its name or id, and the run's id; None if unknown."""
    directory = None if _looks_like_path(word) else directory_near(None)
    if directory is None:
        return None
    experiments = directory.experiments(word)
    if experiments:
        return experiments[0].location, None
    run = only_run(directory.runs(word), word)
    if run is None and os.path.sep not in word:
        said = f"there is no folder {word!r}, and MLflow knows no experiment or run of this name ({directory.name})"
        raise NotFoundError(f"{said}{_meant(word, directory)}")
    return None if run is None else (run.location, run.run_id)


def experiment_folder(word: str) -> str | None:
    """Return the local folder of the artifacts of an experiment by its name or id; None if there is none."""
    directory = None if _looks_like_path(word) else directory_near(None)
    found = [] if directory is None else directory.experiments(word)
    return local_folder_of(found[0].location) if found else None


def _looks_like_path(word: str) -> bool:
    return word.startswith((".", "/", "~")) or ":" in word or "\0" in word or os.path.lexists(word)


def _location_of(uri: str) -> str:
    tracking_uri = tracking_uri_near(None)
    if tracking_uri is None:
        raise ValueError(
            f"only MLflow knows {uri!r}: name its tracking store in MLFLOW_TRACKING_URI, such as "
            "sqlite:////data/mlflow.db or http://mlflow:5000"
        )
    return artifact_location(uri, tracking_uri=tracking_uri)


def store_to_write(options: Namespace, run: str) -> Store:
    """Open the store of a command that saves a checkpoint of a run, or else the one with the run's artifacts."""
    return _store_with(options, run)[0]


# --- what MLflow knows


def tracking_uri_near(store: Store | None) -> str | None:
    """Return the tracking store of MLflow; None if none is known.

    It is MLFLOW_TRACKING_URI, else MLflow's default database, ``mlflow.db``, in the working directory, or in the root
    of a store on this machine or up to two folders above it.
    """
    named = config.tracking_uri()
    if named is not None:
        return named
    folders = [Path.cwd()]
    root = None if store is None or ":" not in store.uri or store.backend.is_carrier else Root.parse(store.uri)
    if root is not None and root.is_local:
        folder = Path(root.path)
        folders += [folder, *list(folder.parents)[:_N_FOLDERS_ABOVE]]
    return database_beside(*folders)


def directory_near(store: Store | None) -> Directory | None:
    """Open the directory of `tracking_uri_near`; None if there is none."""
    uri = tracking_uri_near(store)
    return None if uri is None else open_directory(uri)


def names_near(store: Store, run_ids: Iterable[str | None]) -> dict[str, NamedRun]:
    """Return the names of the runs that MLflow knows; none if it does not answer, which is reported."""
    try:
        directory = directory_near(store)
        return {} if directory is None else directory.runs_of(each for each in run_ids if each is not None)
    except BackendError as error:
        complain(f"runs are listed without names: {error}")
        return {}


def models_near(store: Store, refs: Sequence[Ref]) -> dict[str, NamedModel]:
    """Return the logged models of some refs, with their runs and names as far as MLflow or the store's folder knows."""
    found = models_by_file(store, refs)
    try:
        directory = directory_near(store)
        if directory is not None:
            found |= directory.models_of(ref.model_id for ref in refs if ref.model_id is not None)
    except BackendError as error:
        complain(f"models are listed without names: {error}")
    return found


def _runs_named(store: Store | None, word: str) -> list[NamedRun]:
    try:
        directory = directory_near(store)
        return [] if directory is None else directory.runs(word)
    except BackendError as error:
        complain(f"{word!r} is not looked for among the names of runs: {error}")
        return []


def only_run(runs: Sequence[NamedRun], word: str) -> NamedRun | None:
    """Return the only one of some runs; None if there is none.

    Raises:
        ValueError: There are several; the message lists them.
    """
    if len(runs) > 1:
        listed = "; ".join(map(_candidate, runs[:_N_LISTED]))
        more = f"; and {len(runs) - _N_LISTED} more" if len(runs) > _N_LISTED else ""
        raise ValueError(f"{len(runs)} runs are named {word!r}: give the id of one of {listed}{more}")
    return runs[0] if runs else None


def _candidate(run: NamedRun) -> str:
    return f"{run.run_id} (of {run.experiment!r}, {date_text(run.started_s)})"


# --- checkpoints


def checkpoint_of(options: Namespace, *, step: int | None, to_delete: bool = False) -> tuple[Store, Ref]:
    """Open the store of a command and find a checkpoint, from ``CHECKPOINT`` or ``--run``, a step, and ``--name``.

    Raises:
        NotFoundError: There is none.
        ValueError: There are several; the message lists them.
    """
    given = [each for each in (getattr(options, "what", None), options.run) if each is not None]
    if len(given) != 1:
        taken = f" ({options.out!r} is taken for OUT)" if not given and hasattr(options, "out") else ""
        options.parser.error(f"name one run, model or checkpoint: as CHECKPOINT or by --run{taken}")
    return find_checkpoint(options, given[0], step=step, name=options.name, to_delete=to_delete)


def find_checkpoint(
    options: Namespace, what: str, *, step: int | None, name: str | None, to_delete: bool = False
) -> tuple[Store, Ref]:
    """Find a checkpoint by what somebody typed for it.

    Args:
        options: The options of the command; they may name the store.
        what: A run (id, its first six or more characters, name, or ``runs:/<id>``); the URI of a checkpoint, model or
            artifact (``runs:/…``, ``models:/…``, ``tensorcas:/…``); a path of an artifact; a model's id, an artifact
            path in the store, or a key.
        step: The step of a run; None for the last one.
        name: The series, model or key among the checkpoints of a run; None for any.
        to_delete: Refuse a run without a step, and choose nothing by default.

    Raises:
        NotFoundError: There is none.
        ValueError: There are several; the message lists them.
    """
    one = parse_checkpoint_uri(what, step=step, name=DEFAULT_NAME if name is None else name)
    run = _RUN_URI.fullmatch(what)
    if one is not None and not is_artifact_root(one[0]):
        what, name, step = one
    elif run is not None:
        what = run["run_id"]
    elif is_uri_of_mlflow(what) or what.startswith("file:"):
        location = _location_of(what) if is_uri_of_mlflow(what) else what
        given = _given_root(options)
        return _of_artifact(store_at_artifacts(location)[0] if given is None else store_at(given), location, what, step)
    elif is_ours(what):
        return _of_artifact(Store.find(what)[0], what, what, step)
    return _in_store(*_store_with(options, what), step=step, name=name, to_delete=to_delete)


def _store_with(options: Namespace, what: str) -> tuple[Store, str]:
    """Open the store of a command, or else the one with the artifacts of a run; return it and what to look for."""
    try:
        return store_of(options), what
    except StoreNotFoundError:
        if _given_root(options) is not None:
            raise
        if _MODEL_ID.fullmatch(what) and tracking_uri_near(None) is not None:
            return store_at_artifacts(_location_of(f"models:/{what}"))[0], what
        found = only_run(_runs_named(None, what), what)
        if found is not None:
            return store_at_artifacts(found.location)[0], found.run_id
        if os.path.sep in what:
            return Store.find(os.path.abspath(what))[0], what
        raise _unknown(what) from None


def _unknown(what: str) -> NotFoundError:
    """Return the error for a run or model outside of any store, with the names that were probably meant."""
    uri = tracking_uri_near(None)
    if uri is None:
        asked = "there is no store here, and no tracking store of MLflow is known: name one of them by --root or"
        return NotFoundError(f"{what!r} is not found: {asked} MLFLOW_TRACKING_URI")
    return NotFoundError(f"MLflow knows no run {what!r} ({without_secrets(uri)}){_meant(what, open_directory(uri))}")


def _meant(word: str, directory: Directory) -> str:
    import difflib  # only a typing error needs it

    if directory.experiments(word):
        return f"; {word!r} is an experiment, and this command takes a run: `tensorcas list {word}` lists its runs"
    close = difflib.get_close_matches(word, directory.names(), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def _in_store(store: Store, what: str, *, step: int | None, name: str | None, to_delete: bool) -> tuple[Store, Ref]:
    refs = store.checkpoints()
    found = [ref for ref in refs if what in (ref.path, ref.model_id, ref.copy_path, ref.key)]
    if found and step is None and name is None:
        return store, found[-1]
    if not found and os.path.sep in what:
        place = os.path.abspath(what)
        if os.path.lexists(place) or refs_at(store, place):
            return _of_artifact(Store.find(place)[0], place, what, step)
    run_id = run_to_read(store, refs, what)
    if to_delete and step is None:
        raise ValueError(f"{what!r} is a run: give --step as well, for one of its checkpoints")
    return store, the_one(refs, CheckpointQuery(run_id=run_id, step=step, name=name, to_delete=to_delete))


def _of_artifact(store: Store, location: str, what: str, step: int | None) -> tuple[Store, Ref]:
    found = [ref for ref in refs_at(store, location) if step is None or ref.step == step]
    found = [ref for ref in found if ref.kind == "checkpoint"] or found
    if not found:
        raise CheckpointNotFoundError(f"at {what!r} in the store {store.uri!r}")
    if len({ref.model_id or ref.key for ref in found}) > 1:
        labels = _listed([ref.label for ref in found])
        raise ValueError(f"{what!r} is {len(found)} checkpoints or files, name one of {labels}")
    return store, found[-1]


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
    to_delete: bool = False

    def __str__(self) -> str:
        step = "the last step" if self.step is None else f"step {self.step}"
        name = f" named {self.name!r}" if self.name else " without a name" if self.name == "" else ""
        return f"{step} of run {self.run_id!r}{name}"

    def is_named(self, ref: Ref) -> bool:
        """Tell whether a checkpoint has the name, as its series, model id, artifact path or key."""
        if self.name == "":
            return ref.name is None and ref.model_id is None
        return self.name is None or self.name in (ref.name, ref.model_id, ref.path, ref.copy_path, ref.key)


def run_to_read(store: Store, refs: Sequence[Ref], word: str) -> str:
    """Return the id of a run of a store by its id, the first six or more characters of it, its name or its URI.

    Returns:
        The id; the word itself if neither the store nor MLflow knows it.

    Raises:
        ValueError: Several runs have the name, or begin with the word.
        CheckpointNotFoundError: MLflow knows the run, and the store has nothing of it.
    """
    known, others = _runs_for(store, refs, word)
    if known is None and others:
        listed = "; ".join(f"{_candidate(run)} has its artifacts at {run.location!r}" for run in others[:_N_LISTED])
        raise CheckpointNotFoundError(f"of run {word!r} in the store {store.uri!r}: {listed}")
    return word if known is None else known


def run_to_write(store: Store, word: str) -> str:
    """Return the id of a run as `run_to_read` does; the run may have nothing in the store yet."""
    known, others = _runs_for(store, store.checkpoints(), word)
    other = None if known is not None else only_run(others, word)
    return known or (word if other is None else other.run_id)


def _runs_for(store: Store, refs: Sequence[Ref], word: str) -> tuple[str | None, Sequence[NamedRun]]:
    """Find the only run of a store that a word stands for, or else the runs outside of the store."""
    uri = _RUN_URI.fullmatch(word)
    word = word if uri is None else uri["run_id"]
    runs = {ref.run_id for ref in refs if ref.run_id is not None}
    if word in runs:
        return word, ()
    if _SHORT_ID.fullmatch(word):
        found = sorted(each for each in runs if each.startswith(word) and _FULL_ID.fullmatch(each))
        if len(found) > 1:
            raise ValueError(f"{len(found)} runs begin with {word!r}: give more of one of {_listed(found)}")
        if found:
            return found[0], ()
    named = _runs_named(store, word)
    here = only_run([run for run in named if run.run_id in runs], word)
    return (None, named) if here is None else (here.run_id, ())


def of_run(refs: Sequence[Ref], run_id: str) -> list[Ref]:
    """Return the refs of a run.

    Raises:
        CheckpointNotFoundError: The run has none.
    """
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

    Without a name it is of the default series, as in Python, and without a step the last one. In a run without that
    series it is of the only series or model. A query to delete must name one of several.

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
    if wanted.name is None and not wanted.to_delete:
        found = [ref for ref in found if _is_default(ref)] or found
    if not found:
        steps = sorted({ref.step for ref in of_its_run if ref.step is not None})
        files = [ref.path for ref in of_all_kinds if ref.path is not None] if not of_its_run else []
        known = f"steps {steps_text(steps)}" if steps else f"files {_listed(files)}" if files else ""
        if of_its_run and not any(wanted.is_named(ref) for ref in of_its_run):
            listed = _listed(sorted(set(map(_series, of_its_run))))
            known = " and ".join(filter(None, (f"series and models {listed}", known)))
        raise CheckpointNotFoundError(f"for {wanted}", known)
    if len(found) > 1:
        names = [ref.name if ref.name is not None else ref.model_id or "" for ref in found]
        if len(set(names)) < len(names):
            names = [ref.key for ref in found]
        raise ValueError(f"{wanted} is {len(found)} checkpoints, give --name as well, one of {_listed(names)}")
    return found[0]
