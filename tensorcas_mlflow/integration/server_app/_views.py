"""HTML of each page's content. Pure functions: the same content gives the same page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.integration.pages import SEARCH, Markup, text, totals
from tensorcas_mlflow.integration.server_app._content import (
    MOST_TENSORS,
    ROWS,
    CheckpointPage,
    DiffPage,
    ExperimentPage,
    HealthPage,
    ModelLine,
    ModelsPage,
    OverviewPage,
    RelationLine,
    RoundLine,
    RunPage,
    Sort,
    StepLine,
    StoreHealth,
    StoreLine,
)
from tensorcas_mlflow.integration.server_app._frame import Links, Page, attribute, bar, grid, link, pager
from tensorcas_mlflow.maintenance import OwnedBytes, utc_text

_BYTES = (("size", "Deleting frees"), ("size optional", "Shared"), ("size optional", "Added"))
_WORDS = (
    "<p><b>Deleting frees</b> the bytes that nothing else needs, once a collection has run; if other content is stored "
    "as deltas of them, once an optimization has run, too. <b>Shared</b> bytes are "
    "needed by others too. <b>Added</b> bytes were new when they were logged.</p>\n"
)
_KEY = (
    '<p class="key optional"><span><i class="own"></i>deleting frees</span>'
    '<span><i class="common"></i>shared with others</span></p>\n'
)
_OUTCOMES = {"done": "ended", "problems": "found damage", "failed": "failed", "died": "died"}
_RELATIONS = {
    "copy": "copy",
    "cast": "cast to another dtype",
    "head": "new head",
    "lora": "low-rank update",
    "pruned": "pruned",
    "fine-tune": "fine-tune",
    "shared": "shares some tensors",
}


def overview(content: OverviewPage, links: Links) -> Page:
    """Show all stores and experiments."""
    return Page("Checkpoints in this server", _overview(content, links), content.is_pending)


def _overview(content: OverviewPage, links: Links) -> Iterator[str]:
    if not content.stores:
        yield (
            "<p>No store was found at the artifact locations of the experiments that you may read. A store appears "
            "with the first checkpoint: <code>mlflow.tensorcas.log_checkpoint(…)</code></p>\n"
        )
        return
    for store in content.stores:
        yield from _store_lines(store)
    if content.experiments:
        yield f"<h2>Experiments</h2>\n{_WORDS}{SEARCH.replace('tensors', 'experiments')}"
        most = max(each.owned.exclusive_bytes + each.owned.shared_bytes for each in content.experiments)
        rows = [
            [
                link(links.to("experiment", id=each.id), each.name),
                f"{each.n_runs:,}",
                *_cells(each.owned),
                bar(each.owned.exclusive_bytes, each.owned.shared_bytes, most),
                "deleted" if each.is_deleted else "",
            ]
            for each in content.experiments
        ]
        headings = (("name", "Experiment"), ("size", "Runs"), *_BYTES, ("optional", "Frees, shared"), ("", "State"))
        names = [each.name for each in content.experiments]
        yield from grid(headings, rows, caption="Experiments, the most to free first", names=names)
        yield _KEY
    elif not content.is_pending:
        yield "<p>No experiment that you may read has anything in a store.</p>\n"
    if content.others is not None and content.others.refs:
        yield (
            f"<p>{content.others.refs:,} checkpoints, models and files belong to no experiment here; deleting "
            f"them frees {size_text(content.others.exclusive_bytes)}. <code>tensorcas gc --orphans --dry-run</code> "
            "names what MLflow has forgotten.</p>\n"
        )


def _store_lines(store: StoreLine) -> Iterator[str]:
    yield f"<h2>Store {text(store.uri or store.id)}</h2>\n"
    if store.error is not None:
        yield f'<p class="note"><span class="bad">Problem:</span> {text(store.error)}</p>\n'
    items = [("Checkpoints, models and files", f"{store.n_refs:,}")]
    if store.needed_bytes is not None:
        items.append(("Needed bytes", size_text(store.needed_bytes)))
    if store.n_damaged:
        items.append(("Damaged refs", f"{store.n_damaged:,}"))
    yield totals(items)
    if store.at_s is not None:
        yield f"<p>Figures of {utc_text(store.at_s)} UTC</p>\n"


def experiment(content: ExperimentPage, links: Links) -> Page:
    """Show the runs and models of an experiment."""
    return Page(f"Experiment {content.name}", _experiment(content, links), content.is_pending)


def _experiment(content: ExperimentPage, links: Links) -> Iterator[str]:
    yield f"<p>{link(links.mlflow_experiment(content.id), 'Show it in MLflow')}</p>\n"
    if content.is_pending and not content.owned.refs:
        return
    yield totals(_owned_items(content.owned))
    yield f"<h2>Runs</h2>\n{_WORDS}"
    sorts: tuple[tuple[Sort, str, str], ...] = (
        ("name", "name", "Run"),
        ("freed", "size", "Deleting frees"),
        ("shared", "size optional", "Shared"),
        ("added", "size optional", "Added"),
    )
    titles = {
        sort: (kind, words if sort == content.sort else link(links.to("experiment", id=content.id, sort=sort), words))
        for sort, kind, words in sorts
    }
    headings = (
        titles["name"],
        ("size optional", "Checkpoints, models, files"),
        titles["freed"],
        titles["shared"],
        titles["added"],
        ("optional", "Frees, shared"),
        ("", "State"),
    )
    rows = [
        [
            link(links.to("run", id=each.id), each.name),
            f"{each.owned.refs:,}",
            *_cells(each.owned),
            bar(each.owned.exclusive_bytes, each.owned.shared_bytes, content.most_bytes),
            "deleted" if each.is_deleted else "",
        ]
        for each in content.runs
    ]
    if rows:
        yield SEARCH.replace("tensors", "the runs on this page")
        names = [f"{each.name} {each.id}" for each in content.runs]
        yield from grid(headings, rows, caption=_range_text(content.page, content.n_runs, "run"), names=names)
        yield _KEY
    else:
        yield "<p>No run has anything in a store.</p>\n"
    yield _pager(links, "experiment", content.page, content.n_runs, id=content.id, sort=content.sort)
    if content.models:
        yield "<h2>Logged models</h2>\n"
        yield from _model_grid(content.models, content.n_models, links)


def _model_grid(models: Sequence[ModelLine], n_models: int, links: Links) -> Iterator[str]:
    headings = (("name", "Model"), ("name optional", "Run"), *_BYTES)
    rows = [
        [
            link(links.to("checkpoint", store=each.store, key=each.key), each.name),
            "" if each.run_id is None else link(links.to("run", id=each.run_id), each.run_id[:8]),
            *_cells(each.owned),
        ]
        for each in models
    ]
    yield from grid(headings, rows, caption=_range_text(1, n_models, "model"))


def run(content: RunPage, links: Links) -> Page:
    """Show what a run has logged."""
    return Page(f"Run {content.name}", _run(content, links), content.is_pending)


def _run(content: RunPage, links: Links) -> Iterator[str]:
    yield (
        f"<p>of experiment {link(links.to('experiment', id=content.experiment_id), content.experiment_name)}. "
        f"{link(links.mlflow_run(content.experiment_id, content.id), 'Show it in MLflow')}</p>\n"
    )
    if content.is_pending and not content.refs:
        return
    yield totals(_owned_items(content.owned))
    if not content.refs:
        yield "<p>The stores of this server hold nothing of this run.</p>\n"
        return
    yield _WORDS
    most = max(each.owned.exclusive_bytes + each.owned.shared_bytes for each in content.refs)
    can_compare = sum(each.is_checkpoint for each in content.refs) > 1
    if can_compare:
        yield f'<form action="{attribute(links.to("diff"))}" method="get">\n'
    rows = []
    checkpoints = [each for each in content.refs if each.is_checkpoint]
    for each in content.refs:
        cells: list[str | Markup] = [
            link(links.to("checkpoint", store=each.store, key=each.key), each.words),
            _time(each.created),
            *_cells(each.owned),
            bar(each.owned.exclusive_bytes, each.owned.shared_bytes, most),
        ]
        if can_compare:
            is_last, is_before = each is checkpoints[0], each is checkpoints[1]
            cells += [_radio("a", each, is_before), _radio("b", each, is_last)]
        rows.append(cells)
    headings = (
        ("name", "Checkpoint, model or file"),
        ("time optional", "Logged, UTC"),
        *_BYTES,
        ("optional", "Frees, shared"),
    )
    if can_compare:
        headings = (*headings, ("", "From"), ("", "To"))  # type: ignore[assignment]
    yield from grid(headings, rows, caption=_range_text(content.page, content.n_refs, "item"))
    yield _KEY
    if can_compare:
        yield "<p><button>Compare the two</button></p>\n</form>\n"
    yield _pager(links, "run", content.page, content.n_refs, id=content.id)


def _radio(side: str, line: StepLine, is_chosen: bool) -> Markup:
    if not line.is_checkpoint:
        return Markup("")
    chosen = " checked" if is_chosen else ""
    words = f"{'from' if side == 'a' else 'to'} {line.words}"
    value = attribute(f"{line.store}:{line.key}")
    return Markup(f'<input type="radio" name="{side}" value="{value}" aria-label="{text(words)}"{chosen}>')


def checkpoint(content: CheckpointPage, links: Links) -> Page:
    """Show one checkpoint, model or file."""
    title = content.line.words
    return Page(title, _checkpoint(content, links), content.is_pending)


def _checkpoint(content: CheckpointPage, links: Links) -> Iterator[str]:
    line = content.line
    parts = [text(line.label)] if line.step is not None else []
    if content.run is not None:
        parts.append(f"run {link(links.to('run', id=content.run.id), content.run.name)}")
    if content.model is not None:
        parts.append(f"logged model {text(content.model.name)}")
    parts.append(f"logged {text(_time(line.created))} UTC")
    if content.flavor:
        parts.append(text(content.flavor))
    yield f"<p>{', '.join(parts)}</p>\n"
    items = [("Size", size_text(content.n_bytes))]
    if content.n_tensors:
        items.append(("Tensors", f"{content.n_tensors:,}"))
    items += _owned_items(line.owned)[1:]
    items += [(name, f"{value:.6g}") for name, value in list(content.metrics.items())[:8]]
    yield totals(items)
    side = f"{line.store}:{line.key}"
    if content.before is not None:
        before = content.before
        address = links.to("diff", a=f"{before.store}:{before.key}", b=side)
        yield f"<p>{link(address, f'Compare with {before.words}')}</p>\n"
    yield f"<p>{link(links.to('diff', b=side), 'Compare with something else')}</p>\n"
    yield "<h2>Lineage</h2>\n"
    if content.lineage_error is not None:
        yield f'<p class="note">No lineage: {text(content.lineage_error)}</p>\n'
    elif content.relatives is None:
        yield "<p>Being computed.</p>\n"
    elif not content.relatives:
        yield "<p>No relative is known among what you may read in this store.</p>\n"
    else:
        yield from _relatives(content.relatives, side, links)
    if content.tensors:
        yield f"<h2>Tensors, the largest first</h2>\n{_search(content.n_tensors, MOST_TENSORS)}"
        headings = (("name", "Tensor"), ("optional", "Dtype"), ("shape optional", "Shape"), ("size", "Size"))
        rows = [
            [each.name, each.dtype, "\N{MULTIPLICATION SIGN}".join(map(str, each.shape)), size_text(each.n_bytes)]
            for each in content.tensors
        ]
        caption = _range_text(content.page, content.n_tensors, "tensor", MOST_TENSORS)
        yield from grid(headings, rows, caption=caption, names=[each.name for each in content.tensors])
        yield _pager(links, "checkpoint", content.page, content.n_tensors, MOST_TENSORS, store=line.store, key=line.key)


def _relatives(relatives: Sequence[RelationLine], side: str, links: Links) -> Iterator[str]:
    headings = (
        ("name", "Relative"),
        ("", "Stored"),
        ("", "How the newer one differs"),
        ("size", "Equal numbers"),
        ("optional", "Tensors"),
        ("", "Compare"),
    )
    rows = []
    for each in relatives:
        other = f"{each.store}:{each.key}"
        a, b = (other, side) if each.is_older else (side, other)
        counts = ((each.n_changed, "changed"), (each.n_added, "new"), (each.n_removed, "gone"))
        rows.append(
            [
                link(links.to("checkpoint", store=each.store, key=each.key), each.words),
                "before" if each.is_older else "after",
                _RELATIONS.get(each.kind, each.kind),
                f"{each.share_equal:.1%}",
                ", ".join(f"{n:,} {words}" for n, words in counts if n) or "none differs",
                link(links.to("diff", a=a, b=b), "compare"),
            ]
        )
    yield from grid(headings, rows, caption="The nearest first")


def diff(content: DiffPage, links: Links) -> Page:
    """Show a comparison, or the form to ask for one."""
    return Page("Compare", _diff(content, links), content.is_pending)


def _diff(content: DiffPage, links: Links) -> Iterator[str]:
    if content.before is not None and content.after is not None:
        for words, line in (("From", content.before), ("to", content.after)):
            shown = link(links.to("checkpoint", store=line.store, key=line.key), line.words)
            yield f"<p>{words} {shown}, logged {text(_time(line.created))} UTC</p>\n"
    if content.error is not None:
        yield f'<p class="note"><span class="bad">Not compared:</span> {text(content.error)}</p>\n'
    if content.counts is not None:
        yield from _diff_counts(content, links)
    yield "<h2>Choose what to compare</h2>\n"
    yield (
        "<p>A run's id or a logged model's id means its last checkpoint. <code>models:/name/version</code> is a "
        "registered model. The links of other pages fill in a checkpoint.</p>\n"
    )
    yield f'<form action="{attribute(links.to("diff"))}" method="get">\n'
    for side, label, value in (("a", "From", content.a), ("b", "To", content.b)):
        yield f'<p><label for="{side}">{label}</label><br>'
        yield f'<input id="{side}" name="{side}" required value="{attribute(value)}"></p>\n'
    ticked = " checked" if content.has_values else ""
    yield f'<p><label><input type="checkbox" name="values" value="1"{ticked}> measure the changes of all numbers'
    yield "</label></p>\n<p><button>Compare</button></p>\n</form>\n"


def _diff_counts(content: DiffPage, links: Links) -> Iterator[str]:
    counts = content.counts or {}
    yield totals((kind.capitalize(), f"{n:,} ({size_text(size)})") for kind, (n, size) in counts.items())
    if content.other:
        yield f"<p>Also different: {text(', '.join(content.other))}</p>\n"
    if not content.n_changes:
        if not content.other:
            yield '<p class="good">The two are equal, bit for bit.</p>\n'
        return
    if not content.has_values and counts.get("changed", (0, 0))[0]:
        address = links.to("diff", a=content.a, b=content.b, values=1)
        yield f"<p>{link(address, 'Measure the changes')}: this reads the changed tensors of both.</p>\n"
    headings: tuple[tuple[str, str], ...] = (("name", "Tensor"), ("", "Change"), ("size", "Size"))
    if content.has_values:
        headings += (("size", "Relative norm"), ("size optional", "Largest change"), ("size optional", "Equal numbers"))
    rows = []
    for each in content.changes:
        cells = [each.name, each.change, size_text(each.n_bytes)]
        if content.has_values:
            cells += [_figure(each.relative_norm), _figure(each.max_absolute)]
            cells += ["" if each.share_equal is None else f"{each.share_equal:.1%}"]
        rows.append(cells)
    order = "largest change first" if content.has_values else "largest first"
    yield _search(content.n_changes, ROWS)
    caption = f"{_range_text(content.page, content.n_changes, 'tensor')}, {order}"
    yield from grid(headings, rows, caption=caption, names=[each.name for each in content.changes])
    values = {"values": 1} if content.has_values else {}
    yield _pager(links, "diff", content.page, content.n_changes, a=content.a, b=content.b, **values)


def models(content: ModelsPage, links: Links) -> Page:
    """Show the versions of the model registry."""
    return Page("Registered models", _models(content, links), content.is_pending)


def _models(content: ModelsPage, links: Links) -> Iterator[str]:
    if not content.versions:
        yield "<p>There is no model version that you may read. The page of an experiment lists its logged models.</p>\n"
        return
    yield f"{_WORDS}{SEARCH.replace('tensors', 'the versions on this page')}"
    rows = []
    for each in content.versions:
        label = f"{each.name} version {each.version}"
        shown = label if each.store is None else link(links.to("checkpoint", store=each.store, key=each.key), label)
        compare = Markup("")
        if each.store is not None:
            compare = link(links.to("diff", b=f"models:/{each.name}/{each.version}"), "compare")
        run_link = "" if each.run_id is None else link(links.to("run", id=each.run_id), each.run_id[:8])
        owned = _cells(each.owned) if each.owned is not None else ["not in a store", "", ""]
        rows.append([shown, ", ".join(each.aliases), run_link, *owned, compare])
    headings = (("name", "Version"), ("optional", "Aliases"), ("name optional", "Run"), *_BYTES, ("", "Compare"))
    names = [f"{each.name} {each.version}" for each in content.versions]
    yield from grid(headings, rows, caption=f"{count_text(len(rows), 'version')}", names=names)
    if content.next is not None:
        yield pager([(links.to("models", token=content.next), "Next versions")])


def health(content: HealthPage, links: Links) -> Page:
    """Show the state of all stores, and the last rounds of maintenance."""
    return Page("Health", _health(content, links), content.is_pending)


def _health(content: HealthPage, links: Links) -> Iterator[str]:
    if content.schedule:
        said = ", ".join(f"{action} every {_period(seconds)}" for action, seconds in content.schedule.items())
        yield f"<p>Schedule: {text(said)}</p>\n"
    else:
        yield "<p>No maintenance is scheduled here: <code>TENSORCAS_MAINTENANCE</code> is not set.</p>\n"
    for waiting in content.waiting:
        yield f"<h2>Store {text(waiting.uri or waiting.id)}</h2>\n"
        if waiting.error is not None:
            yield f'<p class="note"><span class="bad">Problem:</span> {text(waiting.error)}</p>\n'
    for each in content.stores:
        yield from _store_health(each, content, links)
    if not content.stores and not content.waiting:
        yield "<p>No store is known here.</p>\n"


def _store_health(each: StoreHealth, content: HealthPage, links: Links) -> Iterator[str]:
    yield f"<h2>Store {text(each.store.uri or each.store.id)}</h2>\n"
    verified = each.last_verify
    items = [
        ("Last verification", "none recorded" if verified is None else _verified(verified)),
        ("On disk", size_text(each.disk_bytes)),
        ("Collectable", size_text(each.collectable_bytes)),
        ("Wasted in packs to rewrite", size_text(each.wasted_bytes)),
        ("Packs", f"{each.n_packs:,} ({size_text(each.pack_bytes)})"),
    ]
    for n, words in (
        (each.n_dead_saves, "Dead saves"),
        (each.n_unread, "Unreadable refs"),
        (each.n_strangers, "Foreign files"),
    ):
        if n:
            items.append((words, f"{n:,}"))
    yield totals(items)
    if each.store.at_s is not None:
        yield f"<p>Figures of {utc_text(each.store.at_s)} UTC</p>\n"
    if each.running is not None:
        since = utc_text(each.running.began_s)
        yield f'<p class="note" role="status">Running now: {text(each.running.action)}, since {since} UTC</p>\n'
    if content.can_run:
        yield '<div class="actions">\n'
        for action in content.schedule:
            yield f'<form action="{attribute(links.to("maintenance"))}" method="post"><p>'
            yield f'<input type="hidden" name="store" value="{text(each.store.id)}">'
            yield f'<input type="hidden" name="action" value="{text(action)}">'
            yield f"<button>Run {text(action)} now</button></p></form>\n"
        yield "</div>\n"
    if each.encoded:
        headings = (
            ("", "Codec"),
            ("size", "Chunks read before it"),
            ("size", "Chunks"),
            ("size", "Stored"),
            ("size optional", "Decoded"),
        )
        rows = [
            [codec, str(depth), f"{n:,}", size_text(stored), size_text(raw)]
            for codec, depth, n, stored, raw in each.encoded
        ]
        yield from grid(headings, rows, caption="Chunks by codec and length of their chain of deltas")
    if each.rounds:
        headings = (
            ("", "Maintenance"),
            ("time", "Begun, UTC"),
            ("size", "Took"),
            ("", "Outcome"),
            ("report", "Report"),
        )
        rounds = [
            [
                one.action,
                utc_text(one.began_s),
                _period(max(0.0, one.ended_s - one.began_s)),
                _outcome(one),
                one.summary or "",
            ]
            for one in each.rounds
        ]
        yield from grid(headings, rounds, caption="The last rounds of maintenance, the newest first")


def _verified(line: RoundLine) -> str:
    said = "sound" if line.outcome == "done" else _OUTCOMES.get(line.outcome, line.outcome)
    return f"{utc_text(line.began_s)} UTC, {said}"


def _outcome(line: RoundLine) -> Markup:
    kind = "good" if line.outcome == "done" else "bad"
    return Markup(f'<span class="{kind}">{text(_OUTCOMES.get(line.outcome, line.outcome))}</span>')


def missing(links: Links) -> Page:
    """Say that there is nothing, or nothing to know of."""
    words = (
        "<p>There is nothing of this name here, or you may not read it.</p>\n"
        f"<p>{link(links.to(), 'To the overview')}</p>\n"
    )
    return Page("Not found", [words])


def refusal(title: str, reason: str, links: Links) -> Page:
    """Say why a request was refused."""
    return Page(title, [f'<p class="note">{text(reason)}</p>\n', f"<p>{link(links.to(), 'To the overview')}</p>\n"])


def _cells(owned: OwnedBytes) -> list[str | Markup]:
    return [size_text(each) for each in (owned.exclusive_bytes, owned.shared_bytes, owned.marginal_bytes)]


def _owned_items(owned: OwnedBytes) -> list[tuple[str, str]]:
    return [
        ("Checkpoints, models and files", f"{owned.refs:,}"),
        ("Deleting frees", size_text(owned.exclusive_bytes)),
        ("Shared with others", size_text(owned.shared_bytes)),
        ("Added when logged", size_text(owned.marginal_bytes)),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _period(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _time(created: str) -> str:
    return created.replace("T", " ").partition(".")[0]


def _search(n: int, rows: int) -> str:
    return SEARCH if n <= rows else SEARCH.replace("tensors", "the tensors on this page")


def _range_text(page: int, n: int, thing: str, rows: int = ROWS) -> str:
    first, last = (page - 1) * rows + 1, min(page * rows, n)
    return count_text(n, thing) if n <= rows else f"{thing}s {first:,} to {last:,} of {n:,}"


def _pager(links: Links, name: str, page: int, n: int, rows: int = ROWS, **query: str | int | None) -> str:
    found = []
    if page > 1:
        found.append((links.to(name, **query, page=page - 1), "Previous page"))
    if page * rows < n:
        found.append((links.to(name, **query, page=page + 1), "Next page"))
    return pager(found)
