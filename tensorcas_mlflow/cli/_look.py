"""Read-only commands for checkpoints: ``list``, ``stats``, ``du``, ``show``, ``diff``, ``lineage``, ``explain``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorcas_mlflow.backends import map_requests
from tensorcas_mlflow.base.digest import unique_rows
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.chunk_io import WAYS, way_named
from tensorcas_mlflow.cli._command import (
    CHECKPOINT,
    LAST_STEP,
    NAME,
    ONLY_RUN,
    PLACE,
    RUN,
    Command,
    count,
    flag,
    option,
    repeated,
)
from tensorcas_mlflow.cli._output import (
    Json,
    content_bytes,
    date_text,
    fields_of,
    figure_json,
    printable,
    ratio_text,
    ref_json,
    say,
    say_json,
    spec_text,
    steps_text,
    tell_damaged,
)
from tensorcas_mlflow.cli._select import (
    checkpoint_of,
    find_checkpoint,
    is_json,
    models_near,
    names_near,
    of_run,
    run_to_read,
    store_of,
)
from tensorcas_mlflow.cli._tables import say_sections, say_table
from tensorcas_mlflow.integration.directory import with_runs
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Row
from tensorcas_mlflow.store import Store

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io import PackRead
    from tensorcas_mlflow.integration.directory import NamedModel, NamedRun
    from tensorcas_mlflow.reader import CheckpointDiff, CheckpointReader, Summary, SummaryNode, ValueChange

_BY = ("experiment", "run", "series", "step")
"""Kinds of owners of bytes, as in `tensorcas_mlflow.maintenance.By`: a listing does not wait for that import."""
DIFFERENT = 5
"""Exit status of ``diff`` if the two checkpoints are not equal."""


def list_all(options: Namespace) -> int:
    """List the checkpoints, models and files of a store, by run."""
    store = store_of(options)
    refs, damaged = store.readable_checkpoints()
    models = models_near(store, refs)
    refs = with_runs(refs, models)
    if options.run is not None:
        refs = of_run(refs, run_to_read(store, refs, options.run))
    status = tell_damaged(damaged)
    runs: dict[str | None, list[Ref]] = {}
    for ref in refs:
        runs.setdefault(ref.run_id, []).append(ref)
    names = names_near(store, runs)
    groups = [_group(run_id, runs[run_id]) for run_id in sorted(runs, key=lambda run_id: run_id is None)]
    if is_json(options):
        listed = [_group_json(store, group, names.get(group["run_id"]), models) for group in groups]
        say_json({"store": store.uri, "runs": listed, "damaged_refs": sorted(damaged)})
        return status
    say(printable(f"store {store.uri}"))
    last = {id(entry.refs[-1]): entry.refs[-1] for group in groups for entry in _entries(group, models)}
    sizes = dict(zip(last, map_requests(store.backend, lambda ref: _size_text(store, ref), last.values()), strict=True))
    sections = [
        (
            _title(group["run_id"], names.get(group["run_id"])),
            [
                [
                    printable(entry.what),
                    entry.steps,
                    sizes[id(entry.refs[-1])],
                    date_text(entry.refs[-1].created),
                    printable(entry.refs[-1].flavor or "-"),
                ]
                for entry in _entries(group, models)
            ],
        )
        for group in groups
    ]
    say_sections(sections, right={2}, indent=2)
    return status


class _Entry(NamedTuple):
    """One line of a listing: a series of checkpoints, a model, or a file."""

    what: str
    steps: str
    refs: Sequence[Ref]


def _group(run_id: str | None, refs: Sequence[Ref]) -> Json:
    return {
        "run_id": run_id,
        "checkpoints": sorted(
            (ref for ref in refs if _kind(ref) == "checkpoints"),
            key=lambda ref: (ref.name or "", ref.step or 0),
        ),
        "models": [ref for ref in refs if _kind(ref) == "models"],
        "files": sorted((ref for ref in refs if _kind(ref) == "files"), key=lambda ref: ref.label),
    }


def _kind(ref: Ref) -> str:
    if ref.kind == "file":
        return "files"
    return "models" if ref.model_id is not None or ref.step is None else "checkpoints"


def _group_json(store: Store, group: Json, known: NamedRun | None, models: Mapping[str, NamedModel]) -> Json:
    named = {
        "run_id": group["run_id"],
        "run_name": None if known is None else known.name,
        "experiment": None if known is None else known.experiment,
    }

    def described(ref: Ref) -> Json:
        return ref_json(store, ref) | {"model_name": _model_name(ref, models)}

    lists = {key: value for key, value in group.items() if isinstance(value, list)}
    return named | {key: list(map_requests(store.backend, described, value)) for key, value in lists.items()}


def _model_name(ref: Ref, models: Mapping[str, NamedModel]) -> str | None:
    model = models.get(ref.model_id or "")
    return None if model is None else model.name or None


def _title(run_id: str | None, known: NamedRun | None) -> str:
    if run_id is None:
        return "no run"
    named = "" if known is None else f"  {known.name or 'without a name'}, of {known.experiment}"
    return printable(f"run {run_id}{named}")


def _entries(group: Json, models: Mapping[str, NamedModel]) -> Iterator[_Entry]:
    series: dict[tuple[str | None, str | None], list[Ref]] = {}
    for ref in group["checkpoints"]:
        series.setdefault((ref.name, ref.flavor), []).append(ref)
    for (name, _), refs in series.items():
        steps = [ref.step for ref in refs if ref.step is not None]
        yield _Entry(name or "checkpoints", f"{'step' if len(steps) == 1 else 'steps'} {steps_text(steps)}", refs)
    for ref in group["models"]:
        yield _Entry(_model_text(ref, models), "" if ref.step is None else f"step {ref.step}", [ref])
    for ref in group["files"]:
        if ref.model_id is None:
            yield _Entry(f"file {ref.label}", "", [ref])
        else:
            file = ref.label.partition(f"{ref.model_id}/artifacts/")[2] or ref.label
            yield _Entry(f"{_model_text(ref, models)}: file {file}", "", [ref])


def _model_text(ref: Ref, models: Mapping[str, NamedModel]) -> str:
    name = _model_name(ref, models)
    return " ".join(filter(None, ["model", name, ref.model_id or ref.label]))


def _size_text(store: Store, ref: Ref) -> str:
    """Write the size of a checkpoint or file; that of a damaged one is unknown."""
    n_bytes = content_bytes(store, ref)
    return "-" if n_bytes is None else size_text(n_bytes)


def show(options: Namespace) -> int:
    """Show the tensors of one checkpoint."""
    store, ref = checkpoint_of(options, step=options.step)
    if options.tree:
        from tensorcas_mlflow.reader import open_ref

        return _show_tree(open_ref(store, ref).summary(), store, ref, is_in_json=is_json(options))
    manifest = store.manifest(ref)
    totals = {
        "n_tensors": len(manifest.rows),
        "n_bytes": manifest.n_bytes,
        "n_chunks": len(manifest.digests),
        "n_unique_chunks": len(unique_rows(manifest.digests)[0]),
    }
    if is_json(options):
        tensors = [_row_json(row) for row in manifest.rows]
        say_json(
            {
                "store": store.uri,
                "checkpoint": ref_json(store, ref),
                "metadata": dict(manifest.own_metadata),
                "left_out": dict(manifest.left_out),
                **totals,
                "tensors": tensors,
            }
        )
        return 0
    _say_checkpoint(ref, names_near(store, [ref.run_id]))
    rows = [["tensor", "dtype", "shape", "bytes", "chunks"]]
    rows += [
        [printable(row.spec.name), *spec_text(row.spec), str(row.spec.n_bytes), str(len(row.digests))]
        for row in manifest.rows
    ]
    say_table(rows, right={3, 4})
    for name, kind in manifest.left_out.items():
        say(printable(f"left out: {name}: {kind}"))
    say(
        f"{count_text(totals['n_tensors'], 'tensor')}, {totals['n_bytes']:,} bytes, "
        f"{count_text(totals['n_chunks'], 'chunk')}, {totals['n_unique_chunks']} of them different"
    )
    return 0


def _show_tree(summary: Summary, store: Store, ref: Ref, *, is_in_json: bool) -> int:
    if not is_in_json:
        for line in str(summary).splitlines():
            say(printable(line))
        return 0
    stacks = [{**fields_of(each, "name layers n_experts"), "bytes": each.layer_bytes} for each in summary.stacks]
    say_json(
        {
            "store": store.uri,
            "checkpoint": ref_json(store, ref),
            **fields_of(summary, "n_tensors n_bytes is_cut"),
            "dtypes": {name: {"n_tensors": count, "n_bytes": size} for name, (count, size) in summary.dtypes.items()},
            "stacks": stacks,
            "tree": _node_json(summary.tree),
        }
    )
    return 0


def _node_json(node: SummaryNode) -> Json:
    fields = fields_of(node, "name n_tensors n_bytes n_alike dtypes shape")
    return {**fields, "children": [_node_json(child) for child in node.children]}


def _row_json(row: Row) -> Json:
    return {**fields_of(row.spec, "name dtype shape n_bytes"), "n_chunks": len(row.digests)}


def _say_checkpoint(ref: Ref, names: Mapping[str, NamedRun]) -> None:
    say(printable(ref.label))
    known = names.get(ref.run_id or "")
    facts = {
        "run": ref.run_id
        if known is None
        else f"{ref.run_id} ({known.name or 'without a name'}, of {known.experiment})",
        "step": ref.step,
        "name": ref.name,
        "model": ref.model_id,
        "parent step": ref.parent_step,
        "flavor": ref.flavor,
        "created": ref.created,
        "metrics": ", ".join(f"{name} {value:g}" for name, value in (ref.metrics or {}).items()) or None,
    }
    for what, value in facts.items():
        if value is not None:
            say(printable(f"  {what}: {value}"))


def stats(options: Namespace) -> int:
    """Count the content of a store or a run, and its bytes on disk."""
    from tensorcas_mlflow.maintenance import run_stats, store_stats

    store = store_of(options)
    if options.by is not None:
        return _say_shares(options, store)
    if options.top is not None:
        options.parser.error("--top needs --by")
    if options.run is None:
        figures: Mapping[str, Any] = store_stats(store)
    else:
        refs = _refs_with_runs(store)
        options.run = _run_with_content(store, refs, options.run)
        figures = run_stats(store, options.run, refs)
    status = tell_damaged(figures.get("damaged_refs", ()))
    if is_json(options):
        say_json({"store": store.uri, **figures})
        return status
    whose = [f"run {options.run}"] if options.run is not None else [count_text(figures["runs"], "run")]
    whose += [count_text(figures["checkpoints"], "checkpoint"), count_text(figures["files"], "file")]
    if options.run is not None and figures["steps"]:
        whose.append(f"steps {steps_text(list(figures['steps']))}")
    disk = figures["disk"]
    parts = ", ".join(f"{kind} {size_text(n)}" for kind, n in disk.items() if kind != "total" and n)
    shared = "whole store on disk" if options.run is not None else "on disk"
    smaller = "" if options.run is not None else ratio_text(figures["total_bytes"], figures["disk_bytes"])
    say(printable(f"store {store.uri}"))
    say(printable(", ".join(whose)))
    say(f"{figures['total_bytes']:,} bytes as logged ({size_text(figures['total_bytes'])})")
    said = f"{figures['disk_bytes']:,} bytes {shared} ({size_text(figures['disk_bytes'])}: {parts})"
    say(f"{said}, {smaller}" if smaller else said)
    chunks = count_text(figures["total_chunks"], "chunk")
    fewer = ratio_text(figures["total_chunks"], figures["unique_chunks"]).replace("smaller", "fewer")
    said = f"{chunks}, {figures['unique_chunks']} of them different, ratio {figures['dedup_ratio']}"
    say(f"{said} ({fewer})" if fewer else said)
    return status


def usage(options: Namespace) -> int:
    """Count the bytes that deleting each experiment, run or step would free."""
    return _say_shares(options, store_of(options))


def _refs_with_runs(store: Store) -> list[Ref]:
    """Return the refs of a store; those of models of any flavor name the run that logged the model."""
    refs = store.checkpoints()
    return with_runs(refs, models_near(store, refs))


def _run_with_content(store: Store, refs: Sequence[Ref], word: str) -> str:
    """Return the id of a run of a store; an unknown one is an error that lists the known ones."""
    run_id = run_to_read(store, refs, word)
    of_run(refs, run_id)
    return run_id


def _say_shares(options: Namespace, store: Store) -> int:
    from tensorcas_mlflow.maintenance import find_shares

    refs = _refs_with_runs(store)
    if options.run is not None:
        options.run = _run_with_content(store, refs, options.run)
    found = find_shares(store, options.by, run_id=options.run, refs=refs)
    shares = found.shares[: options.top]
    names = names_near(store, {share.run_id for share in shares})
    if is_json(options):
        listed = [
            {**share, "run_name": None if (run := names.get(share.run_id or "")) is None else run.name}
            for share in shares
        ]
        say_json({"store": store.uri, **found, "shares": listed})
        return 0
    below = {"experiment": (), "run": ("run_id",)}
    levels = ("experiment", *below.get(options.by, ("run_id", options.by)))
    columns = [*(level.removesuffix("_id") for level in levels), *(["name"] if names else [])]
    rows = [[*columns, "kept", "exclusive", "shared", "marginal"]]
    for share in shares:
        known = names.get(share.run_id or "")
        whose = ["-" if share[level] is None else printable(str(share[level])) for level in levels]
        if known is not None and share.experiment is not None:
            whose[0] = printable(known.experiment)
        whose += [printable(known.name if known is not None and known.name else "-")] if names else []
        sizes = [share.exclusive_bytes, share.shared_bytes, share.marginal_bytes]
        rows.append([*whose, str(share.refs), *map(size_text, sizes)])
    say(printable(f"store {store.uri}"))
    say_table(rows, right=set(range(len(columns), len(columns) + 4)))
    if len(shares) < len(found.shares):
        say(f"and {len(found.shares) - len(shares)} more")
    say(
        f"{size_text(found.needed_bytes)} needed by all: {size_text(found.exclusive_bytes)} by one alone, "
        f"{size_text(found.shared_bytes)} shared; the whole store takes {size_text(found.disk_bytes)} on disk"
    )
    return 0


def diff(options: Namespace) -> int:
    """Compare two checkpoints; return 0 if they are equal, else `DIFFERENT`."""
    (store, before), (after_store, after) = (
        find_checkpoint(options, what, step=step, name=name) for what, step, name in _sides(options)
    )
    from tensorcas_mlflow.reader import diff as diff_readers
    from tensorcas_mlflow.reader import open_ref

    old, new = open_ref(store, before), open_ref(after_store, after)
    found = diff_readers(old, new, values=options.values)
    if is_json(options):
        kinds = ("added", "removed", "changed", "equal")
        said: Json = {kind: list(getattr(found, kind)) for kind in kinds}
        said |= {f"{kind}_bytes": getattr(found, f"{kind}_bytes") for kind in kinds}
        said |= {"other": list(found.other), "is_equal": found.is_equal}
        if options.values:
            said["values"] = {name: _values_json(change) for name, change in found.values.items()}
        say_json({"store": store.uri, "before": ref_json(store, before), "after": ref_json(after_store, after), **said})
    else:
        say(printable(f"from {before.label}"))
        say(printable(f"to   {after.label}"))
        _say_diff(found, old, new)
    return 0 if found.is_equal else DIFFERENT


def _sides(options: Namespace) -> list[tuple[str, int | None, str | None]]:
    """Read the two checkpoints of ``diff``: what, step and name, each given once for both or twice."""
    if options.steps and options.step:
        options.parser.error("--steps A B is short for --step A --step B: pass only one of the two")
    if len(options.what) > 2 or bool(options.what) == bool(options.run):
        options.parser.error("name one or two runs, models or checkpoints: as CHECKPOINT or by --run")
    whats, steps, names = options.what or options.run, options.steps or options.step or [None], options.name or [None]
    if max(len(whats), len(steps), len(names)) != 2:
        options.parser.error(
            "name two checkpoints: pass two of CHECKPOINT, or one with --steps A B or with --name twice"
        )
    return [(whats[at], steps[at], names[at]) for at in (0, -1)]


def _say_diff(found: CheckpointDiff, old: CheckpointReader, new: CheckpointReader) -> None:
    lines = [
        (reader.spec(name).n_bytes, mark, name, " ".join(spec_text(reader.spec(name))), "")
        for mark, names, reader in (("-", found.removed, old), ("+", found.added, new))
        for name in names
    ]
    for name in found.changed:
        before, after = old.spec(name), new.spec(name)
        was, now = " ".join(spec_text(before)), " ".join(spec_text(after))
        spec = now if was == now else f"{was} -> {now}"
        size = changed_bytes(max(before.n_bytes, after.n_bytes), found.values.get(name))
        lines.append((size, "~", name, spec, _values_text(found.values.get(name))))
    if lines:
        lines.sort(key=lambda line: -line[0])  # a stable sort: equal sizes keep the order of the checkpoints
        rows = [
            [mark, printable(name), printable(spec), size_text(size), said] for size, mark, name, spec, said in lines
        ]
        say_sections([("", rows if any(row[-1] for row in rows) else [row[:-1] for row in rows])], right={3})
    if found.other:
        say(f"other content differs: {', '.join(found.other)}")
    say(
        f"{len(found.added)} added ({size_text(found.added_bytes)}), "
        f"{len(found.removed)} removed ({size_text(found.removed_bytes)}), "
        f"{len(found.changed)} changed ({size_text(found.changed_bytes)}), "
        f"{len(found.equal)} equal ({size_text(found.equal_bytes)})"
    )


def changed_bytes(n_bytes: int, change: ValueChange | None) -> int:
    """Return the size of a change: the bytes of a tensor's changed elements, or of all of it if nobody counted them."""
    return n_bytes if change is None else round(n_bytes * (1 - change.share_equal))


def _values_text(change: ValueChange | None) -> str:
    if change is None:
        return ""
    figures = {"max": change.max_absolute, "mean": change.mean_absolute, "norm": change.relative_norm}
    shown = [f"{name} {value:.3g}" for name, value in figures.items() if value is not None]
    return " ".join([*shown, f"equal {change.share_equal:.1%}"])


def _values_json(change: ValueChange) -> Json:
    return {
        "max_absolute": figure_json(change.max_absolute),
        "mean_absolute": figure_json(change.mean_absolute),
        "relative_norm": figure_json(change.relative_norm),
        **fields_of(change, "share_equal n_elements n_not_finite"),
    }


def lineage(options: Namespace) -> int:
    """Find the relatives of a model in its store."""
    from tensorcas_mlflow.reader import lineage as lineage_of
    from tensorcas_mlflow.reader import open_ref

    store, ref = checkpoint_of(options, step=options.step)
    with open_ref(store, ref) as reader:
        relatives = lineage_of(reader, most=options.most)
    if is_json(options):
        listed = [asdict(relation) for relation in relatives.relatives]
        say_json({"store": store.uri, "model": ref_json(store, ref), "relatives": listed})
        return 0
    for line in str(relatives).splitlines():
        say(printable(line))
    return 0


def explain(options: Namespace) -> int:
    """Explain the plan of a read of one checkpoint's tensors."""
    store, ref = checkpoint_of(options, step=options.step)
    way = None if options.way is None else way_named(options.way)
    plan = store.explain(store.manifest(ref), options.tensor or None, copy=False if options.map else None, way=way)
    if is_json(options):
        say_json(
            {
                "store": store.uri,
                "checkpoint": ref_json(store, ref),
                **fields_of(plan, "n_tensors n_bytes n_mapped n_cached"),
                "packs": [_pack_json(pack) for pack in plan.packs],
            }
        )
        return 0
    say(printable(ref.label))
    for line in str(plan).splitlines():
        say(printable(line))
    return 0


def _pack_json(pack: PackRead) -> Json:
    return fields_of(pack, "key n_chunks n_bytes n_reads read_bytes") | fields_of(pack.choice, "way reason")


COMMANDS = (
    Command(
        name="list",
        help="list the checkpoints, models and files of a store",
        examples=["list", "list --run 8f3c21", "list vision"],
        options=[PLACE, ONLY_RUN],
        run=list_all,
    ),
    Command(
        name="stats",
        help="count the content of a store or a run, and its bytes on disk",
        examples=["stats", "stats --run 8f3c21 --json", "stats --by run --top 10"],
        options=[
            PLACE,
            ONLY_RUN,
            option(
                "--by",
                choices=_BY,
                help="for each of these, count the bytes that it needs alone, shares, and added when it was logged",
            ),
            option("--top", type=count, metavar="N", help="with --by: only the N with most bytes of their own"),
        ],
        run=stats,
    ),
    Command(
        name="du",
        help="count the bytes that deleting each run would free, most first",
        examples=["du", "du vision --top 10", "du --by step --run baseline"],
        options=[
            PLACE,
            ONLY_RUN,
            option("--by", choices=_BY, default="run", help="count for each of these"),
            option("--top", type=count, metavar="N", help="only the N with most bytes of their own"),
        ],
        run=usage,
    ),
    Command(
        name="show",
        help="show the tensors of a checkpoint without reading them",
        examples=["show baseline", "show 8f3c21 --step 20", "show models:/digits@champion"],
        options=[CHECKPOINT, RUN, LAST_STEP, NAME, flag("--tree", help="show its structure: blocks, layers, experts")],
        run=show,
    ),
    Command(
        name="diff",
        help="compare two checkpoints without reading their tensors",
        examples=[
            "diff baseline --steps 10 20",
            "diff 8f3c21 90ab7e --step 20",
            "diff models:/digits/1 models:/digits/2",
            "diff --run 8f3c21 --step 20 --name raw --name ema",
        ],
        options=[
            option("what", nargs="*", metavar="CHECKPOINT", help="one or two runs, models or artifacts, as for show"),
            option("--run", metavar="RUN", action="append", default=[], help="the same as CHECKPOINT (repeatable)"),
            option("--steps", metavar=("A", "B"), type=int, nargs=2, help="the two steps"),
            option("--step", metavar="N", type=int, action="append", help="step of both; or twice, one for each"),
            option("--name", action="append", help="name of both, as for show; or twice, one for each"),
            flag("--values", help="read the different tensors, and measure the differences"),
        ],
        run=diff,
    ),
    Command(
        name="lineage",
        help="find the models that a model was made from, or that were made from it",
        examples=["lineage 8f3c21", "lineage 8f3c21 --step 20", "lineage models/m-2fd1/artifacts/data/model.pth"],
        options=[
            CHECKPOINT,
            RUN,
            LAST_STEP,
            NAME,
            option("--most", type=count, default=5, metavar="N", help="number of relatives (default: 5)"),
        ],
        run=lineage,
    ),
    Command(
        name="explain",
        help="explain how the tensors of a checkpoint would be read now",
        examples=[
            "explain baseline",
            "explain --run 8f3c21 --step 20 --tensor encoder.weight",
            "explain --run 8f3c21 --way direct",
        ],
        options=[
            CHECKPOINT,
            RUN,
            LAST_STEP,
            NAME,
            repeated("--tensor", metavar="NAME", help="only this tensor (repeatable)"),
            flag("--map", help="plan a read with copy=False: views of memory-mapped packs"),
            option("--way", choices=WAYS, help="plan a read in this way"),
        ],
        run=explain,
    ),
)
