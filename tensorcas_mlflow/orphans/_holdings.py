"""What a store holds for each run, logged model and trace of MLflow, as MLflow's folder names show it.

Below an experiment's artifact location MLflow gives each of them a folder: ``<run id>/artifacts``,
``models/m-<id>/artifacts``, ``traces/tr-<id>/artifacts``. What lies elsewhere is nobody's that could be asked about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tensorcas_mlflow.orphans._copies import copy_of
from tensorcas_mlflow.orphans._plain import LAYOUT, Measure, plain_below
from tensorcas_mlflow.store import Ref, Store

Kind = Literal["run", "model", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a store holds for one run, logged model or trace. Two are equal if nothing was written in between."""

    kind: Kind
    id: str
    root: str
    """Its artifact root: relative to the store's, or a URI if its artifacts lie elsewhere and only tensors are here."""
    experiment: str
    """The artifact location of its experiment, in the same form; "" is the store's root."""
    is_elsewhere: bool
    refs: tuple[Ref, ...]
    n_plain: int
    """Plain files below its artifact root; none of those that lie elsewhere."""
    plain_bytes: int
    newest_s: float
    """When something of it was written last, in seconds of Unix time."""


def find_holdings(store: Store) -> list[Holding]:
    """Find what a store holds for runs, logged models and traces, sorted by where it is.

    Experiments whose artifacts MLflow keeps by itself, with copies of manifests among them, are left out: there the
    folders tell, see `orphaned_refs`. So are folders with nothing in them, and whatever lies behind a symbolic link.
    """
    refs: dict[tuple[str, bool], list[Ref]] = {}
    checkpoints = store.checkpoints()
    copied = _copied(checkpoints)
    for ref in checkpoints:
        if ref.copy_path is not None or (ref.path is None and (ref.uri is None or copy_of(store, ref) is not None)):
            continue
        match = LAYOUT.fullmatch(ref.path if ref.path is not None else ref.uri or "")
        if match:
            refs.setdefault((match["root"], ref.path is None), []).append(ref)
    for root in plain_below(store).roots():
        refs.setdefault((root, False), [])
    found = (
        _holding(store, root, refs=refs[root, is_elsewhere], is_elsewhere=is_elsewhere)
        for root, is_elsewhere in sorted(refs)
    )
    return [
        holding
        for holding in found
        if (holding.refs or holding.n_plain) and (holding.is_elsewhere or holding.experiment not in copied)
    ]


def folders_of_mlflow(store: Store) -> set[str]:
    """Find the experiments' folders, as `Holding.experiment` has them, that `find_holdings` leaves to MLflow."""
    return _copied(store.checkpoints())


def look_again(store: Store, holding: Holding) -> Holding:
    """Look what a store holds for the same run, model or trace now."""
    if holding.is_elsewhere:
        refs = [ref for known in holding.refs if (ref := store.ref(known.key)) is not None]
    else:
        refs = store.walk_artifacts(holding.root)
    return _holding(store, holding.root, refs=refs, is_elsewhere=holding.is_elsewhere)


def drop_holding(store: Store, holding: Holding) -> None:
    """Drop the refs and remove the plain files of a holding; what was written since it was looked at stays."""
    for ref in holding.refs:
        info, now = store.backend.stat(ref.key), store.ref(ref.key)
        if info is not None and now is not None and now.write == ref.write:
            store.backend.withdraw(ref.key, info.token)
    if not holding.is_elsewhere:
        plain_below(store).remove(holding.root, holding.newest_s)


def _copied(checkpoints: Iterable[Ref]) -> set[str]:
    matches = (LAYOUT.fullmatch(ref.copy_path) for ref in checkpoints if ref.copy_path is not None)
    return {match["experiment"] or "" for match in matches if match}


def _holding(store: Store, root: str, *, refs: Iterable[Ref], is_elsewhere: bool) -> Holding:
    match = LAYOUT.fullmatch(root)
    assert match is not None
    kind: Kind = "run" if match["run"] else "model" if match["model"] else "trace"
    plain = Measure() if is_elsewhere else plain_below(store).measure(root)
    in_order = tuple(sorted(refs, key=lambda ref: ref.key))
    written = [ref.created_s for ref in in_order]
    return Holding(
        kind=kind,
        id=match[kind],
        root=root,
        experiment=match["experiment"] or "",
        is_elsewhere=is_elsewhere,
        refs=in_order,
        n_plain=plain.n_files,
        plain_bytes=plain.n_bytes,
        newest_s=max([plain.newest_s, *written]),
    )
