"""A checkpoint as a page for the browser: its tensors, and what of them was there before. Made on reading.

MLflow shows it in a sandboxed frame, from a copy in the browser's memory: it has no scripts, loads nothing, and its
whole style is in it. Whatever a run, a model or a tensor is called is shown as text.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.artifact_repo._earlier import MAX_CHECKPOINTS, Earlier, Origin, look_back, step_of
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.store import Ref, Store

MAX_ROWS_SHOWN = 5_000
_MAX_TEXT = 300

_STYLE = """
:root { color-scheme: light; }
body { margin: 24px; background: #fff; color: #1f272d; font: 14px/1.45 system-ui, sans-serif; }
h1 { margin: 0 0 4px; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 4px 0; color: #5f7281; overflow-wrap: anywhere; }
ul { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 16px 0; padding: 0; list-style: none; }
li { font-size: 18px; } li span { display: block; color: #5f7281; font-size: 12px; }
table { border-collapse: collapse; width: 100%; margin-top: 16px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid #e8ecf0; text-align: left; vertical-align: top; }
th { color: #5f7281; font-size: 12px; font-weight: 600; }
td { unicode-bidi: isolate; overflow-wrap: anywhere; } td.name { min-width: 12em; }
td.name, td.shape { font-family: ui-monospace, monospace; font-size: 13px; }
th.size, td.size { text-align: right; white-space: nowrap; }
.new { color: #0a6640; font-weight: 600; } .part { color: #925d00; } .shared { color: #5f7281; }
"""

_HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    '<meta name="viewport" content="width=device-width">\n'
)


def render_page(store: Store, ref: Ref) -> bytes:
    """Make the page of a checkpoint.

    Args:
        store: Where it is kept.
        ref: Of a checkpoint, or of a file.

    Returns:
        One HTML document that needs nothing else, in UTF-8.

    Raises:
        CorruptError: Its manifest is damaged or gone.
    """
    manifest = store.manifest(ref)
    earlier = look_back(store, ref, manifest)
    return "".join(_document(store, ref, manifest, earlier)).encode()


def _document(store: Store, ref: Ref, manifest: Manifest, earlier: Earlier) -> Iterator[str]:
    title = _title(ref)
    yield f"{_HEAD}<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
    for line in _about(ref, manifest):
        yield f"<p>{_text(line)}</p>\n"
    yield "<ul>\n"
    for what, value in _totals(store, manifest, earlier):
        yield f"<li><span>{what}</span>{value}</li>\n"
    yield "</ul>\n"
    if not earlier.is_complete:
        yield f"<p>{_limits(earlier)}</p>\n"
    yield "<table>\n<thead><tr><th>Tensor</th><th>Dtype</th><th>Shape</th>"
    yield '<th class="size">Size</th><th>Before this step</th></tr></thead>\n<tbody>\n'
    for row, origin in zip(manifest.rows[:MAX_ROWS_SHOWN], earlier.origins[:MAX_ROWS_SHOWN], strict=True):
        yield _table_row(row, origin, manifest.left_out.get(row.spec.name))
    yield "</tbody>\n</table>\n"
    n_more = len(manifest.rows) - MAX_ROWS_SHOWN
    if n_more > 0:
        n_bytes = int(manifest.columns.n_bytes[MAX_ROWS_SHOWN:].sum())
        yield f"<p>and {n_more:,} more tensors of {size_text(n_bytes)} together</p>\n"
    yield "</body>\n</html>\n"


def _title(ref: Ref) -> str:
    step = step_of(ref)
    if ref.model_id is not None:
        name = f"Model {ref.model_id}"
    elif ref.run_id is not None:
        name = f"Run {ref.run_id}" + ("" if ref.name is None else f", {ref.name}")
    else:
        name = ref.label
    return name if step is None else f"{name}, step {step}"


def _about(ref: Ref, manifest: Manifest) -> Iterator[str]:
    if ref.model_id is not None and ref.run_id is not None:
        yield f"of run {ref.run_id}"
    created = ref.created.replace("T", " ").partition(".")[0]
    yield f"stored {created} UTC" + ("" if manifest.flavor is None else f" by the adapter {manifest.flavor}")
    if ref.metrics:
        yield ", ".join(f"{name} {value:g}" for name, value in ref.metrics.items())


def _totals(store: Store, manifest: Manifest, earlier: Earlier) -> Iterator[tuple[str, str]]:
    n_bytes = manifest.n_bytes
    yield "Tensors", f"{len(manifest.rows):,}"
    yield "Size", size_text(n_bytes)
    share = f" ({100 * earlier.n_new_bytes / n_bytes:.1f} %)" if n_bytes else ""
    yield "New here", size_text(earlier.n_new_bytes) + share
    stored = _stored_bytes(store, earlier.new_chunks)
    if stored is not None:
        yield "On disk for what is new", size_text(stored)


def _stored_bytes(store: Store, digests: Digests) -> int | None:
    """Count what chunks take in packs; None where the index does not know all of them."""
    places: Any = store.catalog.find(digests)
    if not places.found.all():
        store.catalog.refresh()
        places = store.catalog.find(digests)
    return int(places.entries["stored_bytes"].sum()) if places.found.all() else None


def _limits(earlier: Earlier) -> str:
    return (
        f"Compared with {earlier.n_looked_at:,} earlier checkpoints and files: at most {MAX_CHECKPOINTS} of the same "
        f"series and {MAX_CHECKPOINTS} others, the latest of each. What is called new may be in one that was not "
        "looked at, and what is shared may be older than is said."
    )


def _table_row(row: Row, origin: Origin, type: str | None) -> str:
    spec = row.spec
    kind, words = _before(origin)
    cells = (
        ("name", spec.name or "(bytes between tensors)"),
        ("dtype", type or spec.dtype or "bytes"),
        ("shape", " \N{MULTIPLICATION SIGN} ".join(map(str, spec.shape)) or "scalar"),
        ("size", size_text(spec.n_bytes)),
        (kind, words),
    )
    return "<tr>" + "".join(f'<td class="{name}">{_text(value)}</td>' for name, value in cells) + "</tr>\n"


def _before(origin: Origin) -> tuple[str, str]:
    if origin.shared_with is not None:
        return "shared", f"shared with {origin.shared_with}"
    if origin.n_chunks == 0:
        return "shared", "empty"
    if origin.n_new_chunks == origin.n_chunks:
        return "new", "new at this step"
    if origin.n_new_chunks == 0:
        return "part", f"put together anew: all of {origin.n_chunks:,} chunks are known"
    return "part", f"in part: {origin.n_new_chunks:,} of {origin.n_chunks:,} chunks are new"


def _text(value: str) -> str:
    """Write any text so that nothing in it is markup, and nothing in it can turn around or hide what is beside it."""
    if len(value) > _MAX_TEXT:
        value = value[:_MAX_TEXT] + "…"
    visible = "".join(c if c.isprintable() else f"\\u{{{ord(c):x}}}" for c in value)
    return html.escape(visible)
