"""The database of small blobs may be changed in any way: what is loaded is right, and what is lost is named."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tensorcas_mlflow.backends import FolderBackend, damages_of
from tensorcas_mlflow.backends._database import SHM, WAL, Database
from tensorcas_mlflow.backends._records import folder_of, keys_below, record_check, stored_key
from tensorcas_mlflow.backends._rows import NAME, PAGE_BYTES, row_of
from tensorcas_mlflow.errors import FormatError, NewerFormatError, TensorCasError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_repair, verify
from tensorcas_mlflow.store import Store

N_STEPS = 4
KEPT = {0, 2, 3}
"""The steps that were not dropped."""


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(step, step + 64, dtype=np.float32), "b": np.full(8, step, np.float32)}


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


def save(folder: Path, step: int, number: int | None = None) -> None:
    store = Store.open(folder)
    with store.write_checkpoint(arrays(step if number is None else number)) as pending:
        pending.commit(target(step))


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TENSORCAS_DATABASE", "true")
    yield
    Database.close_all()


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A store with some steps and a dropped one, most of which is in the write-ahead log."""
    store = Store.init(tmp_path / "root", chunk_bytes=4096, database=True)
    for step in range(N_STEPS):
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(target(step))
    ref = store.ref(target(1).key)
    assert ref is not None
    store.drop(ref)
    yield tmp_path / "root"
    assert store.id  # it was open meanwhile


@pytest.fixture
def folder(open_folder: Path) -> Path:
    """The same, after its writer has ended."""
    Database.close_all()
    assert not place(open_folder, WAL).exists()
    return open_folder


def place(folder: Path, name: str = NAME) -> Path:
    return folder / ".tensorcas" / name


def look(folder: Path) -> tuple[set[int], bool]:
    """Load every step; return those that are there, and whether anything was said to be wrong."""
    there: set[int] = set()
    is_said = False
    store = Store.open(folder)
    try:
        list(store.backend.list("refs"))
    except FormatError:
        is_said = True
    for step in range(N_STEPS):
        try:
            ref = store.ref(target(step).key)
            if ref is None:
                continue
            loaded = store.read_tensors(store.manifest(ref))
            assert {name: array.tobytes() for name, array in loaded.items()} == {
                name: array.tobytes() for name, array in arrays(step).items()
            }
            there.add(step)
        except TensorCasError:
            is_said = True
    del store
    Database.close_all()
    return there, is_said


def flips(data: bytes, every: int) -> Iterator[tuple[int, bytes]]:
    for at in range(0, len(data), every):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        yield at, bytes(flipped)


def cuts(data: bytes, every: int) -> Iterator[tuple[int, bytes]]:
    for size in range(0, len(data), every):
        yield size, data[:size]


def check_changes(folder: Path, name: str, changes: Callable[[bytes], Iterator[tuple[int, bytes]]]) -> int:
    """Change a file of a store in some ways; return in how many of them something was said to be wrong."""
    whole = copied(folder, "whole")
    copy = folder.with_name("copy")
    n_said = 0
    for at, data in changes(place(whole, name).read_bytes()):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        place(copy, name).write_bytes(data)
        there, is_said = look(copy)

        # A deletion is durable with the next commit.
        assert is_said or there - ({1} if name == WAL else set()) == KEPT, (at, there)
        n_said += is_said
    return n_said


@pytest.mark.parametrize("every", [199, pytest.param(5, marks=pytest.mark.long)])
def test_no_flipped_bit_of_a_database_loses_anything_in_silence(folder: Path, every: int) -> None:
    assert look(folder) == (KEPT, False)
    assert check_changes(folder, NAME, lambda data: flips(data, every)) > 10


@pytest.mark.parametrize("every", [397, pytest.param(11, marks=pytest.mark.long)])
def test_flipped_bit_of_a_write_ahead_log_loses_nothing_in_silence(open_folder: Path, every: int) -> None:
    assert check_changes(open_folder, WAL, lambda data: flips(data, every)) > 10


@pytest.mark.parametrize("every", [512, pytest.param(97, marks=pytest.mark.long)])
def test_database_that_is_cut_anywhere_loses_nothing_in_silence(folder: Path, every: int) -> None:
    assert check_changes(folder, NAME, lambda data: cuts(data, every)) > 10


@pytest.mark.parametrize("every", [524, pytest.param(199, marks=pytest.mark.long)])
def test_write_ahead_log_that_is_cut_anywhere_loses_nothing_in_silence(open_folder: Path, every: int) -> None:
    assert check_changes(open_folder, WAL, lambda data: cuts(data, every)) > 10


def copied(folder: Path, name: str) -> Path:
    """Copy a store as a killed writer leaves it."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(SHM))
    return copy


# --- files that are lost, or are another store's


def test_write_ahead_log_that_somebody_deletes_is_missed(open_folder: Path) -> None:
    copy = copied(open_folder, "copy")
    place(copy, WAL).unlink()

    _, is_said = look(copy)
    assert is_said


@pytest.mark.parametrize("content", [None, b"", b"x" * 32768, bytes(65536)], ids=["gone", "empty", "noise", "zeros"])
def test_wal_index_that_is_lost_or_stale_costs_nothing(open_folder: Path, content: bytes | None) -> None:
    copy = copied(open_folder, "copy")
    if content is not None:
        place(copy, SHM).write_bytes(content)

    assert look(copy) == (KEPT, False)


def test_wal_index_of_another_moment_costs_nothing(open_folder: Path) -> None:
    old = place(open_folder, SHM).read_bytes()
    save(open_folder, 1)
    copy = copied(open_folder, "copy")
    place(copy, SHM).write_bytes(old)

    assert look(copy) == ({0, 1, 2, 3}, False)


def test_a_write_ahead_log_of_another_state_is_named(open_folder: Path, tmp_path: Path) -> None:
    other = Store.init(tmp_path / "other", chunk_bytes=4096, database=True)
    for step in range(3):
        with other.write_checkpoint(arrays(step + 7)) as pending:
            pending.commit(target(step))
    copy = copied(open_folder, "copy")
    shutil.copyfile(place(tmp_path / "other", WAL), place(copy, WAL))

    there, is_said = look(copy)
    assert is_said
    assert damages_of(Store.open(copy).backend)
    assert there <= KEPT


def test_write_ahead_log_of_an_earlier_moment_is_refused(open_folder: Path) -> None:
    early = copied(open_folder, "early")
    Database.close_all()
    save(open_folder, 1)
    Database.close_all()
    copy = copied(open_folder, "copy")
    shutil.copyfile(place(early, WAL), place(copy, WAL))

    _, is_said = look(copy)
    assert is_said


def test_an_older_database_that_is_put_back_is_named(folder: Path) -> None:
    old = place(folder).read_bytes()
    save(folder, 1)
    save(folder, 0, 9)
    Database.close_all()
    copy = copied(folder, "copy")
    place(copy).write_bytes(old)

    there, is_said = look(copy)
    assert is_said
    assert 0 not in there, "step 0 is what it was before it was replaced"


def test_older_database_that_is_put_back_under_an_open_store_is_noticed(open_folder: Path) -> None:
    store = Store.open(open_folder)
    with store.write_checkpoint(arrays(1)) as pending:
        pending.commit(target(1))
    Database.close_all()
    old = copied(open_folder, "old")
    save(open_folder, 0, 9)
    assert store.ref(target(0).key) is not None
    shutil.copyfile(place(old), place(open_folder).with_name("new"))
    place(open_folder).with_name("new").rename(place(open_folder))

    with pytest.raises(FormatError, match=r"blobs\.db.*put back"):
        store.ref(target(0).key)


def test_database_that_is_deleted_is_missed(folder: Path) -> None:
    store = Store.open(folder)
    assert store.ref(target(0).key) is not None
    for name in (NAME, WAL, SHM):
        place(folder, name).unlink(missing_ok=True)

    with pytest.raises(TensorCasError):
        store.ref(target(0).key)


def test_write_ahead_log_deleted_under_its_writer_is_noticed_by_it(open_folder: Path) -> None:
    store = Store.open(open_folder)
    with store.write_checkpoint(arrays(1)) as pending:
        pending.commit(target(1))
    place(open_folder, WAL).unlink()

    with pytest.raises(FormatError, match="removed or replaced"):
        store.ref(target(1).key)
    with store.write_checkpoint(arrays(2)) as pending:
        pending.commit(target(7))
    assert store.ref(target(7).key) is not None, "it goes on in plain files"


@pytest.mark.parametrize("name", [NAME, WAL])
@pytest.mark.parametrize("act", [look, lambda folder: save(folder, 9)], ids=["load", "save"])
def test_file_behind_a_link_in_the_place_of_a_database_stays_as_it_is(
    open_folder: Path, tmp_path: Path, name: str, act: Callable[[Path], object]
) -> None:
    ours, theirs = copied(open_folder, "ours"), copied(open_folder, "theirs")
    place(ours, name).unlink()
    place(ours, name).symlink_to(place(theirs, name))
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}

    with pytest.raises(TensorCasError, match="symbolic link"):
        act(ours) if act is not look else Store.open(ours).ref(target(0).key)
    Database.close_all()

    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before


# --- damage stays where it is


def flip_in(folder: Path, needle: bytes) -> None:
    """Flip a bit behind some bytes of the database, which are there once."""
    data = bytearray(place(folder).read_bytes())
    assert data.count(needle) == 1
    data[data.index(needle) + len(needle) // 2] ^= 1
    place(folder).write_bytes(data)


def test_repair_keeps_the_whole_blobs_of_a_damaged_database_and_names_what_is_lost(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(place(folder))) as connection:
        [(number,)] = connection.execute("SELECT max(number) FROM records WHERE data IS NOT NULL").fetchall()
        [(data,)] = connection.execute("SELECT data FROM records WHERE number = ?", (number,)).fetchall()
    flip_in(folder, data[40:60])

    there, is_said = look(folder)
    save(folder, 9)

    assert (there, is_said) == (KEPT - {3}, True)
    assert [damage.key.partition("/")[0] for damage in damages_of(Store.open(folder).backend)]
    plan_repair(Store.open(folder)).execute()
    assert look(folder) == (KEPT - {3}, True), "a lost ref is no deleted one"


def test_saves_go_on_in_files_while_a_database_is_damaged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(place(folder))) as connection:
        [(root,)] = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'state'").fetchall()
    data = bytearray(place(folder).read_bytes())
    data[(root - 1) * PAGE_BYTES] ^= 0xFF
    place(folder).write_bytes(data)

    save(folder, 9)

    assert "tensorcas repair" in caplog.text
    assert place(folder, target(9).key).is_file()
    Database.close_all()
    plan_repair(Store.open(folder)).execute()
    assert look(folder) == (KEPT, False)
    assert Store.open(folder).ref(target(9).key) is not None
    assert verify(Store.open(folder), full=True).problems == ()


# --- databases made by hand


def changed(folder: Path, *statements: str, arguments: tuple[object, ...] = ()) -> None:
    """Change a database behind the back of the store."""
    with closing(sqlite3.connect(place(folder), isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(statement, arguments if "?" in statement else ())


def everything(folder: Path) -> list[Callable[[], object]]:
    """Return calls of each kind."""
    backend = FolderBackend(folder / ".tensorcas")
    return [
        lambda: list(backend.list("refs")),
        lambda: backend.list_dir("refs/runs/run").facts(),
        lambda: backend.list_dir("packs"),
        lambda: backend.stat(target(0).key),
        lambda: backend.get(target(0).key),
        lambda: backend.delete(target(0).key),
        lambda: backend.sweep(0),
    ]


TRAPS = {
    "a trigger": (
        "CREATE TRIGGER trap AFTER DELETE ON blobs BEGIN DELETE FROM state; DELETE FROM records; END",
        "CREATE TRIGGER trap2 AFTER INSERT ON records BEGIN DELETE FROM records; END",
    ),
    "a view": (
        "ALTER TABLE blobs RENAME TO other",
        "CREATE VIEW blobs AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT CAST(x AS BLOB) AS key, x AS place, 1 AS size, NULL AS 'commit' FROM n",
    ),
    "a generated column": ("ALTER TABLE records ADD COLUMN more AS (zeroblob(1000000000))",),
    "statistics": ("ANALYZE",),
    "a view of the state": (
        "DROP TABLE state",
        "CREATE VIEW state AS SELECT randomblob(4) AS name, 9 AS n, 0 AS total",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_database_with_a_schema_of_somebody_else_is_refused(folder: Path, trap: str) -> None:
    changed(folder, *TRAPS[trap])
    with closing(sqlite3.connect(place(folder))) as connection:
        before = connection.execute("SELECT count(*), total(number) FROM records").fetchall()

    for call in everything(folder):
        with pytest.raises(FormatError, match=r"blobs\.db.*tables"):
            call()
    Database.close_all()

    with closing(sqlite3.connect(place(folder))) as connection:
        assert connection.execute("SELECT count(*), total(number) FROM records").fetchall() == before


def test_database_of_a_later_release_is_refused(folder: Path) -> None:
    changed(folder, "PRAGMA user_version = 2")
    before = place(folder).read_bytes()

    for call in [*everything(folder), lambda: save(folder, 9)]:
        with pytest.raises(NewerFormatError):
            call()
    Database.close_all()
    assert place(folder).read_bytes() == before


@pytest.mark.parametrize(
    "change",
    ["PRAGMA application_id = 7", "PRAGMA journal_mode = DELETE"],
    ids=["of another application", "without a log"],
)
def test_database_that_is_no_stores_is_refused(folder: Path, change: str) -> None:
    changed(folder, change)

    for call in everything(folder):
        with pytest.raises(FormatError, match=r"blobs\.db"):
            call()


def forged_row(folder: Path, key: bytes, **facts: object) -> None:
    """Write a row, and the sums of its folder as they are with it."""
    row = {"place": 1024, "size": 1, "commit": None, **facts}
    stored = stored_key(key.decode()) if b".." not in key else key
    changed(folder, "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?)", arguments=(stored, *row.values()))
    of_folder = folder_of(stored)
    with closing(sqlite3.connect(place(folder))) as connection:
        query = "SELECT *, NULL FROM blobs WHERE key >= ? AND key < ?"
        rows = connection.execute(query, keys_below(of_folder)).fetchall()
    with suppress(FormatError, TypeError):
        total = sum(row_of(*values).check for values in rows)
        values = (of_folder.encode(), len(rows), total)
        changed(folder, "INSERT OR REPLACE INTO state VALUES (?, ?, ?)", arguments=values)


FORGED = {
    "a negative size": {"size": -1},
    "a place before the first": {"place": -(1 << 40)},
    "a huge size": {"size": 1 << 62},
    "a fractional place": {"place": 1024.5},
    "a text for a place": {"place": "one"},
    "no record": {"place": 1 << 50},
    "a position behind the last": {"place": 1024 + 1000, "size": 7},
    "a row of another blob": {"place": 1025},
    "a commit of another key": {"commit": 3},
}


@pytest.mark.parametrize("facts", FORGED.values(), ids=list(FORGED))
def test_forged_row_is_an_error_where_it_is_read(folder: Path, facts: dict[str, object]) -> None:
    key = target(0).key
    forged_row(folder, key.encode(), **facts)
    backend = FolderBackend(folder / ".tensorcas")

    with pytest.raises(FormatError):
        backend.get(key)
    with pytest.raises(FormatError):
        backend.read_into(key, 0, memoryview(bytearray(5)))
    assert damages_of(backend)
    assert look(folder)[0] <= KEPT - {0}


@pytest.mark.parametrize("folder_of_keys", ["packs", "manifests", "refs"])
def test_row_that_is_missing_is_an_error_of_the_listing_that_lacks_it(folder: Path, folder_of_keys: str) -> None:
    changed(folder, "DELETE FROM blobs WHERE key >= ? AND key < ?", arguments=keys_below(folder_of_keys))
    backend = FolderBackend(folder / ".tensorcas")

    with pytest.raises(FormatError, match=r"blobs\.db"):
        list(backend.list(folder_of_keys))


@pytest.mark.parametrize("key", [b"\x03../../../escape", b"/refs/x", b"\x03/x", b"\x03x\xffy", b"\x03\0"])
def test_row_whose_key_is_no_key_leads_nowhere(folder: Path, key: bytes) -> None:
    changed(folder, "INSERT INTO blobs VALUES (?, ?, ?, ?)", arguments=(key, 1024, 1, None))
    before = sorted(folder.parent.rglob("*"))
    backend = FolderBackend(folder / ".tensorcas")

    if key.startswith(stored_key("refs/x")[:1]):
        with pytest.raises(FormatError):
            list(backend.list("refs"))
    assert damages_of(backend)
    Database.close_all()
    plan_repair(Store.open(folder)).execute()

    assert look(folder) == (KEPT, False)
    outside = [path for path in sorted(folder.parent.rglob("*")) if path not in before]
    assert all(path.is_relative_to(folder / ".tensorcas") for path in outside)


def test_row_of_an_earlier_commit_of_a_ref_is_refused_and_others_load(folder: Path) -> None:
    with closing(sqlite3.connect(place(folder))) as connection:
        query = "SELECT place, size FROM blobs WHERE key = ?"
        [earlier] = connection.execute(query, (stored_key(target(0).key),)).fetchall()
    save(folder, 0, 9)
    Database.close_all()
    changed(
        folder, "UPDATE blobs SET place = ?, size = ? WHERE key = ?", arguments=(*earlier, stored_key(target(0).key))
    )

    store = Store.open(folder)
    with pytest.raises(FormatError, match="refs"):
        store.ref(target(0).key)
    assert store.ref(target(2).key) is not None
    assert {damage.key for damage in damages_of(store.backend)} >= {target(0).key}


def forged_record(folder: Path, number: int, base: int | None, data: bytes, *, size: int = 100) -> None:
    check = record_check(number, base, size, data)
    changed(
        folder,
        'UPDATE records SET base = ?, size = ?, "check" = ?, data = ? WHERE number = ?',
        arguments=(base, size, check, data, number),
    )


def test_records_that_build_on_each_other_in_a_circle_are_an_error(folder: Path) -> None:
    with closing(sqlite3.connect(place(folder))) as connection:
        numbers = [number for (number,) in connection.execute("SELECT number FROM records ORDER BY number")]
    for number, base in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
        forged_record(folder, number, base, b"\0" * 20)

    for step in KEPT:
        with pytest.raises(FormatError):
            Store.open(folder).backend.get(target(step).key)
    assert damages_of(Store.open(folder).backend)
    FolderBackend(folder / ".tensorcas").sweep(0)  # it ends


PROGRAM = """
import resource, sys
from pathlib import Path
from tensorcas_mlflow.backends import FolderBackend, damages_of
from tensorcas_mlflow.errors import FormatError
backend = FolderBackend(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for call in (lambda: backend.get(sys.argv[2]), lambda: backend.sweep(0)):
    try:
        call()
    except FormatError as error:
        print(error)
assert damages_of(backend)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def bomb(with_size: bool) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=with_size
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj(
        size=600 << 20 if with_size else -1
    )
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(600)), compressor.flush()])


@pytest.mark.long
@pytest.mark.parametrize("how", ["a bomb with its size", "a bomb without its size", "a huge row"])
def test_record_that_would_take_the_memory_is_refused_without_it(folder: Path, how: str) -> None:
    with closing(sqlite3.connect(place(folder))) as connection:
        [(record,)] = connection.execute(
            "SELECT place >> 10 FROM blobs WHERE key = ?", (stored_key(target(0).key),)
        ).fetchall()
    if how == "a huge row":
        changed(folder, "UPDATE records SET data = zeroblob(64 << 20) WHERE number = ?", arguments=(record,))
    else:
        forged_record(folder, record, None, bomb("with its" in how), size=8 << 20)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder / ".tensorcas", target(0).key],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )

    *said, most_kib = done.stdout.splitlines()
    assert said
    assert int(most_kib) < (48 if how == "a huge row" else 150) << 10


def test_numbers_of_the_state_are_checked(folder: Path) -> None:
    for number, what in enumerate(("n = 1 << 62", "total = 'x'", "n = NULL", "total = total + 1", "n = 2.5")):
        copy = copied(folder, f"copy {number}")
        changed(copy, f"UPDATE state SET {what}")

        with pytest.raises(FormatError, match=r"blobs\.db"):
            list(FolderBackend(copy / ".tensorcas").list("refs"))
        assert damages_of(Store.open(copy).backend)


def test_a_changed_or_missing_commit_is_named(folder: Path) -> None:
    for number, what in enumerate(
        [
            "DELETE FROM records WHERE number = 2",
            "DELETE FROM records WHERE number = (SELECT max(number) FROM records)",
            "UPDATE records SET time = time + 1 WHERE number = 1",
            "UPDATE records SET before = zeroblob(17) WHERE number = 3",
            "UPDATE records SET before = zeroblob(15) WHERE number = 5",
            "UPDATE records SET key = CAST('refs/x' AS BLOB) WHERE number = 5",
            "UPDATE records SET after = zeroblob(16) WHERE number = 5",
            "UPDATE records SET what = 3 WHERE number = 3",
            "UPDATE records SET what = 7 WHERE number = 3",
            "UPDATE records SET number = 99 WHERE number = 3",
            "UPDATE records SET hash = zeroblob(16) WHERE number = 2",
        ]
    ):
        copy = copied(folder, f"copy {number}")
        changed(copy, what)

        assert damages_of(Store.open(copy).backend), what
