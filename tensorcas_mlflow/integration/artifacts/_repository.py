"""The artifact repository: plain files of a folder and the content of its store, in one view."""

from __future__ import annotations

import asyncio
import errno
import logging
import mimetypes
import os
import posixpath
import shutil
import sys
import time
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from mlflow.entities.file_info import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST
from mlflow.store.artifact.artifact_repo import ArtifactRepository, StreamUploadMixin

from tensorcas_mlflow.backends import (
    NewText,
    PlainFile,
    Token,
    is_visible_path,
    open_plain_files,
)
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.threads import ordered_map, start
from tensorcas_mlflow.errors import (
    BackendError,
    ChunkNotFoundError,
    CorruptChunkError,
    CorruptError,
    FencedError,
    FormatError,
    NotFoundError,
    WrongStoreError,
)
from tensorcas_mlflow.file_formats import FilePlace, Readable
from tensorcas_mlflow.integration._artifact_uri import owner_of, root_of
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._mlflow_errors import to_mlflow
from tensorcas_mlflow.integration.artifacts._carried import CarriedStores
from tensorcas_mlflow.integration.artifacts._finder import Checked, StoreFinder, has_ref, parents
from tensorcas_mlflow.integration.artifacts._paths import (
    NOT_FOLLOWED,
    FolderLinks,
    Followed,
    check_upload,
    moved,
    path_to_read,
    path_to_write,
)
from tensorcas_mlflow.integration.artifacts._streams import DrawnStream, Rejoined, UploadStream, n_announced, read_head
from tensorcas_mlflow.integration.artifacts._virtual import (
    MAX_PAGES_LISTED,
    beside,
    folders_without_tensors,
    history_in,
    in_folder,
    virtual_at,
    write_pieces,
)
from tensorcas_mlflow.integration.pages import HISTORY_PAGE
from tensorcas_mlflow.integration.server_store import announcement
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import PendingSave, Store, has_pending, take_pending

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

_CODES = {
    errno.ENOENT: RESOURCE_DOES_NOT_EXIST,
    errno.EACCES: PERMISSION_DENIED,
    errno.EPERM: PERMISSION_DENIED,
    errno.EROFS: PERMISSION_DENIED,
    errno.EEXIST: INVALID_PARAMETER_VALUE,
    errno.EINVAL: INVALID_PARAMETER_VALUE,
    errno.EISDIR: INVALID_PARAMETER_VALUE,
    errno.ELOOP: INVALID_PARAMETER_VALUE,
    errno.ENAMETOOLONG: INVALID_PARAMETER_VALUE,
    errno.ENOTDIR: INVALID_PARAMETER_VALUE,
}


@contextmanager
def for_mlflow() -> Iterator[None]:
    """Turn our errors and those of the file system into `MlflowException`, around a block."""
    with translate_errors():
        try:
            yield
        except (CorruptError, CorruptChunkError, ChunkNotFoundError) as error:
            if config.in_mlflow_server():  # a client may get another error in its place
                _log.error("%s", error)
            raise
        except shutil.SameFileError as error:
            raise MlflowException.invalid_parameter_value(
                f"an artifact cannot be downloaded onto itself; give another dst_path: {error}"
            ) from error
        except OSError as error:
            code = _CODES.get(error.errno or 0)
            if code is None:
                raise BackendError("reach", str(error.filename or ""), str(error)) from error
            raise MlflowException(str(error), error_code=code) from error


_CLIENTS = "/api/2.0/mlflow-artifacts/artifacts"


def is_for_client() -> bool:
    """Tell whether this thread answers a client's request for a listing of proxied artifacts.

    A client downloads a folder by listing it and asking for each file. The UI lists by other requests.
    """
    flask = sys.modules.get("flask")
    if flask is None or not flask.has_request_context():
        return False
    return bool(flask.request.path.rstrip("/").endswith(_CLIENTS)) and "/ajax-api/" not in flask.request.path


PLAIN_BYTES = 64 * 1024
"""Text of at most this size stays a plain file: MLmodel, requirements, parameters, notes."""

MANIFEST_BYTES = 256 * 1024 * 1024
"""Larger files are not checked for being manifests: the check holds the file in memory."""

_MAX_TEXTS = 32
"""Bound of texts written together; they are in memory."""
_MAX_ATTEMPTS = 3
_MAX_REMOVALS = 100
_FEWEST_LOOKS, _MAX_LOOKS = 5, 14


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """Small text to be written as a plain file."""

    source: Path
    path: str
    data: bytes
    modified_ns: int


class TensorCasArtifactRepository(ArtifactRepository, StreamUploadMixin):
    """Artifacts of one root; MLflow's `ArtifactRepository` documents the contract of its methods.

    A small text is a plain file below the root. The store at or above the root keeps all other files: listings show
    their full size, and a download generates them. A ref for a path alone decides its content; a plain file beside the
    ref is a leftover of a crash.

    The object has no state and is thread-safe. All errors are `MlflowException`. A client of a server retries some
    error codes for minutes, so errors that no retry can fix have other codes.
    """

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        with for_mlflow():
            root = root_of(artifact_uri)
            if not is_visible_path(root.path):
                raise ValueError(f"{artifact_uri!r} leads into a store's own folder: artifacts have no place there")
            self._plain = open_plain_files(root)
            self._links = FolderLinks(root.folder) if root.is_local else None
            self._carried = CarriedStores(root)
            self._stores = StoreFinder(artifact_uri, root, self._plain)

    def log_artifact(self, local_file: str | Path, artifact_path: str | None = None) -> None:
        with for_mlflow():
            source = Path(local_file)
            self._write_file(source, path_to_write(source.name, artifact_path), Checked())

    def log_artifacts(self, local_dir: str | Path, artifact_path: str | None = None) -> None:
        with for_mlflow():
            top = path_to_write("", artifact_path)
            if not Path(local_dir).is_dir():
                raise ValueError(f"there is no folder {str(local_dir)!r} to log")
            # All names are checked before the first file is written.
            paths = {source: path_to_write(name, top) for source, name in _walk(Path(local_dir))}
            checked = Checked()
            self._write_folder(top, checked)
            texts: list[_Text] = []
            for source, path in paths.items():
                # As everywhere in MLflow, a link to a folder becomes an empty folder.
                if source.is_dir():
                    self._write_folder(path, checked)
                elif (text := self._new_text(source, path)) is not None:
                    texts.append(text)
                else:
                    self._write_file(source, path, checked)
                if len(texts) == _MAX_TEXTS:
                    self._write_texts(texts, checked)
                    texts.clear()
            self._write_texts(texts, checked)

    def log_artifact_from_stream(
        self, stream: BinaryIO, artifact_file_name: str, artifact_path: str | None = None
    ) -> None:
        with for_mlflow():
            path = self._path_of_upload(posixpath.basename(artifact_file_name), artifact_path)
            self._write(UploadStream(stream, n_announced=n_announced(stream)), path, Checked())

    async def log_artifact_from_async_stream(
        self, chunks: AsyncIterable[bytes], artifact_file_name: str, artifact_path: str | None = None
    ) -> None:
        with for_mlflow():
            path = self._path_of_upload(posixpath.basename(artifact_file_name), artifact_path)
            stream = DrawnStream(chunks)
            # A server awaits this on its event loop, so the slow part runs in a thread. Each upload has its own thread:
            # uploads of slow clients could fill a pool.
            done = start(lambda: self._write(stream, path, Checked()), "tensorcas-upload")
            try:
                # The thread ends by itself: a cancelled future would not take its result.
                await asyncio.shield(asyncio.wrap_future(done))
            except Exception:
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            finally:
                stream.close()

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        with for_mlflow():
            asked = path_to_read(path)
            if not is_visible_path(asked):
                carried = self._carried.find(asked)
                if carried is not None:
                    return self._carried.children(asked, carried)
                entry = announcement(asked)
                return [entry] if entry is not None and self._stores.servers_folder() is not None else []
            folder = self._follow(asked)
            found = self._children(folder.path)
            for link, target in self._links_in(folder):
                info = self._entry(target.path)
                if info is not None:
                    found.setdefault(link, FileInfo(link, info.is_dir, info.file_size))
            return [_at(moved(child, folder.path, asked), found[child]) for child in sorted(found)]

    def _children(self, folder: str) -> dict[str, FileInfo]:
        """List a folder, without links to folders or into the store."""
        store, in_store = self._stores.find(folder)
        if has_ref(store, in_store):
            return {}
        found = {file.path: _file_info(file) for file in self._plain.children(folder)}
        if store is not None:
            damaged: list[str] = []  # listed too, so that readers of the folder find them
            refs, names = store.artifacts(in_store, damaged=damaged)
            for child in (posixpath.join(folder, posixpath.basename(path)) for path in damaged):
                found[child] = FileInfo(child, False, None)
            for child in (posixpath.join(folder, name) for name in names):
                found[child] = FileInfo(child, True, None)
            for ref in refs:
                child = posixpath.join(folder, posixpath.basename(ref.path or ""))
                found[child] = FileInfo(child, False, ref.n_bytes)
            virtual = [file for ref in refs for file in beside(store, ref)]
            if is_for_client() or len(refs) > MAX_PAGES_LISTED:
                virtual = [file for file in virtual if not file.is_page]
            for file in virtual:
                child = posixpath.join(folder, posixpath.basename(file.path))
                if child not in found:  # real artifacts take precedence
                    found[child] = FileInfo(child, False, file.n_bytes)
            history = None if is_for_client() else history_in(store, in_store, refs)
            if history is not None:
                child = posixpath.join(folder, HISTORY_PAGE)
                found.setdefault(child, FileInfo(child, False, history.n_bytes))
        return found

    def _entry(self, path: str) -> FileInfo | None:
        """Describe the artifact at a path free of links; None if there is none."""
        return self._children(posixpath.dirname(path)).get(path)

    def _follow(self, path: str) -> Followed:
        return Followed(path=path) if self._links is None else self._links.follow(path)

    def _links_in(self, folder: Followed) -> Iterator[tuple[str, Followed]]:
        return iter(()) if self._links is None else self._links.in_folder(folder)

    def _is_directory(self, artifact_path: str | None) -> bool:
        with for_mlflow():
            path = path_to_read(artifact_path)
            if not is_visible_path(path):
                return False
            path = self._follow(path).path
            store, in_store = self._stores.find(path)
            return self._plain.has_folder(path) or (store is not None and any(store.artifacts(in_store)))

    def download_artifacts(self, artifact_path: str | None, dst_path: str | None = None) -> str:
        """Download a file or folder.

        A folder comes without pages. With a ``dst_path`` the copy is complete, a model's tensors included, and works
        anywhere. Without one the copy is for this process, and leaves out the tensors: the process reads them from the
        store.
        """
        in_server = config.in_mlflow_server()
        with for_mlflow(), folders_without_tensors(not dst_path and not in_server):
            if in_server and dst_path and artifact_path and not self._is_directory(artifact_path):
                # MLflow draws a bar for each download, and here each file requested by a client is a download.
                out = self._create_download_destination(artifact_path, dst_path)  # type: ignore[no-untyped-call]
                self._download_file(artifact_path, out)
                return str(out)
            return str(super().download_artifacts(artifact_path, dst_path))  # type: ignore[no-untyped-call]

    def _iter_artifacts_recursive(self, path: str | None) -> Iterator[FileInfo]:
        with for_mlflow():
            top = path_to_read(path)
            place = self._follow(top)
            below = self._below(place)
            found = {(child := moved(each, place.path, top)): _at(child, info) for each, info in below.items()}
        full = {parent for child in found for parent in parents(child)}
        if top and not found:
            yield FileInfo(top, True, None)
        for child in sorted(found.keys() - full):
            yield found[child]

    def _below(self, top: Followed) -> dict[str, FileInfo]:
        """List all files and folders below a folder and below its links' targets."""
        found = {file.path: _file_info(file) for file in self._plain.walk(top.path)}
        folders = [top.path, *(info.path for info in found.values() if info.is_dir)]
        made: dict[str, FileInfo] = {}
        for held in self._stores.holding(top.path):
            damaged: list[str] = []  # readers of the folder must find them
            refs = held.store.walk_artifacts(held.in_store, damaged=damaged)
            found.update({held.child(path): FileInfo(held.child(path), False, None) for path in damaged})
            for ref in refs:
                found[held.child(ref.path or "")] = FileInfo(held.child(ref.path or ""), False, ref.n_bytes)
                for file in in_folder(held.store, ref):
                    made[held.child(file.path)] = FileInfo(held.child(file.path), False, file.n_bytes)
        for folder in folders:
            for link, target in self._links_in(Followed(path=folder, crossed=top.crossed)):
                info = self._entry(target.path)
                if info is None:
                    continue
                found.setdefault(link, _at(link, info))
                for each, below in self._below(target).items() if info.is_dir else ():
                    child = moved(each, target.path, link)
                    found.setdefault(child, _at(child, below))
        return made | found  # real artifacts take precedence

    def _download_file(self, remote_file_path: str, local_path: str | Path) -> None:
        with for_mlflow():
            asked = path_to_read(remote_file_path)
            followed = self._follow(asked)
            path = followed.path
            for look in range(_MAX_LOOKS):
                if self._fetch(path, Path(local_path)):
                    return
                # A file may move between folder and store between two lookups; then the next lookup finds it.
                if look >= _FEWEST_LOOKS:
                    if not self._plain.is_changing(posixpath.dirname(path)):
                        break
                    time.sleep(0.001 * 2 ** (look - _FEWEST_LOOKS))
            reason = "" if followed.refused is None else f" ({followed.refused!r} is a link that {NOT_FOLLOWED})"
            raise to_mlflow(NotFoundError(f"No such artifact: {asked!r}{reason}"))

    def get_local_path(self, artifact_path: str) -> str | None:
        """Return the real path of a plain artifact, or None for a stored or missing one.

        Runs on a server's event loop, so it asks the store only if there is a plain file.
        """
        with for_mlflow():
            path = path_to_read(artifact_path)
            plain = self._plain.find(path)
            if plain is None:
                path = self._follow(path).path
                plain = self._plain.find(path)
            if plain is None or has_ref(*self._stores.find(path)):
                return None
            return os.fspath(plain)

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Delete a file, or a folder with its content, or all artifacts of this root; a missing path is no error.

        The store's own folder stays, even if this root is the store's: collection frees unreferenced content.
        """
        with for_mlflow():
            path = path_to_read(artifact_path)
            carried = self._carried.find(path)
            if carried is not None:
                self._carried.remove(carried)
                return
            place = self._follow(posixpath.dirname(path))
            if place.crossed:
                # Artifacts of the target are visible here too, so a silent refusal to delete them would be wrong.
                raise ValueError(
                    f"{path!r} is not deleted through the link {place.crossed[0]!r}: delete "
                    f"{posixpath.join(place.path, posixpath.basename(path))!r}, or the link"
                )
            for held in self._stores.holding(path):
                held.store.drop_artifacts(held.in_store)
            self._plain.remove(path)

    def _new_text(self, source: Path, path: str) -> _Text | None:
        """Read a small text with nothing at its path in the folder yet; return None for any other file."""
        # An object is replaced by its write alone.
        is_new = self._links is None or not self._plain.has_file(path)
        if not is_new or self._carried.find(path) is not None or not source.is_file():
            return None
        with source.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            head = b"" if found.st_size > PLAIN_BYTES else file.read(PLAIN_BYTES + 1)
        if found.st_size > PLAIN_BYTES or not is_small_text(head):
            return None
        return _Text(source=source, path=path, data=head, modified_ns=found.st_mtime_ns)

    def _write_texts(self, texts: Sequence[_Text], checked: Checked) -> None:
        """Write small texts together; see `_write`."""
        folders: dict[str, tuple[Store, str]] = {}
        for folder in {posixpath.dirname(text.path) for text in texts}:
            folders[folder] = self._stores.find_to_write(folder, checked, as_folder=True)

        def look(text: _Text) -> Token | None:
            store, in_store = place_of(text)
            if self._stores.is_folder(store, in_store, checked):
                raise ValueError(f"{text.path!r} cannot be written as a file: it is a folder")
            return None if checked.shows_ref(store, in_store) is False else store.artifact_token(in_store)

        def place_of(text: _Text) -> tuple[Store, str]:
            folder, name = posixpath.split(text.path)
            store, in_folder = folders[folder]
            return store, posixpath.join(in_folder, name)

        def write() -> None:
            self._plain.write_all(
                [
                    NewText(
                        path=text.path,
                        data=text.data,
                        modified_ns=text.modified_ns,
                        content_type=_content_type(text.path),
                    )
                    for text in texts
                ]
            )

        def drop(entry: tuple[_Text, Token | None]) -> None:
            text, replaced = entry
            store, in_store = place_of(text)
            store.drop_artifact(in_store, replaced)
            if not self._plain.has_file(text.path) and store.artifact_token(in_store) is None:
                self._write_file(text.source, text.path, checked)

        replaced = self._each(look, texts)
        _against_removals(write)
        self._each(drop, list(zip(texts, replaced, strict=True)))

    def _each(self, act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Call a function for each item; together, if calls are requests to another machine."""
        return list(ordered_map(act, items, waits=True) if self._plain.calls_are_requests else map(act, items))

    def _write_file(self, source: Path, path: str, checked: Checked) -> None:
        if not source.is_file():
            raise ValueError(f"there is no file {str(source)!r} to log")
        is_itself = self._plain.is_file(path, source)
        if is_itself and not has_ref(*self._stores.find(path)):
            return
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with source.open("rb", buffering=0) as file:
                    modified_ns = source.stat().st_mtime_ns
                    self._write(file, path, checked, modified_ns=modified_ns, keeps_plain=is_itself, local_path=source)
                return
            except FencedError:  # unlike a stream, a file can be read again
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
                checked.forget_listings()

    def _write(
        self,
        stream: Readable,
        path: str,
        checked: Checked,
        *,
        modified_ns: int | None = None,
        keeps_plain: bool = False,
        local_path: Path | None = None,
    ) -> None:
        """Write an artifact.

        Args:
            stream: Its bytes.
            path: Its artifact path.
            checked: What this upload has seen.
            modified_ns: Modification time of the source file, if any; a plain artifact gets the same time.
            keeps_plain: Whether to leave a plain file at the path, hidden by the store's copy, because another program
                wrote it.
            local_path: The file of this machine that has the bytes, if any.
        """
        carried = self._carried.find(path)
        if carried is not None:
            self._carried.write(stream, carried)
            return
        store, in_store = self._stores.find_to_write(path, checked)
        head = read_head(stream, PLAIN_BYTES + 1)
        _against_removals(lambda: self._plain.make_folder(posixpath.dirname(path)))

        # The path shows the old content until the new content is there. Only the old content is then removed, never a
        # concurrent write.
        def is_in_store() -> bool:
            return store.artifact_token(in_store) is not None

        def write() -> None:
            self._plain.write(path, [head], modified_ns=modified_ns, content_type=_content_type(path))

        while is_small_text(head):
            replaced = None if checked.shows_ref(store, in_store) is False else store.artifact_token(in_store)
            _against_removals(write)
            store.drop_artifact(in_store, replaced)
            # Looking at a ref and dropping it are two steps. In between another process may have relied on the dropped
            # ref and removed the plain file.
            if self._plain.has_file(path) or is_in_store():
                return
        # A file that replaces one in the store mostly has no plain file beside it. A leftover of a crash stays hidden.
        keeps_plain |= checked.shows_ref(store, in_store) is True
        with self._plain.replacing(path) if not keeps_plain else nullcontext() as remove:
            save, target = self._save(store, head, stream, path, in_store, local_path)
            with save:
                save.commit(target)
            if remove is not None:
                remove(is_in_store)

    def _path_of_upload(self, name: str, folder: str | None) -> str:
        """Return the path for an artifact from a client; see `path_to_write`."""
        path = path_to_read(posixpath.join(folder or "", name))
        check_upload(path)
        return path if self._carried.find(path) is not None else path_to_write(name, folder)

    def _write_folder(self, path: str, checked: Checked) -> None:
        self._stores.find_to_write(path, checked, as_folder=True)
        _against_removals(lambda: self._plain.make_folder(path))

    def _save(
        self, store: Store, head: bytes, rest: Readable, path: str, in_store: str, local_path: Path | None
    ) -> tuple[PendingSave, RefTarget]:
        """Store a file. A manifest of this store is not stored: it pins the chunks of the save it came with."""
        uri = posixpath.join(self.artifact_uri, path)
        owner = owner_of(uri)
        target = RefTarget(path=in_store, uri=uri, run_id=owner.run_id, model_id=owner.model_id)
        # A server checks only if it has logged a model itself: a manifest from elsewhere is a plain file to it.
        if Manifest.looks_like(head) and (has_pending(store) or not config.in_mlflow_server()):
            head += read_head(rest, MANIFEST_BYTES)
            held = take_pending(store, digest(head).hex(), in_store) if has_pending(store) else None
            if held is not None:
                return held
            # In a server, knowledge of digests must not give access to other people's weights.
            manifest = None if config.in_mlflow_server() else _manifest_in(head)
            if manifest is not None and manifest.store_id == store.id and manifest.kind == "checkpoint":
                with suppress(ChunkNotFoundError, WrongStoreError):
                    return store.adopt(manifest), target
        place = store.place_of(in_store) if local_path is None else FilePlace.of(local_path)
        return store.write_stream(Rejoined(head, rest), place=place), target

    def _fetch(self, path: str, out: Path) -> bool:
        """Write an artifact to a local file; False if there is no such artifact."""
        if not is_visible_path(path):
            carried = self._carried.find(path)
            return carried is not None and self._carried.fetch(carried, out)
        store, in_store = self._stores.find(path)
        ref = store.artifact(in_store) if store is not None and in_store else None
        if store is not None and ref is not None:
            write_pieces(store.iter_file(ref), out)
            return True
        if self._plain.fetch(path, out):
            return True
        virtual = None if store is None or self._plain.has_folder(path) else virtual_at(store, in_store)
        if virtual is not None:
            write_pieces(virtual.pieces(), out)
        return virtual is not None


def _file_info(file: PlainFile) -> FileInfo:
    return FileInfo(file.path, file.is_folder, None if file.is_folder else file.size)


def _content_type(path: str) -> str:
    # Every plain artifact is text, whatever else its name may mean.
    guessed, encoding = mimetypes.guess_type(posixpath.basename(path))
    return guessed if guessed is not None and encoding is None else "text/plain"


def _against_removals(act: Callable[[], None]) -> None:
    """Repeat an action that fails because somebody removes folders at the same time."""
    for _ in range(_MAX_REMOVALS - 1):
        # mkdir raises the second for a folder that is there, and gone when it looks whether it is one.
        with suppress(FileNotFoundError, FileExistsError):
            return act()
    return act()


def _at(path: str, info: FileInfo) -> FileInfo:
    return FileInfo(path, info.is_dir, info.file_size)


def is_small_text(head: bytes) -> bool:
    """Tell from a file's first bytes, one more than `PLAIN_BYTES` at most, whether it stays a plain file."""
    if len(head) > PLAIN_BYTES or b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError:
        return False
    return True


def _manifest_in(data: bytes) -> Manifest | None:
    if len(data) <= MANIFEST_BYTES:
        with suppress(FormatError):
            return Manifest.from_bytes(data)
    return None


def _walk(top: Path) -> Iterator[tuple[Path, str]]:
    """Yield all folders and files below a local folder with their POSIX paths relative to it, folders first."""
    for folder, folders, files in os.walk(top):
        for name in [*folders, *files]:
            source = Path(folder, name)
            yield source, source.relative_to(top).as_posix()
