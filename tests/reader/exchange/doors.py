"""The ways in which the tensors of one file are read: where it lies, imported, and stored as the file it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import CheckpointReader, import_checkpoint, open_path, open_ref
from tensorcas_mlflow.store import Store

Door = Callable[..., CheckpointReader]


def where_it_lies(path: Path, **options: Any) -> CheckpointReader:
    return open_path(path, **options)


def imported(path: Path, **options: Any) -> CheckpointReader:
    store = Store.init(path.with_name(f"{path.name}.imported"))
    ref = import_checkpoint(store, open_listing(path), RefTarget(run_id="r", step=1))
    return open_ref(store, ref, **options)


def stored_as_a_file(path: Path, **options: Any) -> CheckpointReader:
    store = Store.init(path.with_name(f"{path.name}.stored"))
    with store.write_file(path) as pending:
        ref = pending.commit(RefTarget(path=path.name))
    return open_ref(store, ref, **options)


DOORS: dict[str, Door] = {
    "where it lies": where_it_lies,
    "imported": imported,
    "stored as a file": stored_as_a_file,
}
