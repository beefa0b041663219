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


CODES = {"packs/": "\1", "manifests/": "\2", "refs/": "\3", "index/": "\4"}


def packed(key: str) -> bytes:
    def pack(run: re.Match[str]) -> str:
        n = min(len(run[0]) // 2, 127)
        return (bytes((128 + n,)) + bytes.fromhex(run[0][: 2 * n])).decode("latin-1") + run[0][2 * n :]

    for folder, code in CODES.items():
        if key.startswith(folder):
            return code.encode() + re.sub("[0-9a-f]{8,}", pack, key.removeprefix(folder)).encode("latin-1")
    return re.sub("[0-9a-f]{8,}", pack, key).encode("latin-1")


def stored(key: str) -> bytes:
    is_hashed = key.startswith(("packs/", "manifests/"))
    return packed(key)[:1] + blake3(key.encode()).digest()[:8] if is_hashed else packed(key)


class Reader:
    def __init__(self, path: Path) -> None:
        self.run = sqlite3.connect(path).execute

    def shrunk(self, number: int) -> bytes:
        query = 'SELECT base, size, data, "check" FROM records WHERE number = ?'
        [(base, size, data, check)] = self.run(query, (number,)).fetchall()
        assert check == short(f"{number} {base or 0} {size}\n".encode() + data)
        below = self.shrunk(base) if base else None
        if len(data) != size:
            dictionary = below and zstandard.ZstdCompressionDict(below, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            frame = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS, dict_data=dictionary)
            data = frame.decompress(data, max_output_size=9 << 20)
        assert len(data) == size
        return data

    def content(self, number: int) -> bytes:
        small = self.shrunk(number)
        (n,) = struct.unpack_from("<H", small)
        at, data = 2 + 8 * n, b""
        for gap, digits in struct.iter_unpack("<II", small[2:at]):
            data += small[at : at + gap] + hexlify(small[at + gap : at + gap + digits // 2])
            at += gap + digits // 2
        return data + small[at:]

    def blobs(self, number: int) -> list[tuple[int, str, bytes]]:
        """The kind, the key and the bytes of each blob in a record."""
        content = self.content(number)
        n, n_chunks, n_names = struct.unpack_from("<HHH", content)
        at, rows = 6 + 7 * n, list(struct.iter_unpack("<BHI", content[6 : 6 + 7 * n]))
        of_chunks = list(struct.iter_unpack("<IHH", content[at : (at := at + 8 * n_chunks)]))
        of_names = list(struct.iter_unpack("<IHH", content[at : (at := at + 8 * n_names)]))
        keys = [content[at : (at := at + key_bytes)].decode() for _, key_bytes, _ in rows]
        data = bytearray(content[at:])
        chunks, names, begin = [], [], 0
        spans = [slice(begin, (begin := begin + size)) for _, _, size in rows]
        assert begin == len(data)
        for (kind, _, _), span in zip(rows, spans, strict=True):
            if kind == 1:
                data[span] = whole_pack(bytes(data[span]))
                chunks += raw_chunks(bytes(data[span]))
        for start, first, n in of_chunks:
            data[start : start + 32 * n] = b"".join(chunks[first : first + n])
        for number, ((kind, _, _), span) in enumerate(zip(rows, spans, strict=True)):
            if kind == 3:
                names.append(blake3(data[span]).hexdigest())
                keys[number] = keys[number].replace("0" * 64, names[-1])
        for start, first, n in of_names:
            data[start : start + 64 * n] = "".join(names[first : first + n]).encode()
        kinds = [kind for kind, _, _ in rows]
        found = [bytes(data[span]) for span in spans]
        whole = [whole_record(blob) if kind == 2 else blob for kind, blob in zip(kinds, found, strict=True)]
        return list(zip(kinds, keys, whole, strict=True))

    def blob(self, key: str) -> bytes:
        [(place, size)] = self.run("SELECT place, size FROM blobs WHERE key = ?", (stored(key),)).fetchall()
        _, name, data = self.blobs(place >> 10)[place & 1023]
        assert (name, len(data)) == (key, size)
        return data


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


def raw_chunks(pack: bytes) -> list[bytes]:
    n, table = struct.unpack_from("<IQ", pack, len(pack) - 52)
    return [pack[at : at + 32] for at in range(table, table + 68 * n, 68) if pack[at + 64] == 0]


@pytest.fixture
def backend(tmp_path: Path) -> FolderBackend:
    """A store with a few steps, a step that was replaced and one that was deleted."""
    backend = FolderBackend(tmp_path)
    store = Store.init_backend(backend, database=True)
    rng = np.random.default_rng(0)
    state = {"a": rng.normal(size=(20, 30)), "text": np.frombuffer(b"some text " * 50, np.uint8)}
    for step in (0, 1, 2, 3, 4, 5, 6, 3):
        state["a"][step] += 1
        state["noise"] = rng.integers(0, 256, 40, np.uint8)
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
    numbers = [number for (number,) in reader.run("SELECT number FROM records WHERE data IS NOT NULL")]
    places = [struct.unpack_from("<HHH", reader.content(number))[1:] for number in numbers]

    assert {kind for number in numbers for kind, _, _ in reader.blobs(number)} == {0, 1, 2, 3}
    assert np.all(np.max(places, axis=0) > 0)
    assert reader.run("SELECT count(*) FROM records WHERE base > 0").fetchone()[0] > 1
    assert {stored(key) for key in keys} == {row[0] for row in rows(reader, "blobs")}
    assert {key: reader.blob(key) for key in keys} == {key: backend.get(key) for key in keys}


def test_counts_and_commits_are_those_of_the_page(backend: FolderBackend, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "blobs.db")
    folders = {code.encode(): folder[:-1].encode() for folder, code in CODES.items()}
    counted: dict[bytes, tuple[int, int]] = {}
    for key, place, size, commit in rows(reader, "blobs"):
        folder = folders.get(key[:1]) or key.split(b"/")[0]
        n_rows, total = counted.get(folder, (0, 0))
        check = crc32(key + f"{place >> 10} {place & 1023} {size} {commit or 0}".encode())
        counted[folder] = (n_rows + 1, total + check)
    last = bytes(16)
    after: dict[bytes, bytes | None] = {}
    commits = reader.run("SELECT * FROM records WHERE number > 0").fetchall()
    for number, (n, time, what, key, before, now, hash_, *_, data) in enumerate(commits, 1):
        if data is not None:
            [(name, ref)] = [(name, ref) for _, name, ref in reader.blobs(n) if name.startswith("refs/")]
            assert (key, now) == (None, None)
            key, now = packed(name), blake3(ref).digest(16)
        assert (n, before) == (number, after.get(key))
        text = f"{n} {time} {what}\n".encode()
        last = blake3(last + text + (before or bytes(16)) + (now or bytes(16)) + key).digest(16)
        assert (hash_, what) == (last, 1 if now else 2)
        after[key] = now

    state = {name: tuple(rest) for name, *rest in rows(reader, "state") if rest[0]}
    assert state.pop(b"") == (len(commits), int.from_bytes(last[:8], "little", signed=True))
    assert state == counted
    for key in all_refs():
        assert after[packed(key)] == (None if key.endswith("@2") else blake3(reader.blob(key)).digest(16))


def test_head_is_that_of_the_page(backend: FolderBackend, tmp_path: Path) -> None:
    reader = Reader(tmp_path / "blobs.db")
    first, *lines, end = (tmp_path / "blobs.head").read_text().split("\n")
    commits = []
    for number, key, data in reader.run("SELECT number, key, data FROM records WHERE number > 0").fetchall():
        names = {packed(name): name for name in all_refs()}
        [name] = [names[key]] if data is None else [n for _, n, _ in reader.blobs(number) if n.startswith("refs/")]
        commits.append((number, short(name.encode())))
    number, *_, check = first.split(" ")
    later = [tuple(map(int, line.split(" "))) for line in lines]

    assert int(check) == crc32(first.rpartition(" ")[0].encode())
    assert later == commits[int(number) : -1]  # the last one is a deletion, which need not be durable
    assert end == ""
    backend._database.close()
    first = (tmp_path / "blobs.head").read_text().partition("\n")[0]
    stat = (tmp_path / "blobs.db").stat()
    query = "SELECT number, hash FROM records ORDER BY number DESC LIMIT 1"
    [last] = reader.run(query).fetchall()
    assert first.split(" ")[:4] == [str(last[0]), last[1].hex(), str(stat.st_ino), str(stat.st_mtime_ns)]


def all_refs() -> list[str]:
    return [f"refs/runs/{'8f3c21aa' * 4}/@{step}" for step in range(7)]
