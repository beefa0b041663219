"""Shards of one checkpoint, stored by several processes and joined into ordinary rows by one of them.

Each process stores its shards like a batch of a stream (``docs/design/protocol.md``, A checkpoint of many ranks): under
an intent that is never promoted. The coordinator joins the rows, and an ordinary save of the joined rows declares every
digest anew and checks every pack. So the commit trusts nothing that a rank has found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.digest import Digests, digest, unique_rows
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.tensors import Spec, bytes_of
from tensorcas_mlflow.codecs import Kind, check, evaluate, fills
from tensorcas_mlflow.errors import BackendError, FencedError, FormatError, NotFoundError
from tensorcas_mlflow.layout.manifests import Columns, Manifest, Row, Rows
from tensorcas_mlflow.store._bases import FindParent, Parents
from tensorcas_mlflow.store._choose import Policy
from tensorcas_mlflow.store._derivations import Derived
from tensorcas_mlflow.store._encode import encode_chunks, new_chooser
from tensorcas_mlflow.store._save import declare, look, probe, write_packs
from tensorcas_mlflow.store._sources import NoSource, ReadRows, TensorSource

if TYPE_CHECKING:
    from tensorcas_mlflow.store._store import Store

ASSEMBLE = "assemble"
"""The function that puts boxes together (``docs/format.md``, Functions)."""
_MOST_KNOWN = 1 << 14
_known: dict[bytes, Digests] = {}
"""Digests of assembled tensors, by everything they are made of: most steps change few of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One stored box of a tensor."""

    row: Row
    """Its chunks. The shape is that of the box, or one side if the box is one stretch of the tensor's bytes."""
    offsets: tuple[int, ...]
    """The box's first element along each axis of the tensor."""
    shape: tuple[int, ...]
    """The sides of the box."""

    @property
    def n_elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShards:
    """Shards of one process. The intent protects them until `withdraw_shards`."""

    shards: tuple[Shard, ...]
    """The shards in the order in which they were given."""
    intent: str
    """Key of the intent."""
    n_new_bytes: int
    """Bytes of the chunks that the store lacked."""
    n_stored_bytes: int
    """Bytes added to the store."""


def is_stretch(box: Sequence[int], shape: Sequence[int]) -> bool:
    """Tell whether the elements of a box are neighbours in the bytes of its tensor."""
    cut = [axis for axis, (part, side) in enumerate(zip(box, shape, strict=True)) if part != side]
    return not cut or all(side == 1 for side in box[: cut[-1]])


def first_element(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Return the place of a box's first element in its tensor, counted in C order."""
    at = 0
    for offset, side in zip(offsets, shape, strict=True):
        at = at * side + offset
    return at


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """One box of a tensor to store."""

    name: str
    """The tensor's name."""
    data: Array
    """Its elements, of the box's shape."""
    offsets: tuple[int, ...]
    """The box's first element along each axis of the tensor."""
    shape: tuple[int, ...]
    """The tensor's shape."""

    @property
    def key(self) -> str:
        """The box's name in the search for bases; other tensors and other boxes have others."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"


def store_shards(
    store: Store,
    boxes: Sequence[Box],
    *,
    series: str,
    policy: Policy,
    earlier: FindParent | None = None,
) -> StoredShards:
    """Store boxes of tensors, durable on return and protected by an intent.

    A box that is one stretch of its tensor's bytes is cut where the whole tensor would be cut. So another number of
    ranks, or a single process, shares all chunks but those at the borders of shards.

    Args:
        store: The store.
        boxes: The boxes, each key once. Their arrays must not change meanwhile.
        series: Name of the rank's part of the series: its last step has the bases of deltas.
        policy: Encoding effort.
        earlier: Reads the last checkpoint of the series, if this process has not written one.

    Raises:
        ConflictError: An array was changed after it was hashed.
        BackendError: The storage failed; the written blobs are garbage and nothing is lost.
    """
    arrays: dict[str, Array] = {}
    cuts: dict[str, Sequence[int]] = {}
    for box in boxes:
        data = box.data
        if is_stretch(data.shape, box.shape):
            data = data.reshape(-1)
            grid = store.chunk_bytes // data.itemsize
            begin = first_element(box.offsets, box.shape)
            border = -begin % grid
            if data.itemsize * grid == store.chunk_bytes and 0 < border < len(data):
                cuts[box.key] = [border, len(data)]
        arrays[box.key] = data
    if len(arrays) != len(boxes):
        raise ValueError("a box of a tensor was given twice")
    source = TensorSource(arrays, cuts, store.chunk_bytes)
    # Without a parent that has these boxes, the last checkpoint has the whole tensors.
    parents = None
    if policy is not Policy.FAST:
        parents = Parents(
            store=store, series=series, earlier=None if earlier is None else partial(_boxes_of, earlier, boxes, store)
        )
    digests = source.columns.digests
    unique, first, _ = unique_rows(digests)
    new = np.sort(first[~store.catalog.find_sound(unique, ()).found])
    plan = parents.plan(source, new) if parents is not None and len(new) else None
    # No manifest will ever have this name: the intent exists for its digests.
    never = f"{new_name()}{new_name()}"
    intent, _ = declare(store.backend, never, unique, plan.packs if plan is not None else ())
    try:
        condemned = look(store.backend, store.catalog)
        if plan is not None:
            plan.leave_out(store.backend, condemned)
        new = np.sort(first[probe(store.backend, store.catalog, unique, condemned)])
        payloads = encode_chunks(source, new, policy, plan, new_chooser(policy))
        keep = store.chunks.kept if store.backend.is_remote else None
        n_stored = write_packs(store.backend, store.catalog, payloads, condemned, keep=keep)
    except BaseException:
        withdraw_shards(store, [intent])
        raise
    if parents is not None:
        parents.note(_manifest_of(store, source.rows))
    rows = list(source.rows)
    return StoredShards(
        shards=tuple(
            Shard(row=row, offsets=box.offsets, shape=box.data.shape) for row, box in zip(rows, boxes, strict=True)
        ),
        intent=intent,
        n_new_bytes=int(source.sizes[new].sum()),
        n_stored_bytes=n_stored,
    )


def withdraw_shards(store: Store, intents: Iterable[str]) -> None:
    """Withdraw the intents of stored shards; a missing one is no error. A collection removes any that stays."""
    for key in intents:
        try:
            store.backend.delete(key)
        except BackendError:
            continue


def _manifest_of(store: Store, rows: Sequence[Row]) -> Manifest:
    return Manifest(kind="checkpoint", chunk_bytes=store.chunk_bytes, store_id=store.id, flavor=None, rows=rows)


def _boxes_of(earlier: FindParent, boxes: Sequence[Box], store: Store) -> Manifest | None:
    """Cut boxes out of the rows of an earlier checkpoint, as far as its chunks end where the boxes do."""
    manifest = earlier()
    if manifest is None or manifest.chunk_bytes != store.chunk_bytes:
        return None
    derived = {each.row: each for each in manifest.derived}
    table = [*manifest.rows, *manifest.inputs]
    found: list[Row] = []
    for box in boxes:
        if box.name not in manifest.by_name:
            continue
        number = manifest.by_name.number(box.name)
        row = table[number]
        if row.spec.shape != box.shape:
            continue
        if number in derived:
            function = derived[number]
            if function.function == ASSEMBLE:
                for at, offsets in zip(function.inputs, function.params["offsets"], strict=True):
                    if tuple(offsets) == box.offsets and table[at].spec.shape == box.data.shape:
                        found.append(replace(table[at], spec=replace(table[at].spec, name=box.key)))
            continue
        if is_stretch(box.data.shape, box.shape):
            begin = first_element(box.offsets, box.shape) * box.data.itemsize
            part = _stretch_of(row, begin, begin + box.data.nbytes, store.chunk_bytes)
            if part is not None:
                spec = Spec(name=box.key, dtype=row.spec.dtype, shape=(box.data.size,))
                found.append(Row(spec=spec, cuts=part[0], digests=part[1]))
    return _manifest_of(store, found) if found else None


def _stretch_of(row: Row, begin: int, end: int, chunk_bytes: int) -> tuple[Any, Digests] | None:
    """Return the cuts and the digests of a stretch of a row's bytes; None if no chunks end at its borders."""
    ends = row.ends(chunk_bytes)
    borders = np.append(0, ends)
    first, last = np.searchsorted(borders, [begin, end])
    if last >= len(borders) or borders[first] != begin or borders[last] != end:
        return None
    at = ends[first:last] - begin
    is_grid = np.array_equal(at, np.append(np.arange(chunk_bytes, end - begin, chunk_bytes), end - begin))
    return (None if is_grid else at), row.digests[first:last]


class JoinedRows(NoSource):
    """The rows of a checkpoint whose chunks several processes have stored."""

    def __init__(self, rows: Sequence[Row], derived: Mapping[int, Derived], chunk_bytes: int) -> None:
        super().__init__(Rows(Columns.of_rows(rows)), chunk_bytes)
        self.derived = dict(derived)

    def _reader(self) -> ReadRows:
        def nothing(chunks: Any, _rows: Any) -> list[Any]:
            # A collector took a rank's intent for dead and deleted its chunks.
            raise FencedError(1)

        return nothing


def join_shards(store: Store, tensors: Sequence[tuple[Spec, Sequence[Shard]]]) -> JoinedRows:
    """Join the shards of tensors into the rows of an ordinary checkpoint.

    Args:
        store: The store of the shards.
        tensors: Name, dtype and shape of each tensor, and its shards in any order. Of equal boxes the first one counts.

    Returns:
        A row for each tensor, in order. A tensor whose shards are stretches of its bytes has their chunks. Any other
        one is a derived row: the function ``assemble`` of the shards, which this call evaluates to hash its chunks.

    Raises:
        ValueError: The shards of a tensor overlap, leave a part out, or have another dtype; or a tensor that is not
            sharded along its first axes is too large to be assembled.
        NotFoundError: A stored shard is gone.
    """
    store.catalog.refresh()
    rows: list[Row] = []
    derived: dict[int, Derived] = {}
    for number, (spec, given) in enumerate(tensors):
        shards = _checked(spec, given)
        if all(is_stretch(shard.shape, spec.shape) for shard in shards):
            rows.append(_joined(store, spec, shards))
            continue
        made = _assembled(store, spec, shards)
        derived[number] = made
        rows.append(made.row)
    return JoinedRows(rows, derived, store.chunk_bytes)


def _checked(spec: Spec, given: Sequence[Shard]) -> list[Shard]:
    """Return the distinct shards of a tensor in the order of their first elements; check that they are all of it."""
    boxes = {(shard.offsets, shard.shape): shard for shard in reversed(given) if shard.n_elements}
    shards = sorted(boxes.values(), key=lambda shard: first_element(shard.offsets, spec.shape))
    for shard in shards:
        if shard.row.spec.dtype != spec.dtype:
            raise ValueError(f"a shard of {spec.name!r} has the dtype {shard.row.spec.dtype}, not {spec.dtype}")
    if not fills([shard.offsets for shard in shards], [shard.shape for shard in shards], spec.shape):
        raise ValueError(
            f"the shards of {spec.name!r} are not the whole tensor of shape {list(spec.shape)}: "
            + ", ".join(f"{list(shard.shape)} at {list(shard.offsets)}" for shard in shards[:8])
        )
    return shards


def _joined(store: Store, spec: Spec, shards: Sequence[Shard]) -> Row:
    ends: list[Any] = [np.empty(0, dtype=np.int64)]
    at = 0
    for shard in shards:
        ends.append(shard.row.ends(store.chunk_bytes) + at)
        at += shard.row.spec.n_bytes
    found = np.concatenate(ends)
    digests = np.concatenate([np.empty((0, 32), dtype=np.uint8), *(shard.row.digests for shard in shards)])
    grid = np.append(np.arange(store.chunk_bytes, at, store.chunk_bytes), at) if at else found
    if np.array_equal(found, grid):
        return Row(spec=spec, cuts=None, digests=digests)
    # A piece ends behind every chunk that is shorter than the grid's.
    is_short = np.diff(found, prepend=0) < store.chunk_bytes
    is_short[-1] = True
    return Row(spec=spec, cuts=found[is_short], digests=digests)


def _assembled(store: Store, spec: Spec, shards: Sequence[Shard]) -> Derived:
    inputs = [replace(shard.row, spec=replace(shard.row.spec, name="", shape=shard.shape)) for shard in shards]
    params = {"offsets": [list(shard.offsets) for shard in shards]}
    output = Kind(spec.dtype, spec.shape)
    kinds = [Kind(row.spec.dtype, row.spec.shape) for row in inputs]
    try:
        check(ASSEMBLE, params, kinds, output)
    except FormatError as error:
        raise ValueError(f"{spec.name!r} cannot be put together from its shards: {error}") from error

    def made() -> memoryview:
        names = [str(number) for number in range(len(inputs))]
        named = [replace(row, spec=replace(row.spec, name=name)) for row, name in zip(inputs, names, strict=True)]
        arrays = store.read_tensors(_manifest_of(store, Rows(Columns.of_rows(named))), names)
        return bytes_of(evaluate(ASSEMBLE, params, [arrays[name] for name in names], output))

    facts = repr((store.id, store.chunk_bytes, spec.dtype, spec.shape, params, [kind.shape for kind in kinds]))
    key = digest(facts.encode() + b"".join(row.digests.tobytes() for row in inputs))
    digests = _known.get(key)
    if digests is None:
        try:
            data = np.frombuffer(made(), dtype=np.uint8)
        except NotFoundError:
            raise FencedError(1) from None
        digests = TensorSource({"whole": data}, {}, store.chunk_bytes).columns.digests
        while len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[key] = digests
    row = Row(spec=spec, cuts=None, digests=digests)
    return Derived(function=ASSEMBLE, params=params, inputs=inputs, row=row, made=made)
