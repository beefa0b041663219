"""A program written from docs/format.md alone, chapter "The database", reads a database and finds its checks right."""

from __future__ import annotations

import re
import sqlite3
import struct
from binascii import hexlify
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from tensorcas_mlflow.backends import FolderBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def example(language: str) -> str:
    chapter = PAGE[PAGE.index("\n## The database\n") :]
    return re.findall(rf"```{language}\n(.*?)```", chapter, re.DOTALL)[0]


def short(data: bytes) -> int:
    """The 8-byte hash."""
    return int.from_bytes(blake3(data).digest()[:8], "little", signed=True)


def packed(key: str) -> bytes:
    def pack(run: re.Match[str]) -> str:
        n = min(len(run[0]) // 2, 127)
        return (bytes((128 + n,)) + bytes.fromhex(run[0][: 2 * n])).decode("latin-1") + run[0][2 * n :]

    return re.sub("[0-9a-f]{8,}", pack, key).encode("latin-1")


def shrunk(content: bytes) -> bytes:
    runs, at, out = [], 0, b""
    for run in re.finditer(rb"[0-9a-f]{16,}", content):
        n = len(run[0]) // 2 * 2
        runs.append((run.start() - at, n))
        out += content[at : run.start()] + bytes.fromhex(run[0][:n].decode())
        at = run.start() + n
    return struct.pack("<H", len(runs)) + b"".join(struct.pack("<II", *run) for run in runs) + out + content[at:]


class Reader:
    def __init__(self, path: Path) -> None:
        self.run = sqlite3.connect(path).execute

    def content(self, number: int) -> bytes:
        query = 'SELECT base, depth, form, size, data, "check" FROM records WHERE number = ?'
        [(base, depth, form, size, data, check)] = self.run(query, (number,)).fetchall()
        assert check == short(f"{number} {base or 0} {depth} {form} {size}\n".encode() + data)
        below = None if base is None else shrunk(self.content(base))
        if form == 1:
            dictionary = below and zstandard.ZstdCompressionDict(below, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            frame = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS, dict_data=dictionary)
            small = frame.decompress(data, max_output_size=9 << 20)
            (n,) = struct.unpack_from("<H", small)
            at, data = 2 + 8 * n, b""
            for gap, digits in struct.iter_unpack("<II", small[2:at]):
                data += small[at : at + gap] + hexlify(small[at + gap : at + gap + digits // 2])
                at += gap + digits // 2
            data += small[at:]
        assert len(data) == size
        return data

    def parts(self, number: int) -> dict[str, tuple[int, int, bytes]]:
        """The kind, the start and the stored bytes of each blob in a record."""
        content = self.content(number)
        (n,) = struct.unpack_from("<H", content)
        at, rows = 2 + 7 * n, list(struct.iter_unpack("<BHI", content[2 : 2 + 7 * n]))
        keys = []
        for _, key_bytes, _ in rows:
            keys.append(content[at : (at := at + key_bytes)].decode())
        found = {}
        for key, (kind, _, size) in zip(keys, rows, strict=True):
            found[key] = (kind, at, content[at : (at := at + size)])
        assert at == len(content)
        return found

    def blob(self, key: str) -> bytes:
        query = 'SELECT born, record, start, size, "check" FROM blobs WHERE key = ?'
        [(born, record, start, size, check)] = self.run(query, (packed(key),)).fetchall()
        assert check == crc32(packed(key) + f"{born} {record} {start} {size}".encode())
        kind, at, data = self.parts(record)[key]
        assert (at, len(data)) == (start, size)
        return [bytes, whole_pack, whole_record][kind](data)


def whole_record(data: bytes) -> bytes:
    assert data[-34:] == bytes(32) + b'"}'
    return data[:-34] + blake3(data[: data.rindex(b', "check": "')]).hexdigest()[:32].encode() + b'"}'


def whole_pack(data: bytes) -> bytes:
    pack = bytearray(data)
    n, table = struct.unpack_from("<IQ", pack, len(pack) - 52)
    for at in range(table, table + 68 * n, 68):
        offset, stored_bytes = struct.unpack_from("<QI", pack, at + 48)
        digest = blake3(pack[offset : offset + stored_bytes]).digest()
        if pack[at + 64] == 0:
            pack[at : at + 32] = digest
        pack[at + 32 : at + 48] = digest[:16]
    pack[-32:] = blake3(pack[table:-32]).digest()
    return bytes(pack)


@pytest.fixture
def backend(tmp_path: Path) -> FolderBackend:
    """A store with a few steps, a step that was replaced and one that was deleted."""
    backend = FolderBackend(tmp_path)
    store = Store.init_backend(backend, database=True)
    rng = np.random.default_rng(0)
    state = {"a": rng.normal(size=(20, 30)), "text": np.frombuffer(b"some text " * 50, np.uint8)}
    for step in (0, 1, 2, 3, 4, 5, 6, 3):
        state["a"][step] += 1
        with store.write_checkpoint(state, flavor=None) as save:
            save.commit(RefTarget(run_id="8f3c21aa" * 4, step=step), replace=True)
    backend.delete(f"refs/runs/{'8f3c21aa' * 4}/@2")
    return backend


def rows(reader: Reader, table: str) -> list[Any]:
    return reader.run(f"SELECT * FROM {table}").fetchall()


def test_schema_that_is_printed_is_that_of_the_database(backend: FolderBackend, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "blobs.db")
    printed = sqlite3.connect(":memory:")
    printed.executescript(example("sql"))
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"

    assert reader.run(query).fetchall() == printed.execute(query).fetchall()
    assert rows(reader, "pragma_application_id") == [(int("0x54434442", 16),)]
    assert "0x54434442" in PAGE
    assert rows(reader, "pragma_user_version") == [(1,)]


def test_key_that_is_printed_is_packed_so() -> None:
    assert packed("refs/runs/8f3c21aa/@3") == bytes.fromhex(example("hex"))


def test_every_blob_is_read_by_the_words_of_the_page(backend: FolderBackend, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "blobs.db")
    keys = {info.key for prefix in ("packs", "index", "manifests", "refs") for info in backend.list(prefix)}
    kinds = {
        kind for (number,) in reader.run("SELECT number FROM records") for kind, _, _ in reader.parts(number).values()
    }

    assert kinds == {0, 1, 2}
    assert reader.run("SELECT max(depth) FROM records").fetchone()[0] > 1
    assert {packed(key) for key in keys} == {row[0] for row in rows(reader, "blobs")}
    assert {key: reader.blob(key) for key in keys} == {key: backend.get(key) for key in keys}


def test_counts_and_commits_are_those_of_the_page(backend: FolderBackend, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "blobs.db")
    counted: dict[bytes, tuple[int, int]] = {}
    for key, *_, check in rows(reader, "blobs"):
        n_rows, total = counted.get(key.split(b"/")[0], (0, 0))
        counted[key.split(b"/")[0]] = (n_rows + 1, total + check)
    last = bytes(16)
    after: dict[bytes, bytes | None] = {}
    for number, (n, name, time, what, key, before, now, hash_) in enumerate(rows(reader, "commits"), 1):
        assert (n, before) == (number, after.get(key))
        text = f"{n} {time} {what}\n".encode()
        last = blake3(last + text + (before or bytes(16)) + (now or bytes(16)) + key).digest(16)
        assert (hash_, what) == (last, 1 if now else 2)
        after[key] = now
        assert name == short(next(k for k in all_refs() if packed(k) == key).encode())

    assert {name: tuple(rest) for name, *rest in rows(reader, "folders") if rest[0]} == counted
    [(commits, hash_, born, records, base, check)] = rows(reader, "state")
    assert (commits, hash_) == (len(rows(reader, "commits")), last)
    assert check == crc32(f"{commits} ".encode() + hash_ + f" {born} {records} {base or 0}".encode())
    for key in all_refs():
        assert after[packed(key)] == (None if key.endswith("@2") else blake3(reader.blob(key)).digest(16))


def test_head_is_that_of_the_page(backend: FolderBackend, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "blobs.db")
    first, *lines, end = (tmp_path / "blobs.head").read_text().split("\n")
    commits = [(number, name) for number, name, *_ in rows(reader, "commits")]
    number, *_, check = first.split(" ")
    later = [tuple(map(int, line.split(" "))) for line in lines]

    assert int(check) == crc32(first.rpartition(" ")[0].encode())
    assert later == commits[int(number) : -1]  # the last one is a deletion, which need not be durable
    assert end == ""
    backend._database.close()
    first = (tmp_path / "blobs.head").read_text().partition("\n")[0]
    stat = (tmp_path / "blobs.db").stat()
    last = rows(reader, "commits")[-1]
    assert first.split(" ")[:4] == [str(last[0]), last[-1].hex(), str(stat.st_ino), str(stat.st_mtime_ns)]


def all_refs() -> list[str]:
    return [f"refs/runs/{'8f3c21aa' * 4}/@{step}" for step in range(7)]
