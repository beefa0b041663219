from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.base.content_cuts import ContentCutter, opaque_sizes
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.file_formats.parts import take_apart

CHUNK = 4096


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "root", chunk_bytes=CHUNK)


def write(store: Store, path: Path, name: str = "dir/file.bin") -> Ref:
    with store.write_file(path) as save:
        return save.commit(RefTarget(path=name))


def read(store: Store, ref: Ref, **options: bool) -> bytes:
    out = io.BytesIO()
    out.writelines(store.iter_file(ref, **options))
    return out.getvalue()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK, 777_777, (16 << 20) + 5])
def test_a_file_is_read_back_bit_for_bit(store: Store, tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    ref = write(store, tmp_path / "file")

    assert (ref.kind, ref.n_bytes, ref.path) == ("file", size, "dir/file.bin")
    assert read(store, ref) == content
    assert read(Store.open(store.uri), ref, verify=False) == content


def test_a_file_longer_than_a_batch_comes_in_pieces(store: Store, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(40 << 20)
    ref = write(store, tmp_path / "file")
    sizes = [len(piece) for piece in store.iter_file(ref)]

    assert sum(sizes) == 40 << 20
    assert max(sizes) <= 16 << 20


def test_bytes_that_two_files_share_are_stored_once(store: Store, tmp_path: Path) -> None:
    shared = np.random.default_rng(0).bytes(50 * CHUNK)
    (tmp_path / "one").write_bytes(shared)
    (tmp_path / "two").write_bytes(shared + b"and more")
    write(store, tmp_path / "one", "one")
    with store.write_file(tmp_path / "two") as save:
        save.commit(RefTarget(path="two"))

    assert save.n_new_bytes <= CHUNK


@pytest.mark.parametrize("put_in", [0, 700_000])
@pytest.mark.parametrize("n_bytes", [1, 3, 100_000])
def test_bytes_put_into_a_file_of_no_format_store_little_again(tmp_path: Path, put_in: int, n_bytes: int) -> None:
    store = Store.init(tmp_path / "root")
    content, new = np.random.default_rng(0).bytes(10_000_000), np.random.default_rng(1).bytes(n_bytes)
    (tmp_path / "one").write_bytes(content)
    (tmp_path / "two").write_bytes(content[:put_in] + new + content[put_in:])
    write(store, tmp_path / "one", "one")
    with store.write_file(tmp_path / "two") as save:
        ref = save.commit(RefTarget(path="two"))

    # A long insertion moves the pieces against each other; it takes some of them until two cuts coincide.
    assert save.n_new_bytes <= n_bytes + (2 if n_bytes < 1000 else 6) * store.chunk_bytes
    assert read(store, ref) == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("n_rows", [1, 500])
def test_rows_put_at_the_end_of_a_table_store_the_last_pages_again(tmp_path: Path, n_rows: int) -> None:
    draw = np.random.default_rng(0)
    table = pa.table({f"column {nth}": draw.integers(0, 1 << 60, 200_000) for nth in range(6)})
    rows = pa.table({name: np.arange(n_rows) for name in table.column_names})
    store = Store.init(tmp_path / "root")
    for name, each in (("one", table), ("two", pa.concat_tables([table, rows]))):
        pyarrow.parquet.write_table(each, tmp_path / name, use_content_defined_chunking=True, use_dictionary=False)
    write(store, tmp_path / "one", "one")
    with store.write_file(tmp_path / "two") as save:
        ref = save.commit(RefTarget(path="two"))
    known = {page for _, page in take_apart((tmp_path / "one").read_bytes())}
    new = sum(len(page) for _, page in take_apart((tmp_path / "two").read_bytes()) if page not in known)

    assert new < 0.03 * ref.n_bytes
    assert save.n_new_bytes <= new
    assert read(store, ref) == (tmp_path / "two").read_bytes()


def test_a_file_of_no_format_whose_first_piece_is_a_whole_chunk_is_cut_by_content(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=CHUNK)
    for seed in range(1000):
        content = np.random.default_rng(seed).bytes(60 * CHUNK)
        cutter = ContentCutter(lambda _: opaque_sizes(CHUNK))
        if cutter.feed(np.frombuffer(content, np.uint8))[0] == CHUNK:
            break
    else:
        raise AssertionError("no first piece is a whole chunk")
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(content)
        with store.write_file(tmp_path / name) as save:
            save.commit(RefTarget(path=name))

    assert save.n_new_bytes == 0


def test_a_file_that_an_earlier_release_cut_at_fixed_distances_is_not_stored_again(
    store: Store, tmp_path: Path
) -> None:
    content = np.random.default_rng(0).bytes(60 * CHUNK + 5)
    with store.write_checkpoint({"raw": np.frombuffer(content, np.uint8)}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    (tmp_path / "file").write_bytes(content)
    with store.write_file(tmp_path / "file") as save:
        save.commit(RefTarget(path="file"))

    assert save.n_new_bytes == 0


def test_a_file_and_a_tensor_share_chunks(store: Store, tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=10_000)
    (tmp_path / "raw").write_bytes(array.tobytes())
    with store.write_checkpoint({"a": array}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    with store.write_file(tmp_path / "raw") as save:
        ref = save.commit(RefTarget(path="raw"))

    assert save.n_new_bytes == 0
    assert read(store, ref) == array.tobytes()


class Changing(io.RawIOBase):
    """Bytes that are others each time they are read."""

    def __init__(self, n_bytes: int) -> None:
        self._rng = np.random.default_rng(0)
        self._left = n_bytes
        self.given = b""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        n_bytes = min(self._left, len(buffer), 1000)
        buffer[:n_bytes] = self._rng.bytes(n_bytes)
        self.given += bytes(buffer[:n_bytes])
        self._left -= n_bytes
        return n_bytes


def test_a_stream_is_read_once_and_stored_as_it_was_read(store: Store) -> None:
    stream = Changing(10 * CHUNK + 5)
    with store.write_stream(stream) as save:
        ref = save.commit(RefTarget(path="stream"))

    assert len(stream.given) == 10 * CHUNK + 5
    assert read(store, ref) == stream.given


@pytest.mark.parametrize("error", [OSError("unplugged"), ValueError("closed"), KeyError("gone")])
@pytest.mark.parametrize("start", [b"", b"PK\x03\x04", b"\x80\x04"])
def test_a_stream_that_breaks_off_leaves_nothing_behind(store: Store, error: Exception, start: bytes) -> None:
    class Breaking(io.BytesIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            n_bytes = super().readinto(buffer[:100])
            if n_bytes:
                return n_bytes
            self.seek(0)  # it would go on, if asked again
            raise error

    with pytest.raises(type(error)):
        store.write_stream(Breaking(start + bytes(5 * CHUNK)))
    assert store.walk_artifacts() == []
    assert list(store.backend.list("intents")) == []
    assert list(store.backend.list("packs")) == []


def test_a_file_that_cannot_be_read_is_an_oserror(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.write_file(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        store.write_file(tmp_path)


def test_the_path_of_a_checkpoint_shows_its_manifest(store: Store) -> None:
    with store.write_checkpoint({"a": np.arange(5)}) as save:
        ref = save.commit(RefTarget(path="model/checkpoint.arrow"))
    shown = read(store, ref)

    assert len(shown) == ref.n_bytes
    assert shown == store.manifest(ref).to_bytes()


@pytest.mark.usefixtures("store_of_files")
def test_damage_in_a_file_is_seen(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(3 * CHUNK))
    ref = write(store, tmp_path / "file")
    assert isinstance(store.backend, LocalBackend)
    (pack,) = (store.backend.root / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[5_000] ^= 1
    pack.write_bytes(data)

    with pytest.raises(FormatError):
        read(store, ref)


def test_a_fast_store_keeps_bytes_that_look_like_numbers_as_they_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_POLICY", "fast")
    (tmp_path / "raw").write_bytes(np.random.default_rng(0).normal(size=10_000).astype(np.float32).tobytes())
    write(store, tmp_path / "raw")
    [(name, _)] = list_packs(store.backend)

    assert set(read_pack_table(store.backend, name)["codec"].tolist()) == {RAW.number}
