"""The artifact repository: one view of the plain files of a folder and of what its store keeps for that folder."""

from __future__ import annotations

import asyncio
import os
import posixpath
import shutil
import tempfile
from collections.abc import AsyncIterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlflow.entities.file_info import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST
from mlflow.store.artifact.artifact_repo import ARTIFACT_STREAM_CHUNK_SIZE, ArtifactRepository, StreamUploadMixin

from tensorcas_mlflow import config
from tensorcas_mlflow._store_root import SCHEME, folder_of, owner_of, store_root_for
from tensorcas_mlflow.artifact_repo._errors import for_mlflow
from tensorcas_mlflow.artifact_repo._names import is_visible, is_visible_path, path_to_read, path_to_write
from tensorcas_mlflow.artifact_repo._plain import PlainTree
from tensorcas_mlflow.errors import (
    ChunkNotFoundError,
    FormatError,
    StoreNotFoundError,
    WrongStoreError,
)
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import PendingSave, RefTarget, Store, take_pending

PLAIN_BYTES = 64 * 1024
"""Text of at most this size stays a plain file: MLmodel, requirements, parameters, notes."""

MANIFEST_BYTES = 256 * 1024 * 1024
"""A longer file is not looked at as a manifest, for that is done in memory."""


class TensorCasArtifactRepository(ArtifactRepository, StreamUploadMixin):
    """Artifacts of one root; what its methods promise is said by MLflow's `ArtifactRepository`.

    A small text is a plain file below the root. All other files are kept by the store whose folder lies at or above
    the root; listings show them in their full size, and they are made when they are downloaded. Where the store has a
    ref for a path, that ref alone says what the path shows; a plain file beside it is a leftover of a crash.

    An object of this class has no state and is safe in threads. All errors are `MlflowException`, with codes that do
    not make a server's client try again for minutes where that cannot help.
    """

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        with for_mlflow():
            self._root = folder_of(artifact_uri)
            if not all(map(is_visible, self._root.parts)):
                raise ValueError(f"{artifact_uri!r} leads into a store's own folder: artifacts have no place there")
            self._plain = PlainTree(self._root)

    def log_artifact(self, local_file: str | Path, artifact_path: str | None = None) -> None:
        with for_mlflow():
            source = Path(local_file)
            self._write_file(source, path_to_write(source.name, artifact_path))

    def log_artifacts(self, local_dir: str | Path, artifact_path: str | None = None) -> None:
        with for_mlflow():
            top = path_to_write("", artifact_path)
            if not Path(local_dir).is_dir():
                raise ValueError(f"there is no folder {str(local_dir)!r} to log")
            # All names are checked before the first file is written.
            paths = {source: path_to_write(name, top) for source, name in _walk(Path(local_dir))}
            self._write_folder(top)
            for source, path in paths.items():
                # As everywhere in MLflow, a link to a folder becomes a folder with nothing in it.
                if source.is_dir():
                    self._write_folder(path)
                else:
                    self._write_file(source, path)

    def log_artifact_from_stream(
        self, stream: BinaryIO, artifact_file_name: str, artifact_path: str | None = None
    ) -> None:
        with for_mlflow(), tempfile.TemporaryDirectory() as scratch:
            path = path_to_write(posixpath.basename(artifact_file_name), artifact_path)
            self._prepare(path)
            source = Path(scratch, posixpath.basename(path))
            with source.open("wb") as out:
                shutil.copyfileobj(stream, out, ARTIFACT_STREAM_CHUNK_SIZE)
            self._write_file(source, path)

    async def log_artifact_from_async_stream(
        self, chunks: AsyncIterable[bytes], artifact_file_name: str, artifact_path: str | None = None
    ) -> None:
        # A server awaits this on its event loop, so what takes its time on the disk is done in a thread.
        with for_mlflow(), tempfile.TemporaryDirectory() as scratch:
            path = path_to_write(posixpath.basename(artifact_file_name), artifact_path)
            await asyncio.to_thread(self._prepare, path)
            source = Path(scratch, posixpath.basename(path))
            with source.open("wb") as out:
                async for chunk in chunks:
                    await asyncio.to_thread(out.write, chunk)
            await asyncio.to_thread(self._write_file, source, path)

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        with for_mlflow():
            folder = path_to_read(path)
            if not is_visible_path(folder):
                return []
            store, in_store = self._find_store(folder)
            if _has_ref(store, in_store):
                return []
            found = {info.path: info for info in self._plain.children(folder)}
            if store is not None:
                refs, names = store.artifacts(in_store)
                for child in (posixpath.join(folder, name) for name in names):
                    found[child] = FileInfo(child, True, None)
                for ref in refs:
                    child = posixpath.join(folder, posixpath.basename(ref.path or ""))
                    found[child] = FileInfo(child, False, ref.n_bytes)
            return [found[child] for child in sorted(found)]

    def _is_directory(self, artifact_path: str | None) -> bool:
        with for_mlflow():
            path = path_to_read(artifact_path)
            if not is_visible_path(path):
                return False
            store, in_store = self._find_store(path)
            return self._plain.has_folder(path) or (store is not None and any(store.artifacts(in_store)))

    def download_artifacts(self, artifact_path: str | None, dst_path: str | None = None) -> str:
        with for_mlflow():
            return str(super().download_artifacts(artifact_path, dst_path))  # type: ignore[no-untyped-call]

    def _iter_artifacts_recursive(self, path: str | None) -> Iterator[FileInfo]:
        with for_mlflow():
            top = path_to_read(path)
            found = {info.path: info for info in self._plain.walk(top)}
            for held in self._held(top):
                for ref in held.store.walk_artifacts(held.in_store):
                    child = posixpath.join(held.path, (ref.path or "").removeprefix(held.in_store).removeprefix("/"))
                    found[child] = FileInfo(child, False, ref.n_bytes)
        full = {parent for child in found for parent in _parents(child)}
        if top and not found:
            yield FileInfo(top, True, None)
        for child in sorted(found.keys() - full):
            yield found[child]

    def _download_file(self, remote_file_path: str, local_path: str | Path) -> None:
        with for_mlflow():
            path = path_to_read(remote_file_path)
            # A file may go from the folder to the store, or back, between two looks: then the second finds it.
            if not any(self._fetch(path, Path(local_path)) for _ in range(2)):
                raise MlflowException(f"No such artifact: {path!r}", error_code=RESOURCE_DOES_NOT_EXIST)

    def get_local_path(self, artifact_path: str) -> str | None:
        """Give the real path of a plain artifact, or None for what the store keeps and for what is not there.

        It is called on a server's event loop: the store is asked only where there is a plain file.
        """
        with for_mlflow():
            path = path_to_read(artifact_path)
            plain = self._plain.find(path)
            if plain is None or _has_ref(*self._find_store(path)):
                return None
            return os.fspath(plain)

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Delete a file, or a folder with all it holds, or all artifacts of this root; nothing there is no error.

        The store's own folder stays, even if this root is the store's: collection frees what no ref names any more.
        """
        with for_mlflow():
            path = path_to_read(artifact_path)
            for held in self._held(path):
                held.store.drop_artifacts(held.in_store)
            self._plain.remove(path)

    def _write_file(self, source: Path, path: str) -> None:
        if not source.is_file():
            raise ValueError(f"there is no file {str(source)!r} to log")
        store, in_store = self._prepare(path)
        folder = posixpath.dirname(path)
        self._plain.make_folder(folder)
        with source.open("rb") as file:
            head = file.read(PLAIN_BYTES + 1)
        # Whatever the path showed before, it shows at any moment: the old copy goes when the new one is there.
        if _is_small_text(head):
            self._plain.write(source, folder)
            store.drop_artifacts(in_store)
        else:
            save, target = self._save(store, source, head, path, in_store)
            with save:
                save.commit(target)
            self._plain.drop_file(path)

    def _write_folder(self, path: str) -> None:
        self._prepare(path, as_folder=True)
        self._plain.make_folder(path)

    def _save(self, store: Store, source: Path, head: bytes, path: str, in_store: str) -> tuple[PendingSave, RefTarget]:
        """Store a file. A manifest of this store is not stored, but pins what it names: it came with a save."""
        uri = posixpath.join(self.artifact_uri, path)
        owner = owner_of(uri)
        target = RefTarget(path=in_store, uri=uri, run_id=owner.run_id, model_id=owner.model_id)
        manifest = _manifest_in(source, head)
        if manifest is not None and manifest.store_id == store.id and manifest.kind == "checkpoint":
            held = take_pending(store, manifest.digest, in_store)
            if held is not None:
                return held
            # In a server, knowing digests must not open other people's weights.
            if not config.in_mlflow_server():
                with suppress(ChunkNotFoundError, WrongStoreError):
                    return store.adopt(manifest), target
        return store.write_file(source), target

    def _fetch(self, path: str, out: Path) -> bool:
        """Write an artifact to a local file; False if there is no such artifact."""
        if not is_visible_path(path):
            return False
        store, in_store = self._find_store(path)
        ref = store.artifact(in_store) if store is not None and in_store else None
        if store is None or ref is None:
            plain = self._plain.find(path)
            if plain is None or not plain.is_file():
                return False
            with suppress(FileNotFoundError):
                shutil.copy2(plain, out)
                return True
            return False
        try:
            with out.open("wb") as file:
                store.copy_file(ref, file)
        except BaseException:
            out.unlink(missing_ok=True)
            raise
        return True

    def _find_store(self, path: str) -> tuple[Store | None, str]:
        """Find the store that holds a path, and the path relative to that store's root; None if there is none.

        Raises:
            MlflowException: A server was sent to a folder that is none of its own, and something lies there.
        """
        # Asked from the innermost folder there is: this root may lie above stores, and a link may lead into another.
        folder = next((part for part in (path, *_parents(path)) if self._plain.has_folder(part)), "")
        try:
            store, in_store = Store.find(self._root / folder)
            return store, "/".join(filter(None, (in_store, path[len(folder) :].lstrip("/"))))
        except StoreNotFoundError:
            # A client may name any folder of the server's machine as an experiment's artifact location.
            if config.in_mlflow_server() and self._servers_folder() is None and not self._plain.is_empty():
                raise self._refusal() from None
            return None, ""

    def _prepare(self, path: str, *, as_folder: bool = False) -> tuple[Store, str]:
        """Find the store for a path that is to become a file, or a folder; it is made if there is none.

        Raises:
            ValueError: The path is taken by the other kind, or one of the folders it lies in is a file.
        """
        store, in_store = self._find_store(path)
        if store is None:
            self._make_store()
            store, in_store = self._find_store(path)
            assert store is not None
        folder, in_folder = (path, in_store) if as_folder else (posixpath.dirname(path), posixpath.dirname(in_store))
        blocker = self._plain.blocker(folder) or next(
            (part for part in (in_folder, *_parents(in_folder)) if _has_ref(store, part)), None
        )
        if blocker is not None:
            raise ValueError(f"{path!r} cannot be written: {blocker!r} is not a folder")
        if not as_folder and (self._plain.is_folder(path) or any(store.artifacts(in_store))):
            raise ValueError(f"{path!r} cannot be written as a file: it is a folder")
        return store, in_store

    def _make_store(self) -> None:
        place: Path | None = folder_of(store_root_for(self.artifact_uri))
        if config.in_mlflow_server():
            place = self._servers_folder()
        if place is None:
            raise self._refusal()
        Store.open(place, create=True)

    def _servers_folder(self) -> Path | None:
        """The artifact root of the server this process serves, if this root lies there."""
        for root in config.server_roots():
            with suppress(ValueError):
                folder = folder_of(root)
                if self._root.is_relative_to(folder):
                    return folder
        return None

    def _refusal(self) -> MlflowException:
        return MlflowException(
            f"This server does not touch {self.artifact_uri!r}: there is no store at or above it, and it is not the "
            f"server's own artifact destination. Make a store there with `{SCHEME} init`, or log to it without the "
            "server.",
            error_code=PERMISSION_DENIED,
        )

    def _held(self, path: str) -> list[_Held]:
        """Find the store that holds a path, or else the stores that lie below it."""
        if not is_visible_path(path):
            return []
        store, in_store = self._find_store(path)
        if store is not None:
            return [_Held(store=store, in_store=in_store, path=path)]
        return [
            _Held(store=Store.open(folder), in_store="", path=folder.relative_to(self._root).as_posix())
            for folder in self._plain.stores_below(path)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A folder whose virtual files one store keeps."""

    store: Store
    in_store: str
    """The folder, relative to the store's root."""
    path: str
    """The folder, relative to the repository's root."""


def _is_small_text(head: bytes) -> bool:
    if len(head) > PLAIN_BYTES or b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError:
        return False
    return True


def _manifest_in(source: Path, head: bytes) -> Manifest | None:
    if not Manifest.looks_like(head) or source.stat().st_size > MANIFEST_BYTES:
        return None
    with suppress(FormatError):
        return Manifest.from_bytes(source.read_bytes())
    return None


def _has_ref(store: Store | None, in_store: str) -> bool:
    return store is not None and in_store != "" and store.artifact(in_store) is not None


def _parents(path: str) -> Iterator[str]:
    """The folders a path lies in, the innermost first; not the root."""
    while path := posixpath.dirname(path):
        yield path


def _walk(top: Path) -> Iterator[tuple[Path, str]]:
    """All folders and files below a local folder with their POSIX paths relative to it, folders first."""
    for folder, folders, files in os.walk(top):
        for name in [*folders, *files]:
            source = Path(folder, name)
            yield source, source.relative_to(top).as_posix()
