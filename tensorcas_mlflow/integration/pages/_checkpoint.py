"""The page of a checkpoint: its tensors, and what of them was there before."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration.pages import _earlier
from tensorcas_mlflow.integration.pages._earlier import EarlierContents, label_of, look_back, series_of, step_of
from tensorcas_mlflow.integration.pages._facts import Tensors
from tensorcas_mlflow.integration.pages._history import HISTORY_PAGE
from tensorcas_mlflow.integration.pages._render import render, source, visible
from tensorcas_mlflow.integration.pages._run import RunFacts, run_facts_here
from tensorcas_mlflow.integration.pages._tensors import STATE_BYTES, Value, packed_facts, whole_blocks
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store

MAX_ROWS_SHOWN = 20_000
MOST_MEASURED_BYTES = 256 << 20
"""Bound of the bytes of changed tensors that a page reads to tell how much they changed."""
MOST_MEASURED_S = 2.0
"""Bound of the time that this takes."""
PAGE_ENDING = ".html"
_FRAME_BYTES = 16_000
"""The page's style, and its texts."""


def render_page(store: Store, ref: Ref) -> bytes:
    """Make the page of a checkpoint.

    Args:
        store: The store of the checkpoint.
        ref: Of a checkpoint, or of a file.

    Returns:
        One self-contained HTML document, in UTF-8.

    Raises:
        CorruptError: Its manifest is damaged or gone.
    """
    manifest = store.manifest(ref)
    earlier = look_back(store, ref, manifest)
    run = run_of(ref)
    values = _values(store, ref, manifest, earlier)
    # What is new comes first; a sort keeps the order of the rest.
    order = sorted(range(len(manifest.rows)), key=lambda at: earlier.states[at][0] == "shared")
    shown, rest = sorted(order[:MAX_ROWS_SHOWN]), order[MAX_ROWS_SHOWN:]
    page = render(
        "file/checkpoint.html",
        title=_title(ref, run),
        ref=ref,
        manifest=manifest,
        run=run,
        earlier=earlier,
        neighbors=_neighbors(ref, run, earlier),
        stored_bytes=_stored_bytes(store, earlier.new_chunks),
        most_looked_at=_earlier.MAX_CHECKPOINTS,
        facts=_packed(manifest, earlier, shown, values),
        since=label_of(earlier.before, ref, in_series=True) if values and earlier.before is not None else "",
        n_not_measured=sum(earlier.states[at][0] != "shared" for at in shown) - len(values),
        n_rest=len(rest),
        rest_bytes=int(manifest.columns.n_bytes[rest].sum()),
    )
    return page.encode().ljust(page_bytes(manifest))


def page_bytes(manifest: Manifest) -> int:
    """Return the size of the page of a checkpoint.

    A listing needs the size before anybody has made the page, so a page is filled up with spaces. The page of a
    checkpoint with names that hardly compress may be larger.
    """
    rows = range(min(len(manifest.rows), MAX_ROWS_SHOWN))
    names = len(packed_facts(Tensors.of(manifest.columns, rows), (), at=0, values={}, more={}))
    return whole_blocks(len(source("tensors.js")) + _FRAME_BYTES + names + STATE_BYTES * len(rows))


def run_of(ref: Ref) -> RunFacts:
    """Ask MLflow for the run of a ref.

    In a server, a forged ref must not make it ask for a run of another experiment.
    """
    run_id = ref.run_id or ""
    is_in_run = any(f"/{each}/" in f"/{ref.path}" for each in (run_id, ref.model_id) if each)
    return run_facts_here(run_id) if is_in_run or not config.in_mlflow_server() else RunFacts(run_id=run_id)


def _packed(manifest: Manifest, earlier: EarlierContents, shown: Sequence[int], values: Mapping[int, Value]) -> str:
    """Return the page's data about some rows."""
    tensors = Tensors.of(manifest.columns, shown)
    dtypes = [manifest.left_out.get(name) or dtype for name, dtype in zip(tensors.names, tensors.dtypes, strict=True)]
    states = {state: number for number, state in enumerate(dict.fromkeys(earlier.states[at] for at in shown))}
    number = {at: number for number, at in enumerate(shown)}
    return packed_facts(
        tensors._replace(dtypes=dtypes),
        (),
        at=0,
        values={number[at]: value for at, value in values.items() if at in number},
        more={
            "states": [(kind, visible(words)) for kind, words in states],
            "state": [states[earlier.states[at]] for at in shown],
        },
    )


def _values(store: Store, ref: Ref, manifest: Manifest, earlier: EarlierContents) -> dict[int, Value]:
    """Return how much rows changed since the step before, within bounds; nothing if a chunk cannot be read."""
    if earlier.before is None:
        return {}
    from tensorcas_mlflow.reader import measure_some, open_ref  # most pages are of a first step, or change nothing

    names = manifest.columns.names.to_list()
    row_of = {name: at for at, name in enumerate(names) if earlier.states[at][0] != "shared" and name != SKELETON}
    with suppress(TensorCasError), open_ref(store, earlier.before) as before, open_ref(store, ref) as after:
        both = set(before).intersection(after)
        found = measure_some(
            before,
            after,
            [name for name in row_of if name in both],
            most_bytes=MOST_MEASURED_BYTES,
            most_s=MOST_MEASURED_S,
        )
        return {row_of[name]: (each.relative_norm, each.share_equal, each.max_absolute) for name, each in found.items()}
    return {}


def _title(ref: Ref, run: RunFacts) -> str:
    step = step_of(ref)
    if ref.model_id is not None:
        name = f"Model {ref.model_id}" + (f" of {run.name}" if run.name else "")
    elif ref.run_id is not None:
        name = (run.name or f"Run {ref.run_id}") + ("" if ref.name is None else f", {ref.name}")
    else:
        name = ref.label
    return name if step is None else f"{name}, step {step}"


def _neighbors(ref: Ref, run: RunFacts, earlier: EarlierContents) -> list[tuple[str, str]]:
    """Return words and addresses of MLflow's views of pages of the series; "" for one that is not below the run."""

    def link(words: str, other: Ref, name: str = "") -> tuple[str, str]:
        below = (other.path or "").partition(f"{run.run_id}/artifacts/")[2]
        page = posixpath.join(posixpath.dirname(below), name) if name else posixpath.splitext(below)[0] + PAGE_ENDING
        return words, run.to_run("artifacts", page) if below else ""

    links = [
        link(f"{words} {label_of(other, ref, in_series=True)}", other)
        for words, other in (("before:", earlier.before), ("after:", earlier.after))
        if other is not None
    ]
    if links and ref.model_id is None and series_of(ref) is not None and step_of(ref) is not None:
        links.append(link("all steps", ref, HISTORY_PAGE))
    return links


def _stored_bytes(store: Store, digests: Digests) -> int | None:
    """Return the stored size of chunks in packs; None if the index misses one of them."""
    places: Any = store.catalog.find(digests)
    if not places.found.all():
        store.catalog.refresh()
        places = store.catalog.find(digests)
    return int(places.entries["stored_bytes"].sum()) if places.found.all() else None
