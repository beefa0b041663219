"""Programs that write to a root, for a power cut or kill at any call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tensorcas_mlflow.backends import LocalPlainFiles, MemoryBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import copy_plain, copy_refs
from tensorcas_mlflow.store import Store, protocol
from tests.crash.world import CHUNK_BYTES, World, chunk, long_file

Act = Callable[[World], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something to be cut short, and what was there before."""

    before: Act
    act: Act


def nothing(world: World) -> None:
    """An empty disk."""


def first_save(world: World) -> None:
    world.save(1, "abc")


def two_saves(world: World) -> None:
    world.save(1, "abc")
    world.save(2, "def")


def sharing_saves(world: World) -> None:
    world.save(2, "abd")
    world.save(3, "ab")
    world.save(4, "ab", replace=False)


def replacing_saves(world: World) -> None:
    world.save(1, "ade")
    world.save(1, "abc")


def saves_of_others(world: World) -> None:
    world.save(2, "abd")
    world.begin()
    world.save(3, "abd")
    world.begin()
    world.save(2, "de")


def text_and_back(world: World) -> None:
    world.upload("model/MLmodel", b"some text")
    world.upload("model/MLmodel", b"another text")
    world.upload("model/MLmodel", long_file("ab"))
    world.upload("model/MLmodel", b"a text again")


def folders(world: World) -> None:
    world.upload_folder(
        "model", {"MLmodel": b"some text", "data/notes": b"a note", "data/weights.bin": long_file("ab")}
    )
    world.upload_folder("model", {"MLmodel": b"another text", "data/more": b"more", "data/weights.bin": b"a text"})


def uploads(world: World) -> None:
    world.upload("weights.bin", long_file("abcdefgh"))
    world.upload("weights.bin", long_file("abxyefgh"))
    world.upload("more/weights.bin", long_file("abxyefgh"))


def deletions(world: World) -> None:
    world.upload("model/MLmodel", b"some text")
    world.upload("model/weights.bin", long_file("gh"))
    world.remove("model", "MLmodel", "weights.bin")
    world.drop(1)
    world.collect()
    world.upload("model/weights.bin", long_file("gi"))


def collection(world: World) -> None:
    world.drop(1)
    world.save(2, "dex")
    world.collect()
    world.save(3, "abc")
    world.collect()


def compaction(world: World) -> None:
    world.save(3, "ad")
    world.drop(1)
    world.drop(2)
    world.collect()
    world.save(4, "abd")


def finishing(world: World) -> None:
    store = world.opened()
    packs = frozenset(name for name, _ in protocol.list_packs(store.backend))
    manifests = frozenset(info.key.removeprefix("manifests/") for info in store.backend.list("manifests"))
    store.backend.put_new("condemned/" + "a" * 32, [protocol.condemned_bytes(packs, manifests)])
    world.drop(2)
    world.collect()
    world.save(3, "abd")
    world.collect()


@cache
def source() -> Store:
    """A store to be copied."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    for step, letters in ((11, "abk"), (12, "akl"), (13, "mno")):
        with store.write_checkpoint({letter: chunk(letter) for letter in letters}) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    return store


def copying(world: World) -> None:
    plain = {"notes/one.txt": b"one", "notes/deep/two.txt": b"two"}
    aside = Path(world.top).with_name("source")
    for path, data in plain.items():
        (aside / path).parent.mkdir(parents=True, exist_ok=True)
        (aside / path).write_bytes(data)
    to = world.opened()
    with world.changing_all({("file", path): data for path, data in plain.items()}):
        copy_plain(LocalPlainFiles(aside), LocalPlainFiles(world.root))
    refs = source().checkpoints()
    letters = {("step", str(ref.step)): "".join(source().manifest(ref).names()).encode() for ref in refs}
    with world.changing_all(letters):
        copy_refs(source(), to, refs)


def saves_of_relatives(world: World) -> None:
    world.save(1, "abc")
    world.save(2, "ABd")


def optimization(world: World) -> None:
    world.derive(2, "AB")
    world.collect()


def optimized(world: World) -> None:
    saves_of_relatives(world)
    optimization(world)


def collections_of_a_form(world: World) -> None:
    world.drop(1)
    world.collect()
    world.save(3, "Ax")
    world.save(2, "A")
    world.collect()
    world.drop(3)
    world.collect()
    world.save(4, "ABab")


SCENARIOS = {
    "an optimization with a form": Scenario(saves_of_relatives, optimization),
    "collections of a form": Scenario(optimized, collections_of_a_form),
    "the first save": Scenario(nothing, first_save),
    "the first upload": Scenario(nothing, lambda world: world.upload("weights.bin", long_file("ab"))),
    "the first text": Scenario(nothing, lambda world: world.upload("model/MLmodel", b"some text")),
    "folders of texts and files": Scenario(nothing, folders),
    "saves that share chunks": Scenario(first_save, sharing_saves),
    "saves in the place of others": Scenario(first_save, replacing_saves),
    "saves of one process after another": Scenario(first_save, saves_of_others),
    "uploads": Scenario(nothing, uploads),
    "a text, a file and a text at one path": Scenario(first_save, text_and_back),
    "deletions of artifacts": Scenario(two_saves, deletions),
    "a collection": Scenario(two_saves, collection),
    "a compaction": Scenario(two_saves, compaction),
    "a dead collector's list": Scenario(two_saves, finishing),
    "a copy": Scenario(first_save, copying),
    "a copy to a new place": Scenario(nothing, copying),
}
