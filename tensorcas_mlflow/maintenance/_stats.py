"""Figures of a store: chunks and bytes as they were logged, bytes on disk, and their owners."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from tensorcas_mlflow.backends import DATABASE_FILES, Backend, map_requests
from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.notebook import MOST_ROWS, Tabular, html_table, table_of_records
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.codecs import CODECS
from tensorcas_mlflow.errors import BackendError, CorruptError, FormatError
from tensorcas_mlflow.layout import DEFAULT_NAME, FORMS, REF_TABLES, Ref
from tensorcas_mlflow.layout.manifests import read_form
from tensorcas_mlflow.layout.packs import Entries, pack_key
from tensorcas_mlflow.maintenance._census import Census
from tensorcas_mlflow.maintenance._inventory import (
    NO_DIGESTS,
    DigestSet,
    Inventory,
    PackTables,
    disk_bytes,
    inventory_of_manifests,
    list_manifests,
    manifest_of,
    merge_inventories,
    read_tables,
)
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

if TYPE_CHECKING:
    import pyarrow as pa

_FOLD_ROWS = 1 << 20
Owner = TypeVar("Owner", bound=Hashable)


class Figures(Mapping[str, Any], Tabular):
    """Record that is also a mapping from the names of its fields, and a table of one row."""

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table of one row with a column for each field; ``disk`` becomes ``disk_packs`` and so on."""
        import pyarrow as pa

        return pa.table(
            {name: [list(value) if isinstance(value, tuple) else value] for name, value in self._flat().items()}
        )

    def _flat(self) -> dict[str, Any]:
        """Return the fields, with those of a record in a field under both names."""
        flat: dict[str, Any] = {}
        for name, value in self.items():
            if isinstance(value, Figures):
                flat.update({f"{name}_{inner}": each for inner, each in value._flat().items()})
            else:
                flat[name] = value
        return flat

    def _repr_html_(self) -> str:
        is_disk = isinstance(self, DiskUsage)
        rows = [
            (name.replace("_", " "), _in_words(value, is_bytes=is_disk or name.startswith("disk_") or "bytes" in name))
            for name, value in self._flat().items()
        ]
        return html_table((), rows)

    def _names(self) -> list[str]:
        return [field.name for field in fields(self)]  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskUsage(Figures):
    """Bytes of all files of a store, or of all its objects in a bucket, by kind."""

    total: int
    packs: int
    index: int
    manifests: int
    """Bytes of manifests."""
    refs: int
    intents: int
    condemned: int
    census: int
    quarantine: int
    format: int
    database: int
    """Bytes of the database with its write-ahead log: small blobs of all kinds, and pages of deleted ones."""
    other: int
    """Bytes of records of maintenance, of temporary files, and of files of other programs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreStats(Figures):
    """Figures of all runs of a store. Its fields are also items of a mapping."""

    runs: int
    checkpoints: int
    """Checkpoints and models."""
    files: int
    total_chunks: int
    """Chunks of all checkpoints and files; a chunk counts wherever it is needed."""
    unique_chunks: int
    """Distinct chunks."""
    dedup_ratio: float
    """Unique divided by total chunks, to four decimals; 1.0 if no chunk repeats, and if there are none."""
    saved_ratio: float
    """Share of `total_bytes` in chunks that repeat another one, to four decimals; 0.0 if no chunk repeats."""
    total_bytes: int
    """Bytes of all tensors and files as they were logged."""
    disk_bytes: int
    """Bytes of the whole store on disk."""
    disk: DiskUsage
    """Bytes of the whole store on disk, by kind."""
    damaged_refs: tuple[str, ...] = ()
    """Keys of refs that cannot be read. The figures leave them out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStats(Figures):
    """Figures of one run. Its fields are also items of a mapping; see `StoreStats`."""

    run_id: str
    checkpoints: int
    steps: tuple[int, ...]
    """Steps of its checkpoints and models, ascending, each once."""
    files: int
    total_chunks: int
    unique_chunks: int
    dedup_ratio: float
    saved_ratio: float
    total_bytes: int
    disk_bytes: int
    """Bytes of the whole store on disk: chunks are shared, so no run has a part of its own."""
    disk: DiskUsage


def run_stats(store: Store, run_id: str, refs: Sequence[Ref] | None = None) -> RunStats:
    """Count the chunks and bytes of a run; a run without any has zeros.

    Args:
        store: Store to count.
        run_id: The run.
        refs: All refs of the store, if the caller knows more of their runs than they say.

    Raises:
        CorruptError: A ref or manifest cannot be read.
    """
    refs = [ref for ref in (store.checkpoints() if refs is None else refs) if ref.run_id == run_id]
    steps = sorted({ref.step for ref in refs if ref.kind == "checkpoint" and ref.step is not None})
    return RunStats(run_id=run_id, steps=tuple(steps), **_figures_of(store, refs))


def store_stats(store: Store) -> StoreStats:
    """Count the chunks and bytes of a store; raises as `run_stats` does."""
    refs, damaged = store.readable_checkpoints()
    runs = {ref.run_id for ref in refs if ref.run_id is not None}
    return StoreStats(runs=len(runs), damaged_refs=tuple(sorted(damaged)), **_figures_of(store, refs))


_KIND_OF = {REF_TABLES: "refs", **dict.fromkeys(DATABASE_FILES, "database")}
"""Kinds of blobs and files that count as another kind."""


def disk_usage(backend: Backend) -> DiskUsage:
    """Add up the sizes of all files of a store."""
    sizes = dict.fromkeys((field.name for field in fields(DiskUsage)), 0)
    for path, n_bytes, _ in backend.files():
        kind = path.partition("/")[0]
        kind = _KIND_OF.get(kind, kind)
        sizes[kind if kind in sizes and kind != "total" else "other"] += n_bytes
        sizes["total"] += n_bytes
    return DiskUsage(**sizes)


class Encoded(NamedTuple):
    """Chunks in packs that are encoded alike, needed or not; a chunk in several packs counts each time."""

    codec: str
    depth: int
    """Number of other chunks that the decoding of each needs: above 0 for deltas alone."""
    n_chunks: int
    stored_bytes: int
    raw_bytes: int


class PackFigures(NamedTuple):
    """Figures of the packs of a store."""

    n_packs: int
    n_bytes: int
    encoded: tuple[Encoded, ...]
    """By codec and depth."""


def pack_figures(store: Store) -> PackFigures:
    """Count the chunks of all packs by codec and by the length of their chains of deltas.

    Raises:
        BackendError: The storage failed.
    """
    tables = PackTables(store.backend)
    tables.refresh()
    entries = tables.table().entries
    kinds, number = np.unique(entries["codec"].astype(np.int64) << 8 | entries["depth"], return_inverse=True)
    counts = np.bincount(number, minlength=len(kinds)).tolist()
    stored = np.bincount(number, weights=entries["stored_bytes"], minlength=len(kinds)).astype(np.int64).tolist()
    raw = np.bincount(number, weights=entries["raw_bytes"], minlength=len(kinds)).astype(np.int64).tolist()
    sizes = dict(p.list_packs(store.backend))
    return PackFigures(
        n_packs=len(sizes),
        n_bytes=sum(sizes.values()),
        encoded=tuple(
            Encoded(CODECS[kind >> 8].name if kind >> 8 in CODECS else f"codec {kind >> 8}", kind & 255, *figures)
            for kind, *figures in zip(kinds.tolist(), counts, stored, raw, strict=True)
        ),
    )


def _figures_of(store: Store, refs: Iterable[Ref]) -> dict[str, Any]:
    by_manifest: dict[str, list[Ref]] = {}
    for ref in refs:
        by_manifest.setdefault(ref.manifest, []).append(ref)
    n_checkpoints = n_files = n_chunks = n_bytes = 0
    distinct = DigestSet()
    for holders in by_manifest.values():
        manifest = manifest_of(store, holders)
        if manifest is None:
            continue
        n_files += sum(ref.kind == "file" for ref in holders)
        n_checkpoints += sum(ref.kind == "checkpoint" for ref in holders)
        n_chunks += len(manifest.digests) * len(holders)
        n_bytes += manifest.n_bytes * len(holders)
        distinct.add(manifest.stored_digests, manifest.stored_sizes)
    n_unique = len(distinct.digests())
    disk = disk_usage(store.backend)
    return {
        "checkpoints": n_checkpoints,
        "files": n_files,
        "total_chunks": n_chunks,
        "unique_chunks": n_unique,
        "dedup_ratio": round(n_unique / n_chunks, 4) if n_chunks else 1.0,
        "saved_ratio": round(1 - distinct.n_bytes() / n_bytes, 4) if n_bytes else 0.0,
        "total_bytes": n_bytes,
        "disk_bytes": disk.total,
        "disk": disk,
    }


By = Literal["experiment", "run", "series", "step"]


class RefOwner(NamedTuple):
    """Owner of a ref. A part that is unknown, or not asked for, is None."""

    experiment: str | None
    """Folder above those of runs, models and traces; MLflow names it by the experiment's id."""
    run_id: str | None
    step: int | None
    series: str | None = None
    """Name of the series of a checkpoint, or id of a logged model; None for other files."""


def owners_of(refs: Sequence[Ref], by: By, *, store_uri: str) -> list[RefOwner]:
    """Find the owner of each ref, as far as refs and artifact paths tell.

    Args:
        refs: All refs of the store: one may tell of a run what another does not.
        by: Kind of owner.
        store_uri: Root of the store, which may be the folder of an experiment.
    """
    placed = [_place(ref, store_uri) for ref in refs]
    runs = [ref.run_id if ref.run_id is not None else run for ref, (_, run) in zip(refs, placed, strict=True)]
    known = {run: experiment for run, (experiment, _) in zip(runs, placed, strict=True) if run and experiment}
    found: list[RefOwner] = []
    for ref, run, (experiment, _) in zip(refs, runs, placed, strict=True):
        if experiment is None and run is not None:
            experiment = known.get(run)
        found.append(
            RefOwner(
                experiment,
                run_id=None if by == "experiment" else run,
                step=ref.step if by == "step" and run else None,
                series=_series_of(ref) if by == "series" else None,
            )
        )
    return found


def _series_of(ref: Ref) -> str | None:
    if ref.model_id is not None or ref.kind == "file":
        return ref.model_id
    return ref.name or DEFAULT_NAME


def _place(ref: Ref, store_uri: str) -> tuple[str | None, str | None]:
    """Return the folder of the experiment in an artifact path, and the run if it is a run's."""
    path = ref.path or ref.copy_path or ref.uri or ""
    folders = path.split("/")
    if "artifacts" not in folders[1:]:
        return None, None
    at = folders.index("artifacts", 1) - 1
    run: str | None = folders[at]
    if at > 0 and folders[at - 1] in ("models", "traces") and folders[at].startswith(("m-", "tr-")):
        run, at = None, at - 1
    experiment = folders[at - 1] if at > 0 else store_uri.rstrip("/").rpartition("/")[2]
    return experiment or None, run


_MAX_PAIRS = 1 << 21
"""Pairs of a chunk and an owner that are held at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Share(Figures):
    """Stored bytes that one owner needs: each chunk and each manifest once."""

    experiment: str | None
    run_id: str | None
    series: str | None
    step: int | None
    refs: int
    """Checkpoints, models and files."""
    exclusive_bytes: int
    """Bytes that nobody else needs: dropping this owner's refs frees them, once packs are rewritten."""
    shared_bytes: int
    """Bytes that others need too."""
    marginal_bytes: int
    """Bytes that nobody needed before, in the order in which the present refs were made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares(Figures):
    """Stored bytes that all owners need. ``needed_bytes`` is the sum of the next two, and of all marginal bytes."""

    by: By
    needed_bytes: int
    """Bytes that some owner needs."""
    exclusive_bytes: int
    """Bytes that exactly one owner needs."""
    shared_bytes: int
    """Bytes that several owners need, counted once."""
    disk_bytes: int
    """Bytes of all files of the store: the needed ones, garbage, tables of packs, refs, the index and the database."""
    shares: tuple[Share, ...]
    """Most exclusive bytes first."""

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table with a row for each of ``shares``."""
        return table_of_records(self.shares, _SHARE_COLUMNS)

    def _repr_html_(self) -> str:
        rows = [
            [_in_words(share[name], is_bytes=name.endswith("_bytes")) for name in _SHARE_COLUMNS]
            for share in self.shares[:MOST_ROWS]
        ]
        caption = f"{size_text(self.needed_bytes)} needed, {size_text(self.shared_bytes)} of them by several owners"
        headings = [name.replace("_", " ") for name in _SHARE_COLUMNS]
        return html_table(headings, rows, caption=caption, n_more=len(self.shares) - len(rows))


_SHARE_COLUMNS = [field.name for field in fields(Share)]


def _in_words(value: Any, *, is_bytes: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return size_text(value) if is_bytes else str(value)


class OwnedBytes(NamedTuple):
    """Stored bytes that one owner needs; see `Share`."""

    refs: int
    exclusive_bytes: int
    shared_bytes: int
    marginal_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division(Generic[Owner]):
    """Stored bytes of a store's refs, divided among owners; see `Shares`."""

    needed_bytes: int
    exclusive_bytes: int
    shared_bytes: int
    owned: Mapping[Owner, OwnedBytes]
    """In the order of each owner's first ref."""


class StoredBytes:
    """Stored bytes that the refs of a store need. They are read once, and divided among any owners."""

    def __init__(self, store: Store, refs: Iterable[Ref]) -> None:
        """Take the inventory. Reads no tensor, and no blob that a census knows.

        Args:
            store: The store.
            refs: All its refs that count.

        Raises:
            CorruptError: A manifest cannot be read.
        """
        listed = sorted(refs, key=lambda ref: (ref.created, ref.key))
        self._inventory, self._forms = _inventory_of(store, listed)
        self.refs = tuple(ref for ref in listed if ref.manifest in self._inventory.position)
        """The refs whose manifests are there, oldest first."""
        self._chunk_bytes, self._manifest_bytes = _stored_bytes(store.backend, self._inventory)

    def divide(self, owners: Sequence[Owner]) -> Division[Owner]:
        """Divide the bytes among owners.

        Args:
            owners: The owner of each of ``refs``.
        """
        inventory, refs = self._inventory, self.refs
        number = {owner: at for at, owner in enumerate(dict.fromkeys(owners))}
        owner_of_ref = np.array([number[owner] for owner in owners], dtype=np.int64)
        rank = np.full(len(inventory.manifests), len(refs), dtype=np.int64)
        # A ref needs its manifest, and the manifest of its form.
        formed = [at for at, ref in enumerate(refs) if ref.manifest in self._forms]
        names = [*(ref.manifest for ref in refs), *(self._forms[refs[at].manifest] for at in formed)]
        at_manifest = np.array([inventory.position[name] for name in names], dtype=np.int64)
        at_ref = np.append(np.arange(len(refs)), np.array(formed, dtype=np.int64))
        np.minimum.at(rank, at_manifest, at_ref)
        pairs = np.unique(at_manifest << 32 | owner_of_ref[at_ref])
        ownership = _Ownership(manifest=pairs >> 32, owner=pairs & 0xFFFFFFFF, n_manifests=len(inventory.manifests))

        sums = _sums_of(ownership, inventory, self._chunk_bytes, self._manifest_bytes, n_owners=len(number))
        first = np.append(owner_of_ref, 0)
        chunk, earliest = _earliest(inventory, rank)
        is_needed = earliest < len(refs)
        added = _sums_by(first[earliest[is_needed]], self._chunk_bytes[chunk[is_needed]], len(number))
        has_ref = rank < len(refs)
        added += _sums_by(first[rank[has_ref]], self._manifest_bytes[has_ref], len(number))

        n_refs = np.bincount(owner_of_ref, minlength=len(number)).tolist()
        exclusive, shared = sums.exclusive.tolist(), (sums.needed - sums.exclusive).tolist()
        owned = map(OwnedBytes, n_refs, exclusive, shared, added.tolist())
        return Division(
            needed_bytes=int(sums.exclusive.sum()) + sums.shared_once,
            exclusive_bytes=int(sums.exclusive.sum()),
            shared_bytes=sums.shared_once,
            owned=dict(zip(number, owned, strict=True)),
        )


def find_shares(store: Store, by: By, *, run_id: str | None = None, refs: Sequence[Ref] | None = None) -> Shares:
    """Find the owners of the bytes of a store. Reads no tensor, and no blob that a census knows.

    Args:
        store: Store to count.
        by: Kind of owner: experiments, runs, or the series or the steps of each run.
        run_id: Return only the shares of this run; shared bytes are still counted with all others.
        refs: All refs of the store, if the caller knows more of their runs than they say.

    Raises:
        CorruptError: A ref or manifest cannot be read.
    """
    stored = StoredBytes(store, store.checkpoints() if refs is None else refs)
    owners = owners_of(stored.refs, by, store_uri=store.uri)
    divided = stored.divide(owners)
    wanted = {o for ref, o in zip(stored.refs, owners, strict=True) if run_id in (None, ref.run_id, o.run_id)}
    shares = [Share(**owner._asdict(), **owned._asdict()) for owner, owned in divided.owned.items() if owner in wanted]
    return Shares(
        by=by,
        needed_bytes=divided.needed_bytes,
        exclusive_bytes=divided.exclusive_bytes,
        shared_bytes=divided.shared_bytes,
        disk_bytes=disk_bytes(store.backend),
        shares=tuple(sorted(shares, key=lambda share: -share.exclusive_bytes)),
    )


def bytes_freed_by(store: Store, refs: Sequence[Ref]) -> int:
    """Return the stored bytes that only some refs need: those that dropping them frees, once packs are rewritten.

    Raises:
        CorruptError: A ref or manifest of the store cannot be read.
    """
    stored, dropped = StoredBytes(store, store.checkpoints()), {ref.key for ref in refs}
    owned = stored.divide([ref.key in dropped for ref in stored.refs]).owned
    return owned[True].exclusive_bytes if True in owned else 0


def _sums_of(
    ownership: _Ownership, inventory: Inventory, chunk_bytes: Any, manifest_bytes: Any, *, n_owners: int
) -> _Sums:
    """Add up the bytes of chunks and manifests by owner."""
    sums = _Sums(n_owners)
    for chunk, owner in ownership.pairs(inventory):
        sums.add(chunk, owner, chunk_bytes)
    sums.add(ownership.manifest, ownership.owner, manifest_bytes)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ownership:
    """Pairs of a manifest and an owner that has a ref of it; sorted by manifest, then by owner."""

    manifest: Any
    owner: Any
    n_manifests: int

    def pairs(self, inventory: Inventory) -> Any:
        """Yield each chunk with each of its owners once, sorted by chunk; all pairs of one chunk together."""
        # Neighbours with the same single owner are one block; any other manifest is a block of its own.
        n_owners = np.bincount(self.manifest, minlength=self.n_manifests)
        begin = np.concatenate([[0], np.cumsum(n_owners)])
        single = np.full(self.n_manifests, -1, dtype=np.int64)
        single[n_owners == 1] = self.owner[begin[:-1][n_owners == 1]]
        is_new = np.ones(self.n_manifests, dtype=bool)
        is_new[1:] = (single[1:] != single[:-1]) | (single[1:] < 0)
        block = np.cumsum(is_new) - 1
        opens = np.flatnonzero(is_new)
        of_block, from_ = n_owners[opens], begin[:-1][opens]
        upto = np.concatenate([[0], np.cumsum(of_block)])
        first, last = block[inventory.span_start], block[inventory.span_stop - 1]
        weight = np.cumsum(upto[last + 1] - upto[first])
        starts = np.concatenate([[0], np.flatnonzero(np.diff(inventory.span_chunk)) + 1, [len(weight)]])
        at = 0
        while at < len(weight):
            enough = np.searchsorted(weight, (weight[at - 1] if at else 0) + _MAX_PAIRS)
            to = int(starts[max(np.searchsorted(starts, enough, side="right") - 1, np.searchsorted(starts, at) + 1)])
            rows, blocks = _counted_up(first[at:to], last[at:to] - first[at:to] + 1)
            again, owners = _counted_up(from_[blocks], of_block[blocks])
            pairs = inventory.span_chunk[at:to][rows[again]].astype(np.int64) << 32 | self.owner[owners]
            pairs.sort(kind="stable")  # fast, as most of it is sorted already
            pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs
            yield pairs >> 32, pairs & 0xFFFFFFFF
            at = to


def _counted_up(start: Any, n: Any) -> tuple[Any, Any]:
    """Write out ranges one after the other; return for each number its range, and the number."""
    of = np.repeat(np.arange(len(n)), n)
    return of, np.arange(len(of)) + np.repeat(start - (np.cumsum(n) - n), n)


class _Sums:
    """Sums of bytes by owner."""

    def __init__(self, n_owners: int) -> None:
        self.needed = np.zeros(n_owners, dtype=np.int64)
        self.exclusive = np.zeros(n_owners, dtype=np.int64)
        self.shared_once = 0

    def add(self, item: Any, owner: Any, item_bytes: Any) -> None:
        """Add pairs of an item and an owner, none twice, all pairs of one item together."""
        if len(item) == 0:
            return
        begins = np.concatenate([[True], item[1:] != item[:-1]])
        is_alone = begins & np.append(begins[1:], True)
        self.needed += _sums_by(owner, item_bytes[item], len(self.needed))
        self.exclusive += _sums_by(owner[is_alone], item_bytes[item[is_alone]], len(self.exclusive))
        self.shared_once += int(item_bytes[item[begins]].sum()) - int(item_bytes[item[is_alone]].sum())


def _sums_by(owner: Any, n_bytes: Any, n_owners: int) -> Any:
    """Add up bytes by owner; as floats, which are exact up to eight petabytes."""
    return np.bincount(owner, weights=n_bytes, minlength=n_owners).astype(np.int64)


def _earliest(inventory: Inventory, rank: Any) -> tuple[Any, Any]:
    """Return the chunks that manifests name, and for each the least rank of a manifest that does."""
    if len(inventory.span_chunk) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    least = np.full(len(inventory.digests), np.iinfo(np.int64).max)
    borders = np.stack([inventory.span_start, inventory.span_stop], axis=1).ravel()
    of_span = np.minimum.reduceat(np.append(rank, np.iinfo(np.int64).max), borders.astype(np.int64))[::2]
    np.minimum.at(least, inventory.span_chunk, of_span)
    chunk = np.unique(inventory.span_chunk)
    return chunk, least[chunk]


def _stored_bytes(backend: Backend, inventory: Inventory) -> tuple[Any, Any]:
    """Return the bytes on the disk of each chunk, those of its smallest copy, and of each manifest.

    A chunk without a copy has 0. Packs and manifests that are no files of their own share the bytes of the database in
    proportion to their sizes, so that all of them together never have more bytes than the files.
    """
    entry_bytes, manifest_bytes = inventory.entry_bytes.astype(np.int64), inventory.manifest_bytes.astype(np.int64)
    if backend.has_database:
        files = {file.path: file.size for file in backend.files()}
        packs = np.array([pack_key(name) not in files for name in inventory.packs], dtype=bool)
        all_manifests = {
            name: size for name, size in list_manifests(backend).items() if f"manifests/{name}" not in files
        }
        manifests = np.array([name in all_manifests for name in inventory.manifests], dtype=bool)
        in_rows = int(inventory.pack_bytes[packs].sum()) + sum(all_manifests.values())
        share = min(1.0, sum(files.get(name, 0) for name in DATABASE_FILES) / max(in_rows, 1))
        entries = packs[inventory.entry_pack]
        # Rounding each by itself would lose a part of a byte of each, and their sum would depend on their sizes.
        ends = np.cumsum(np.concatenate([entry_bytes[entries], manifest_bytes[manifests]])) * share
        shared = np.diff(ends.astype(np.int64), prepend=0)
        entry_bytes[entries], manifest_bytes[manifests] = np.split(shared, [np.count_nonzero(entries)])
    least = np.full(len(inventory.digests), np.iinfo(np.int64).max)
    np.minimum.at(least, inventory.entry_chunk, entry_bytes)
    return np.where(least == np.iinfo(np.int64).max, 0, least), manifest_bytes


def _inventory_of(store: Store, refs: Sequence[Ref]) -> tuple[Inventory, Mapping[str, str]]:
    """Take the inventory of the manifests of some refs and of all packs: from a census, and reading what it lacks.

    Returns:
        The inventory, in which the chunks of a manifest with a form are those of the form's manifest; and that one's
        name for each of these.
    """
    backend = store.backend
    census = Census(backend)
    census.load()
    by_manifest: dict[str, list[Ref]] = {}
    for ref in sorted(refs, key=lambda ref: (ref.run_id or "", ref.name or "", ref.step or 0)):
        by_manifest.setdefault(ref.manifest, []).append(ref)
    manifests = list_manifests(backend)
    unknown = [held for name, held in by_manifest.items() if census.manifests.get(name) != manifests.get(name)]
    found = map_requests(backend, lambda held: manifest_of(store, held), unknown)
    for held, manifest in zip(unknown, found, strict=True):
        if manifest is not None:
            name = held[0].manifest
            census.learn_manifest(name, manifest.stored_digests, n_bytes=manifests.get(name, 0))
    sizes = dict(p.list_packs(backend))
    tables: dict[str, Entries] = {}
    for name, table in read_tables(backend, {n: size for n, size in sizes.items() if census.packs.get(n) != size}):
        if isinstance(table, FormatError | BackendError) and not isinstance(table, CorruptError):
            raise table
        if isinstance(table, np.ndarray):
            tables[name] = table
    census.learn_packs(tables, sizes)
    forms = {str(ref.of): ref.manifest for ref in p.read_refs(backend, below=FORMS) if ref.of in by_manifest}
    names = sorted(set(forms.values()) - by_manifest.keys())
    read = map_requests(backend, lambda name: read_form(backend, name), names)
    stored: dict[str, Digests] = {
        name: form.stored_digests for name, form in zip(names, read, strict=True) if form is not None
    }
    forms = {of: name for of, name in forms.items() if name in stored or name in census.manifests}
    in_forms = forms.keys() - set(forms.values())
    stored |= dict.fromkeys(in_forms, NO_DIGESTS)
    inventory = census.inventory.only(manifests=by_manifest.keys() - in_forms, packs=sizes)
    if stored:
        named = [(name, manifests.get(name, 0), digests) for name, digests in stored.items()]
        inventory = merge_inventories([inventory, inventory_of_manifests(named)])
    return inventory, forms
