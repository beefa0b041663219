"""Programs that use one root, what they may rely on, and what is looked for after a crash."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.backends import LocalBackend, _plain_files, open_backend
from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.base.files import Settled
from tensorcas_mlflow.errors import StoreNotFoundError
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import pack_key
from tensorcas_mlflow.maintenance import GcReport, plan_gc, verify
from tensorcas_mlflow.store import Store, protocol
from tensorcas_mlflow.store import _store as opening
from tensorcas_mlflow.store._store import OpenStores
from tests.crash.disk import Entry, Mark
from tests.crash.recorder import Recorder
from tests.forms.forming import derive, transposed

CHUNK_BYTES = 4096

Key = tuple[str, str]
"""``("step", "3")`` or ``("file", "folder/name")``."""
Content = bytes | None
"""The letters of a checkpoint's tensors, or a file's bytes; None where there is nothing."""


@dataclass(frozen=True, slots=True)
class Said:
    """A program began to change something, or was told that it is done."""

    key: Key
    content: Content
    is_done: bool


@cache
def chunk(letter: str) -> Any:
    """One chunk that no codec makes shorter; that of a capital is the other letter's, transposed."""
    if letter.isupper():
        return transposed(chunk(letter.lower()))
    return np.random.default_rng(ord(letter)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def long_file(letters: str) -> bytes:
    """A file that is not kept as text."""
    return b"".join(chunk(letter).tobytes() for letter in letters)


class World:
    """One root, and a process that uses it."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = top / "experiments" / "7"
        self.recorder = Recorder(top)
        self.store: Store | None = None
        self.begin()

    def begin(self) -> None:
        """Be a new process, which knows nothing of the root."""
        forget_stores()
        self.store = None

    def opened(self) -> Store:
        """The store as this process has it open; it is made if there is none."""
        if self.store is None:
            self.store = Store.open(self.root, create=True, chunk_bytes=CHUNK_BYTES)
        return self.store

    @contextmanager
    def changing(self, key: Key, content: Content) -> Iterator[None]:
        """Say that something is changed, and afterwards that it was."""
        with self.changing_all({key: content}):
            yield

    @contextmanager
    def changing_all(self, contents: Mapping[Key, Content]) -> Iterator[None]:
        """Say that some things are changed, and afterwards that they were."""
        for key, content in contents.items():
            self.recorder.mark(Said(key, content, False))
        yield
        for key, content in contents.items():
            self.recorder.mark(Said(key, content, True))

    def save(self, step: int, letters: str, *, replace: bool = True) -> Ref:
        store = self.opened()
        with (
            self.changing(("step", str(step)), letters.encode()),
            store.write_checkpoint({letter: chunk(letter) for letter in letters}) as pending,
        ):
            return pending.commit(RefTarget(run_id="run", step=step), replace=replace)

    def drop(self, step: int) -> None:
        store = self.opened()
        ref = store.ref(RefTarget(run_id="run", step=step).key)
        if ref is not None:
            with self.changing(("step", str(step)), None):
                store.drop(ref)

    def derive(self, step: int, letters: str) -> None:
        """Write a form that derives some capitals of a step, as an optimization does that has found their function."""
        store = self.opened()
        ref = store.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        derive(store, ref, letters, chunk)

    def collect(self, **options: Any) -> GcReport:
        return plan_gc(self.opened(), **{"grace_s": 0, "max_waste": 0, **options}).execute()

    def upload(self, path: str, data: bytes) -> None:
        with self.changing(("file", path), data):
            folder, _, name = path.rpartition("/")
            self.repository.log_artifact_from_stream(io.BytesIO(data), name, folder or None)

    def upload_folder(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Log a local folder."""
        with (
            TemporaryDirectory() as scratch,
            self.changing_all({("file", f"{folder}/{name}"): files[name] for name in files}),
        ):
            for name, data in files.items():
                file = Path(scratch, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            self.repository.log_artifacts(scratch, folder)

    def remove(self, folder: str, *names: str) -> None:
        with self.changing_all({("file", f"{folder}/{name}"): None for name in names}):
            self.repository.delete_artifacts(folder)

    @property
    def repository(self) -> TensorCasArtifactRepository:
        return TensorCasArtifactRepository(f"tensorcas://{self.root}")


def forget_stores() -> None:
    """Close the stores that this process keeps open, and forget what it knows of plain folders."""
    _plain_files._settled = Settled()
    _plain_files._stores.clear()
    Database.close_all()
    LockedFile.close_all()
    opening._open_stores = OpenStores(lambda root: Store.open_backend(open_backend(root)))


def allowed(log: Iterable[Entry]) -> dict[Key, set[Content]]:
    """Say what may be found after a crash, of all that was ever begun.

    What was done last, or what was begun since. A deletion that is done may be undone by the crash, as long as what
    comes back is whole.
    """
    may: dict[Key, set[Content]] = {}
    for entry in log:
        for effect in entry:
            if isinstance(effect, Mark) and isinstance(effect.said, Said):
                said = effect.said
                if said.is_done and said.content is not None:
                    may[said.key] = {said.content}
                else:
                    may.setdefault(said.key, {None}).add(said.content)
    return may


# --- after the crash


def check(top: Path, may: Mapping[Key, set[Content]], scratch: Path, *, saves_first: bool) -> None:
    """See that a root serves after a crash, without anybody's help.

    Args:
        top: What the crash has left.
        may: For each thing what may be found of it.
        scratch: A folder to download to.
        saves_first: Whether the first to come is a save, or else a collection.
    """
    world = World(top)
    try:
        Store.open(world.root)
    except StoreNotFoundError:
        assert all(None in contents for contents in may.values()), "the store is gone"
    found = look(world, may, scratch)
    for key, contents in may.items():
        assert found.get(key) in contents, f"{key}: {_short(found.get(key))} is not one of {[*map(_short, contents)]}"
    acts = [lambda: save_more(world, found), lambda: collect_twice(world)]
    for act in acts if saves_first else reversed(acts):
        act()
        assert look(world, may, scratch) == found
        world.begin()
    collect_twice(world)
    assert look(world, may, scratch) == found
    assert_clean(world.opened())


def look(world: World, may: Mapping[Key, set[Content]], scratch: Path) -> dict[Key, Content]:
    """Load everything there is, with a new process."""
    world.begin()
    found: dict[Key, Content] = {}
    try:
        store = Store.open(world.root)
    except StoreNotFoundError:
        return found
    for ref in store.checkpoints():
        if ref.step is None:
            continue
        loaded = store.read_tensors(store.manifest(ref))
        for letter, array in loaded.items():
            assert array.tobytes() == chunk(letter).tobytes(), f"step {ref.step} has other bytes"
        found["step", str(ref.step)] = "".join(sorted(loaded)).encode()
    for _, path in (key for key in may if key[0] == "file"):
        found["file", path] = fetch(world, path, scratch)
    return {key: content for key, content in found.items() if content is not None and key != _MORE}


def fetch(world: World, path: str, scratch: Path) -> Content:
    """Download an artifact; None if none is shown."""
    folder = path.rpartition("/")[0]
    if path not in {info.path for info in world.repository.list_artifacts(folder or None)}:
        return None
    out = scratch / "fetched"
    try:
        world.repository._download_file(path, out)
    except MlflowException as error:
        raise AssertionError(f"{path} is shown and cannot be had: {error}") from error
    return out.read_bytes()


_MORE: Key = ("step", "999")


def save_more(world: World, found: Mapping[Key, Content]) -> None:
    """The next save: something new beside something old; and one that is there already, once more."""
    world.save(999, "azY")
    for (kind, step), content in found.items():
        if kind == "step" and content is not None:
            world.save(int(step), content.decode())
    world.begin()


def collect_twice(world: World) -> None:
    """A dead collector's list stays as long as something on it is needed."""
    for _ in range(2):
        if world.root.exists():
            world.collect()


def assert_clean(store: Store) -> None:
    """Nothing is left that no ref needs."""
    backend = store.backend
    assert isinstance(backend, LocalBackend)
    refs = protocol.read_refs(backend)
    forms = {ref.of: ref for ref in refs if ref.of is not None}
    stored = [forms.pop(ref.manifest, ref) for ref in refs if ref.of is None]
    assert not forms
    packs = [name for name, _ in protocol.list_packs(backend)]
    held = [(name, entry["digest"].tobytes()) for name in packs for entry in protocol.read_pack_table(backend, name)]
    needed = {row.tobytes() for ref in stored for row in store.manifest(ref).stored_digests}
    manifests = {ref.manifest for ref in refs}
    assert list(backend.list("intents")) == []
    lists = protocol.read_condemned(backend).lists
    assert [each for each in lists if not each.manifests & manifests | each.packs & set(packs)] == []
    assert {chunk for _, chunk in held} >= needed
    assert {name for name, chunk in held if chunk in needed} == set(packs)
    # A collection leaves a pack in the database as it is where a rewriting would free no bytes.
    outside = [chunk for name, chunk in held if (backend.root / pack_key(name)).exists()]
    assert len(outside) == len(set(outside) & needed)
    assert {info.key for info in backend.list("manifests")} == {f"manifests/{name}" for name in manifests}
    assert not [path.name for path in backend.root.rglob("*") if "staging" in path.name]
    assert verify(store, full=True).problems == ()


def empty(folder: Path) -> Path:
    """Make a folder, anew if it is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _short(content: Content) -> str:
    return "nothing" if content is None else f"{content[:12]!r} of {len(content)} bytes"
