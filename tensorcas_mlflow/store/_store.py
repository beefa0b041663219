"""Store: everything a program does with one root.

A method that writes imports the writers itself: a program that only reads does not wait for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import (
    STORE_FOLDER,
    Backend,
    BlobInfo,
    MeteredBackend,
    ReadCounter,
    Root,
    Token,
    map_requests,
    open_backend,
    open_bucket,
)
from tensorcas_mlflow.base import config, threads
from tensorcas_mlflow.base.digest import Digests, unique_rows
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Offsets, Spec
from tensorcas_mlflow.base.threads import Lazy, Lock
from tensorcas_mlflow.chunk_io import Catalog
from tensorcas_mlflow.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ChunkNotFoundError,
    ConflictError,
    CorruptChunkError,
    CorruptError,
    ForbiddenError,
    FormatError,
    NewerFormatError,
    StoreNotFoundError,
    WrongStoreError,
)
from tensorcas_mlflow.layout import (
    FORMAT,
    MAX_REF_BYTES,
    Generation,
    Ref,
    RefTarget,
    Stamp,
    artifact_key,
    artifact_prefix,
    begin_first_generation,
    check_database,
    is_shown,
    label_of,
    list_blobs,
    list_dir,
    new_format,
    parse_format,
    read_ref,
    read_refs_around,
    stamp_of,
    unquote_segment,
)
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest, Rows
from tensorcas_mlflow.store._recent import RECENT

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io import ChunkReader, ExtentCache, ReadPlan, Way
    from tensorcas_mlflow.file_formats import FilePlace, Readable
    from tensorcas_mlflow.store._bases import FindParent
    from tensorcas_mlflow.store._choose import Policy, RecentChoices
    from tensorcas_mlflow.store._save import PendingSave
    from tensorcas_mlflow.store._sources import CountBytes, Source, TensorCopy


class Refs:
    """The refs of one store."""

    backend: Backend

    def ref(self, key: str) -> Ref | None:
        """Read the ref at a key, or return None."""
        return read_ref(self.backend, key)

    def artifact(self, path: str) -> Ref | None:
        """Return the ref of an artifact path, relative to the root; None if there is none."""
        return None if path == "" else read_ref(self.backend, artifact_key(path))

    def artifacts(self, directory: str = "", *, damaged: list[str] | None = None) -> tuple[list[Ref], list[str]]:
        """List an artifact directory.

        Args:
            directory: The directory; ``""`` is the root.
            damaged: Receives the paths of damaged refs in it, as far as their keys show them. Without it they raise.

        Returns:
            The refs directly in it, and the names of subdirectories with refs below them.

        Raises:
            CorruptError: A ref is damaged.
        """
        blobs, segments = list_dir(self.backend, artifact_prefix(directory))
        refs = [ref for ref in self._read(blobs, damaged) if ref.path is not None]
        prefix = f"{directory}/" if directory else ""

        def name_of(segment: str) -> str | None:
            # The segment is an encoding of the name; the refs below contain the name itself.
            name = None
            for info in list_blobs(self.backend, f"{artifact_prefix(directory)}/{segment}"):
                refs, errors = read_refs_around(self.backend, [info.key])
                for ref in refs:
                    if ref.path is not None:
                        return ref.path.removeprefix(prefix).split("/")[0]
                if errors:
                    name = unquote_segment(segment)  # unless the name was long
            return name

        names = map_requests(self.backend, name_of, segments)
        return refs, sorted({name for name in names if name is not None})

    def walk_artifacts(self, directory: str = "", *, damaged: list[str] | None = None) -> list[Ref]:
        """List all refs below an artifact directory, by path; ``damaged`` is that of `artifacts`."""
        infos = list_blobs(self.backend, artifact_prefix(directory))
        return sorted(self._read(infos, damaged), key=lambda ref: ref.path or "")

    def _read(self, infos: Iterable[BlobInfo], damaged: list[str] | None) -> list[Ref]:
        refs, errors = _read_listed(self.backend, infos)
        for key, error in errors.items():
            if damaged is None:
                raise error
            damaged.append(label_of(key) or key)
        return refs

    def artifact_token(self, path: str) -> Token | None:
        """Return a token of an artifact path's ref, different from its replacement's; None if there is no ref."""
        info = self.backend.stat(artifact_key(path))
        return None if info is None else info.token

    def drop_artifact(self, path: str, token: Token | None) -> bool:
        """Drop the ref of an artifact path if it still has the token; return whether it had."""
        return token is not None and self.backend.withdraw(artifact_key(path), token)

    def drop_artifacts(self, path: str) -> int:
        """Drop the ref of an artifact path and all refs below it; ``""`` means all artifacts.

        The next collection removes their data.

        Returns:
            The number of dropped refs; dropping none is no error.
        """
        keys = [info.key for info in list_blobs(self.backend, artifact_prefix(path))]
        if path and self.backend.stat(artifact_key(path)) is not None:
            keys.append(artifact_key(path))
        threads.run_all(self.backend.delete, keys, waits=self.backend.is_remote)
        return len(keys)

    def drop(self, ref: Ref) -> None:
        """Drop one ref; a missing one is no error."""
        self.backend.delete(ref.key)

    def checkpoints(self) -> list[Ref]:
        """List every ref of the store except stand-ins, in the order of their creation.

        A damaged ref is left out, with a warning.
        """
        refs, damaged = self.readable_checkpoints()
        for error in damaged.values():
            from logging import getLogger

            getLogger(__name__).warning("%s; it is left out, and `tensorcas verify` says more", error)
        return refs

    def readable_checkpoints(self) -> tuple[list[Ref], dict[str, CorruptError]]:
        """List refs like `checkpoints`, and the error of each damaged one, by its key."""
        infos = list_blobs(self.backend, "refs")
        shown = (info for info in infos if is_shown(info.key))
        refs, damaged = _read_listed(self.backend, shown)
        return sorted(refs, key=lambda ref: (ref.created, ref.key)), damaged


def _read_listed(backend: Backend, infos: Iterable[BlobInfo]) -> tuple[list[Ref], dict[str, CorruptError]]:
    """Read refs that were listed, in their order, and collect the damaged ones."""
    if backend.is_remote:
        from tensorcas_mlflow.layout import read_listed_refs  # a local listing needs no tables of refs

        return read_listed_refs(backend, infos)
    return read_refs_around(backend, (info.key for info in infos))


_LOOK_AGAIN_S = 60.0
"""After this long a remote store is checked again: somebody may have replaced it."""
_MOST_LISTED = 20_000
"""Maximum number of objects searched for stores below a remote place; a bucket may hold any number."""


class OpenStores:
    """The stores found by this process."""

    def __init__(self, open_at: Callable[[Root], Store]) -> None:
        self._open_at = open_at
        self._local: dict[str, tuple[Stamp, Store]] = {}
        self._remote: dict[Root, tuple[float, Store]] = {}
        self._lock = Lock()

    def find(self, place: Root) -> tuple[Store, str]:
        """Find the nearest store at a place or above; see `Store.find`."""
        return self._find_remote(place) if place.container else self._find_local(place)

    def _find_local(self, place: Root) -> tuple[Store, str]:
        root = path = place.path
        # Text and one `stat` a folder: every artifact path and every checkpoint needs this walk.
        while (stamp := stamp_of(root)) is None:
            root, below = os.path.dirname(root), root
            if root == below:
                raise StoreNotFoundError(place.uri)
        with self._lock:
            known, store = self._local.get(root, (None, None))
            if store is None or known != stamp:
                store = self._open_at(Root.parse(Path(root)))
                self._local[root] = stamp, store
        return store, path[len(root) :].lstrip(os.sep).replace(os.sep, "/")

    def _find_remote(self, place: Root) -> tuple[Store, str]:
        candidates = [place, *place.parents()]
        since = time.monotonic() - _LOOK_AGAIN_S
        with self._lock:
            # Stores are never nested, so a known one is the nearest.
            for root in candidates:
                seen_s, store = self._remote.get(root, (since, None))
                if store is not None and seen_s > since:
                    return store, root.path_of(place) or ""
        found: dict[Root, Store] = {}
        refused: list[ForbiddenError] = []

        def look(root: Root) -> None:
            try:
                found[root] = self._open_at(root)
            except StoreNotFoundError:
                pass
            except ForbiddenError as error:
                # A user with access to a part of a bucket may not read above it.
                if root == place:
                    refused.append(error)

        threads.run_all(look, candidates, waits=True)
        for root in candidates:
            if root in found:
                return self._keep(root, found[root]), root.path_of(place) or ""
        if refused:
            raise refused[0]
        raise StoreNotFoundError(place.uri)

    def _keep(self, root: Root, store: Store) -> Store:
        """Keep a store open; prefer one that is open already and has its index in memory."""
        with self._lock:
            _, known = self._remote.get(root, (0.0, None))
            if known is not None and known.id == store.id:
                store = known
            self._remote[root] = time.monotonic(), store
        return store


def check_free(place: Root) -> None:
    """Check that no store lies above or below a place.

    Raises:
        ConflictError: One does.
    """
    for above in _stores_above(place):
        raise ConflictError(f"{place.uri!r} lies inside the store at {above.uri!r}: use that one")
    for below in islice(stores_below(place), 1):
        raise ConflictError(f"{place.uri!r} lies above the store at {below.uri!r}: use that one, or another root")


def _stores_above(place: Root) -> list[Root]:
    if place.is_local:
        return [root for root in place.parents() if (root.folder / STORE_FOLDER / FORMAT).is_file()]
    found: list[Root] = []

    def look(root: Root) -> None:
        try:
            if open_bucket(root, STORE_FOLDER).head(FORMAT) is not None:
                found.append(root)
        except ForbiddenError:
            pass

    threads.run_all(look, list(place.parents()), waits=True)
    return found


def stores_below(place: Root, *, most_folders: int | None = None) -> Iterator[Root]:
    """Find the stores below a place.

    Args:
        place: A local folder, or a prefix in a bucket; of a bucket only a bounded number of objects is searched.
        most_folders: Maximum number of local folders to search; all by default.
    """
    if place.is_local:
        for folder, folders, _ in islice(os.walk(place.folder), most_folders):
            folders.sort()
            if STORE_FOLDER in folders and Path(folder) != place.folder:
                yield Root.parse(Path(folder))
                folders.clear()  # stores are never nested
            elif STORE_FOLDER in folders:
                folders.remove(STORE_FOLDER)
        return
    ending = f"/{STORE_FOLDER}/{FORMAT}"
    for info in islice(open_bucket(place, "").walk(""), _MOST_LISTED):
        if info.path.endswith(ending):
            yield place.joined(info.path.removesuffix(ending))


RootLike = str | os.PathLike[str] | Root
"""A root or a place below one, in a user's form; see `Root.parse`."""


class Store(Refs):
    """One content-addressed store. Cheap to open, safe to share between threads and processes.

    Open one with `Store.open`, `Store.init` or `Store.find`. A root is a path, a ``file:`` or ``tensorcas:`` URI of a
    folder, or a URI like ``tensorcas-s3://bucket/path``; the store is its folder ``.tensorcas``.
    """

    def __init__(self, backend: Backend, *, store_id: str, chunk_bytes: int, catalog: Catalog | None = None) -> None:
        self.backend = backend
        self.catalog = Catalog(backend, store_id) if catalog is None else catalog
        self.uri = backend.uri
        """The root as one URI."""
        self.id = store_id
        """32 hex digits, drawn on creation of the store; manifests carry it."""
        self.wide_folders: set[str] = set()
        """Folders of refs in a bucket, by key prefix, that take more than one request to list."""
        self.root_folders: set[str] = set()
        """Artifact roots of repositories in a bucket, and the folders above them, that this process has checked to be
        no files."""
        self.filled_folders: set[str] = set()
        """Folders of artifacts in a bucket that this process has listed to write into them."""
        self.chunk_bytes = chunk_bytes
        self._cache = _chunk_cache(backend)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    @Lazy
    def choices(self) -> RecentChoices:
        """The recent choices of codecs."""
        from tensorcas_mlflow.store._choose import RecentChoices

        return RecentChoices()

    @Lazy
    def chunks(self) -> ChunkReader:
        """The reader of chunks."""
        from tensorcas_mlflow.chunk_io import ChunkReader  # a process that lists checkpoints need not wait for it

        return ChunkReader(self.backend, self.catalog, cache=self._cache, store_id=self.id)

    # --- opening

    @classmethod
    def init(
        cls,
        root: RootLike,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        store_id: str | None = None,
        database: bool | None = None,
    ) -> Store:
        """Create a store.

        Args:
            root: Its root; a missing folder is created.
            chunk_bytes: Size of its chunks, fixed for its life: a power of two from 4 KiB to 64 MiB.
            store_id: 32 hex digits; drawn unless given. A copy of a store has its id.
            database: Whether small blobs go to a database: one transaction a save. A store with a database is changed
                on its own machine only. None takes the environment's TENSORCAS_DATABASE, by default true, and none
                where there can be none.

        Raises:
            ConflictError: There is a store here, above, or below already.
            RefusedError: The root cannot have a database.
            ValueError: The root cannot hold a store, or the chunk size is not such a number.
        """
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes & (chunk_bytes - 1):
            raise ValueError(
                f"a chunk size is a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes, not {chunk_bytes}"
            )
        place = Root.parse(root)
        check_free(place)
        return cls.init_backend(open_backend(place), chunk_bytes=chunk_bytes, store_id=store_id, database=database)

    @classmethod
    def init_backend(
        cls,
        backend: Backend,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        store_id: str | None = None,
        database: bool | None = None,
    ) -> Store:
        """Create a store in a backend, without checks of its surroundings; see `init`.

        Args:
            store_id: 32 hex digits; drawn unless given.
            database: Whether small blobs go to a database; see `init`.

        Raises:
            CorruptError: A store without its ``format`` is there: under another id none of its data would load.
        """
        if store_id is None and any(True for _ in list_blobs(backend, "manifests")) and backend.stat(FORMAT) is None:
            raise CorruptError(FORMAT, "it is gone from a store with manifests: run `tensorcas repair` to restore it")
        if database is None and not config.database():
            database = False
        backend.prepare(database=database)
        generation: Generation | None = None
        try:
            if backend.is_remote:
                # Written before the store exists: it tells users of an earlier store at this place that theirs is gone.
                if backend.stat(FORMAT) is not None:
                    raise BlobExistsError(FORMAT)
                generation = begin_first_generation(backend)
            blob = new_format(chunk_bytes, store_id, is_carried=backend.is_carrier, has_database=backend.has_database)
            backend.put_new(FORMAT, [blob])
        except BlobExistsError:
            raise ConflictError(f"there is already a store at {backend.uri!r}") from None
        store = cls.open_backend(backend)
        if generation is not None:
            store.catalog.identity.note(generation)
            RECENT.note_searched(store.id)  # a new store has no manifests of others, and a listing is a request
        return store

    def check_identity(self) -> None:
        """Check that the store at this place is still the one this object opened.

        Raises:
            StoreNotFoundError: There is no store any more.
            ConflictError: There is another one.
        """
        self.catalog.identity.check(None)

    @classmethod
    def open(cls, root: RootLike, *, create: bool = False, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Store:
        """Open the store at a root.

        Args:
            root: Its exact root; see `find` for a place below.
            create: Whether to create a missing store.
            chunk_bytes: Chunk size of a new store; see `init`.

        Raises:
            StoreNotFoundError: There is none.
            NewerFormatError: A later release created it.
            FormatError: Its ``format`` blob is damaged.
            ValueError: The root cannot hold a store.
        """
        place = Root.parse(root)
        backend = open_backend(place)
        try:
            return cls.open_backend(backend)
        except StoreNotFoundError:
            if not create:
                raise
        try:
            return cls.init(place, chunk_bytes=chunk_bytes)
        except ConflictError:
            # Another process may have created it just now; a conflict with a store elsewhere shows here again.
            if backend.stat(FORMAT) is None:
                raise
            return cls.open_backend(backend)

    @classmethod
    def open_backend(cls, backend: Backend) -> Store:
        """Open the store in a backend; see `open`."""
        try:
            blob = backend.get(FORMAT, max_bytes=MAX_REF_BYTES)
        except BlobNotFoundError:
            raise StoreNotFoundError(backend.uri) from None
        store_id, chunk_bytes = parse_format(blob)
        check_database(blob, backend)
        return cls(backend, store_id=store_id, chunk_bytes=chunk_bytes)

    @classmethod
    def find(cls, uri: RootLike) -> tuple[Store, str]:
        """Find the store around a place: the nearest one at it or above.

        Stores stay open for the life of the process, so finding one again is cheap.

        Returns:
            The store, and the place relative to its root, ``""`` for the root itself.

        Raises:
            StoreNotFoundError: There is none.
            ValueError: The place cannot hold a store.
        """
        return _open_stores.find(uri if isinstance(uri, Root) else Root.parse(uri))

    # --- writing

    def write_checkpoint(
        self,
        tensors: Mapping[str, Array],
        *,
        flavor: str | None = None,
        cuts: Mapping[str, Sequence[int]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        left_out: Mapping[str, str] | None = None,
        policy: Policy | str | None = None,
        series: str | None = None,
        earlier: FindParent | None = None,
    ) -> PendingSave:
        """Store arrays; write only chunks the store does not hold.

        Args:
            tensors: Arrays by name; one named `adapter.SKELETON` is plain bytes.
            flavor: Name of the adapter they come from.
            cuts: For some of them, rows of axis 0 at which a chunk ends; see `Adapter.cuts`.
            metadata: Plain JSON values for the manifest. Facts of one save (a time, a step) belong into the ref: here
                they would prevent equal checkpoints from sharing one manifest.
            left_out: Tensors that cannot be read as arrays, by name, with their types; see `Manifest.left_out`.
            policy: Encoding effort: ``fast``, ``balanced`` or ``small``; by default TENSORCAS_POLICY.
            series: Name shared by all states of one series: tensors with small changes since the last state
                are stored as deltas. By default the recent writes and reads of this process serve as candidates.
            earlier: Called for the last state of that series, if this process has not written one.

        Raises:
            ValueError: A name, dtype or cut cannot be stored, or there is no such policy.
            BackendError: The storage failed; the written blobs are garbage and nothing is lost.
        """
        return _written(
            self.begin_checkpoint(
                tensors,
                flavor=flavor,
                cuts=cuts,
                metadata=metadata,
                left_out=left_out,
                policy=policy,
                series=series,
                earlier=earlier,
            )
        )

    def begin_checkpoint(
        self,
        tensors: Mapping[str, Array] | Source,
        *,
        flavor: str | None = None,
        cuts: Mapping[str, Sequence[int]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        left_out: Mapping[str, str] | None = None,
        policy: Policy | str | None = None,
        series: str | None = None,
        earlier: FindParent | None = None,
        watch: CountBytes | None = None,
    ) -> PendingSave:
        """Hash arrays and find the chunks missing from the store, but write none yet; see `write_checkpoint`.

        Args:
            tensors: Arrays by name; a copy of them, made with its cuts and hashed before; or rows that several
                processes have stored.
            watch: Called with the number of bytes hashed.
        """
        from tensorcas_mlflow.store._bases import Parents
        from tensorcas_mlflow.store._choose import Policy
        from tensorcas_mlflow.store._save import PendingSave
        from tensorcas_mlflow.store._sources import Source, TensorSource

        chosen = Policy.of(policy)
        source: Source = (
            tensors
            if isinstance(tensors, Source)
            else TensorSource(
                tensors, cuts or {}, self.chunk_bytes, watch=watch, carried=self.carried(tensors, cuts or {}, series)
            )
        )
        manifest = Manifest(
            kind="checkpoint",
            chunk_bytes=self.chunk_bytes,
            store_id=self.id,
            flavor=flavor,
            metadata=metadata or {},
            left_out=left_out or {},
            rows=source.rows,
        )
        parents = Parents(store=self, series=series, earlier=earlier)
        return PendingSave(self.backend, self.catalog, manifest, source, policy=chosen, parents=parents)

    def copy(
        self,
        tensors: Mapping[str, Array],
        *,
        cuts: Mapping[str, Sequence[int]] | None = None,
        before: TensorCopy | None = None,
        series: str | None = None,
    ) -> TensorCopy:
        """Copy and hash arrays for a later `begin_checkpoint`, without access to the storage.

        Args:
            series: Its series there.
            before: The copy of an earlier state; unchanged chunks are not copied again. If its checkpoint was
                committed, the checkpoint still exists.

        Raises:
            ValueError: A name, dtype or cut cannot be stored.
        """
        from tensorcas_mlflow.store._sources import TensorCopy

        carried = self.carried(tensors, cuts or {}, series)
        return TensorCopy(tensors, cuts or {}, self.chunk_bytes, before=before, read=self._read_chunk, carried=carried)

    def carried(
        self, tensors: Mapping[str, Array], cuts: Mapping[str, Sequence[int]], series: str | None
    ) -> Mapping[str, Offsets]:
        """Return the cuts of the last checkpoint of a series, in bytes, for those of its arrays that have none yet.

        Rows were inserted in these arrays or dropped from them. Their next states share chunks with the last one only
        if they have its cuts.
        """
        last = None if series is None else RECENT.named(self.id, series)
        if last is None or last.columns.cuts is None or last.chunk_bytes != self.chunk_bytes:
            return {}
        carried: dict[str, Offsets] = {}
        for row in np.flatnonzero(last.columns.cuts.given).tolist():
            spec, at = last.columns.spec(row), last.columns.cuts.of(row)
            array = None if spec.name in cuts else tensors.get(spec.name)
            if array is not None and at is not None and Spec.of(spec.name, np.asarray(array)) == spec:
                carried[spec.name] = at
        return carried

    def _read_chunk(self, digest: Digests, n_bytes: int) -> memoryview:
        from tensorcas_mlflow.chunk_io import LastRow
        from tensorcas_mlflow.layout.manifests import each_form

        data = memoryview(bytearray(n_bytes))
        try:
            self.chunks.read(digest, [data], verify=True)
        except (ChunkNotFoundError, CorruptChunkError):
            for form in each_form(self.backend):
                at = np.flatnonzero((form.digests == digest).all(axis=1))
                if len(at):
                    with suppress(ChunkNotFoundError, FormatError):
                        self.chunks.read_chunks(form, at[:1], [data], verify=True, last=LastRow())
                        return data
            raise
        return data

    def relies_on(self, copy: TensorCopy) -> bool:
        """Tell whether this process believes that the store has all chunks of a copy, intact; from memory alone."""
        doubts = self.catalog.doubts()
        if copy.stored_at == doubts and not self.backend.is_remote:
            return True
        return bool(self.catalog.find_sound(unique_rows(copy.stored_digests)[0], ()).found.all())

    def write_file(self, path: Path) -> PendingSave:
        """Store a file of any kind; raise like `write_stream`, and OSError if the file cannot be read."""
        from tensorcas_mlflow.file_formats import FilePlace

        with open(path, "rb", buffering=0) as file:
            return self.write_stream(file, place=FilePlace.of(path))

    def write_stream(self, source: Readable, *, place: FilePlace | None = None) -> PendingSave:
        """Store the bytes of a file as they arrive, read once and held some 32 MiB at a time.

        Files in a format with tensors are split (`tensorcas_mlflow.file_formats`). A tensor already in the store takes
        no more space, whatever file it came in. A slightly changed one is stored as a difference from a file or
        checkpoint recently written or read. Other files are cut into chunks.

        Args:
            source: The bytes.
            place: The file's place: a path of this machine, or the path that it will have among the artifacts. Other
                files of the folder may describe raw tensors in it, as an ONNX model describes its external data.

        Raises:
            BackendError: The storage failed; the written blobs are garbage and nothing is lost.
            FencedError: The stream was silent for too long, and a collector gave it up; store it again.
            Exception: The source raised it.
        """
        from tensorcas_mlflow.file_formats import Tape
        from tensorcas_mlflow.store._bases import Parents
        from tensorcas_mlflow.store._choose import Policy
        from tensorcas_mlflow.store._ingest import Ingest
        from tensorcas_mlflow.store._save import PendingSave

        policy, parents = Policy.of(None), Parents(store=self)
        with Ingest(self.backend, self.catalog, self.chunk_bytes, policy=policy, parents=parents) as ingest:
            rows = ingest.take(Tape(source), place)
            manifest = Manifest(
                kind="file", chunk_bytes=self.chunk_bytes, store_id=self.id, flavor=None, rows=rows.content
            )
            save = _written(
                PendingSave(
                    self.backend,
                    self.catalog,
                    manifest,
                    rows,
                    policy=policy,
                    parents=parents,
                    is_fresh=self.backend.is_remote and ingest.n_batches > 0,
                )
            )
            save.n_new_bytes += ingest.n_new_bytes
            save.n_stored_bytes += ingest.n_stored_bytes
            return save

    def place_of(self, path: str) -> FilePlace:
        """Return the place of an artifact path, beside the files that the store has in the same folder."""
        from tensorcas_mlflow.file_formats import FilePlace
        from tensorcas_mlflow.store._beside import StoredFolder

        folder, _, name = path.rpartition("/")
        return FilePlace(StoredFolder(self, folder), name)

    def adopt(self, manifest: Manifest) -> PendingSave:
        """Pin a manifest from elsewhere, if this store holds all its chunks.

        Raises:
            WrongStoreError: It belongs to another store.
            ChunkNotFoundError: A chunk is missing here.
        """
        from tensorcas_mlflow.store._save import PendingSave
        from tensorcas_mlflow.store._sources import NoSource

        self._check_id(manifest)
        source = NoSource(Rows(manifest.stored), manifest.chunk_bytes, self._read_chunk)
        return _written(PendingSave(self.backend, self.catalog, manifest, source))

    def metered(self, tally: ReadCounter) -> Store:
        """Return the same store with counted reads; it shares this one's view of the index."""
        backend = MeteredBackend(self.backend, tally)
        catalog = self.catalog.copied(backend)
        return Store(backend, store_id=self.id, chunk_bytes=self.chunk_bytes, catalog=catalog)

    # --- reading

    def manifest(self, ref: Ref) -> Manifest:
        """Read the manifest of a ref.

        Raises:
            CorruptError: It is damaged or gone.
            NewerFormatError: A later release wrote it.
        """
        key = f"manifests/{ref.manifest}"
        try:
            manifest = Manifest.from_blob(self.backend.get(key, max_bytes=MAX_BYTES), ref.manifest)
        except BlobNotFoundError:
            raise CorruptError(key, f"it is gone, and {ref.label} needs it") from None
        except NewerFormatError as error:
            raise NewerFormatError(f"the manifest of {ref.label}", error.version, error.supported) from error
        except FormatError as error:
            raise CorruptError(key, f"{getattr(error, 'reason', error)}, and {ref.label} needs it") from error
        manifest = manifest.labelled(ref.label)
        RECENT.note(self.id, ref.manifest.partition(".")[0], manifest)
        self.catalog.take_hints_of([manifest])
        return manifest

    def steps_beside(self, target: RefTarget) -> list[int]:
        """List the steps of the series of a step, ascending, from names alone."""
        blobs, _ = list_dir(self.backend, target.key.rpartition("/")[0])
        leaves = (info.key.rpartition("/@")[2] for info in blobs)
        return sorted(int(leaf) for leaf in leaves if leaf.removeprefix("-").isdecimal())

    def manifest_before(self, target: RefTarget, steps: Sequence[int] | None = None) -> Manifest | None:
        """Read the manifest of the step before another, whose differences from it may be stored; None without one.

        Args:
            target: The step; None of a target without a run or a step.
            steps: The steps of its series, if they are known.
        """
        step = target.step
        if step is None or target.run_id is None:
            return None
        before = max(
            (each for each in (self.steps_beside(target) if steps is None else steps) if each < step), default=None
        )
        ref = None if before is None else self.ref(replace(target, step=before).key)
        return None if ref is None else self.manifest(ref)

    def read_tensors(
        self,
        manifest: Manifest,
        names: Iterable[str] | None = None,
        *,
        verify: bool = True,
        out: Mapping[str, Array] | None = None,
        copy: bool | None = None,
        way: Way | None = None,
    ) -> dict[str, Array]:
        """Read tensors of a checkpoint.

        Args:
            manifest: A manifest of this store.
            names: The tensors, in any order; all by default.
            verify: Whether to check every chunk's bytes against its digest.
            out: Arrays to fill, by name, for some tensors or all: of the tensor's dtype and shape, writable and in
                C order. Two with shared memory are refused. The read uses at most 32 MB of memory besides. After an
                error their contents are undefined.
            copy: False returns read-only views of memory-mapped packs, for tensors stored on this machine raw and in
                one piece: nothing is copied, and pages are read on first touch. Other tensors are
                read into new arrays. Packs never change, and deleted packs stay mapped. But if
                another program truncates a pack, touching the missing part kills the process (SIGBUS), and bytes it
                overwrites change after verification. None, the default, and True return new arrays.
            way: A forced way to read, if it is available: ``pread``, ``direct``, ``map`` or ``ranges``;
                by default TENSORCAS_READ, else the best way (see `explain`). A forced
                ``map`` copies out of a mapped pack, with the same dangers.

        Returns:
            Arrays by name: those of ``out``, views, or new ones, C-contiguous and writable; plain bytes as
            1-d uint8. Small new arrays share blocks of memory of about 4 MiB.

        Raises:
            TensorNotFoundError: A name has no tensor.
            WrongStoreError: The manifest belongs to another store.
            ChunkNotFoundError: A chunk is not in this store.
            CorruptChunkError: A chunk is damaged.
            ValueError: An array of ``out`` does not fit, or there is no such way.
        """
        self._check_id(manifest)
        return self.chunks.tensors(manifest, names, verify=verify, out=out, copy=copy, way=way)

    def explain(
        self,
        manifest: Manifest,
        names: Iterable[str] | None = None,
        *,
        copy: bool | None = None,
        way: Way | None = None,
    ) -> ReadPlan:
        """Return the way `read_tensors` would read now, and the reason; take its arguments, and read no tensor.

        Raises:
            TensorNotFoundError: A name has no tensor.
            WrongStoreError: The manifest belongs to another store.
            ChunkNotFoundError: A chunk is not in this store.
            ValueError: There is no such way.
        """
        self._check_id(manifest)
        return self.chunks.explain(manifest, names, copy=copy, way=way)

    def iter_file(self, ref: Ref, *, verify: bool = True) -> Iterator[bytes | memoryview]:
        """Yield, piece by piece, the bytes shown at an artifact path: a file, or a checkpoint's manifest.

        Raises like `read_tensors`. Holds about 16 MiB at a time.
        """
        manifest = self.manifest(ref)
        if ref.kind == "checkpoint":
            yield manifest.stream
            return
        yield from self.chunks.pieces(manifest, verify=verify)

    def _check_id(self, manifest: Manifest) -> None:
        if manifest.store_id != self.id:
            raise WrongStoreError(manifest.store_id or "(none: a self-contained model)", self.id, self.uri)


def _chunk_cache(backend: Backend) -> ExtentCache | None:
    if not backend.is_remote:
        return None
    from tensorcas_mlflow.chunk_io import ExtentCache

    return ExtentCache.of_environment()


_open_stores = OpenStores(lambda root: Store.open_backend(open_backend(root)))


def _written(save: PendingSave) -> PendingSave:
    try:
        save.write()
    except BaseException:
        save.abandon()
        raise
    return save
