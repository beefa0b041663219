"""The examples printed in docs/format.md are what the code reads and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.backends import BlobInfo, MemoryBackend, check_key
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.codecs import CODECS, RAW
from tensorcas_mlflow.codecs._functions import _FUNCTIONS
from tensorcas_mlflow.layout import RefTarget, artifact_key
from tensorcas_mlflow.layout._keys import quote_segment
from tensorcas_mlflow.layout._records import parse_ref
from tensorcas_mlflow.layout.manifests import HEADER_BYTES, TENSORS_FILE_MAGIC, Derivation, Header, Manifest, Row
from tensorcas_mlflow.layout.packs import (
    ENTRY,
    PACK_MAGIC,
    TABLE_ENTRY,
    PackWriter,
    Payload,
    make_table,
    read_table,
    segment_bytes,
)
from tensorcas_mlflow.layout.packs._index import SEGMENT_MAGIC
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES, TABLE_MAGIC
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE, Store, write_payload
from tensorcas_mlflow.store.protocol import condemned_bytes, parse_format, parse_intent

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next heading of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}\n", PAGE, re.MULTILINE)
    assert found, f"docs/format.md has no section {title}"
    rest = PAGE[found.end() :]
    end = re.search(rf"^#{{2,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def examples(title: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", section(title), re.DOTALL)


def rows(title: str, nth: int = 0) -> list[list[str]]:
    """A table's rows without its head."""
    tables = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[nth].splitlines()[2:]]


def hello() -> Payload:
    return Payload(digest=digest(b"hello"), raw_bytes=5, codec=RAW, typesize=1, data=b"hello", begins_row=True)


def test_the_pack_that_is_printed_is_the_pack_that_is_written() -> None:
    (text,) = examples("Packs", "hex")
    printed = bytes.fromhex(text)
    written = b"".join(bytes(piece) for piece in PackWriter().pieces([hello()]))
    entries = read_table("packs/x.pack", len(printed), lambda start, stop: printed[start:stop])

    assert written == printed
    assert entries["digest"][0].tobytes() == digest(b"hello")
    assert printed[64:69] == b"hello"


def test_the_table_of_an_entry_gives_its_fields_where_they_lie() -> None:
    at = 0
    assert TABLE_ENTRY.names is not None
    assert TABLE_ENTRY.fields is not None
    for (position, size, name, _), field in zip(rows("Packs", 0), TABLE_ENTRY.names, strict=True):
        assert int(position) == at == TABLE_ENTRY.fields[field][1]
        assert int(size) == TABLE_ENTRY.fields[field][0].itemsize
        assert name in (field, "\N{EN DASH}")
        at += int(size)

    assert at == TABLE_ENTRY.itemsize == 68


def test_the_table_of_a_base_gives_its_fields_where_they_lie() -> None:
    at = 0
    for position, size, _, _ in rows("Packs", 1):
        assert int(position) == at
        at += int(size)

    assert at == 52 == 4 + ENTRY.itemsize - TABLE_ENTRY.itemsize


def test_the_table_of_the_footer_gives_its_fields_where_they_lie() -> None:
    at = 0
    for position, size, _, _ in rows("Packs", 2):
        assert int(position) == at
        at += int(size)

    assert at == FOOTER_BYTES == 64
    assert PACK_MAGIC.hex(" ") in section("Packs")
    assert TABLE_MAGIC.hex(" ") in section("Packs")


def test_the_header_of_a_self_contained_file_that_is_printed_is_read() -> None:
    (text,) = examples("Self-contained files", "hex")
    header = Header.parse(bytes.fromhex(text))

    assert len(bytes.fromhex(text)) == HEADER_BYTES
    assert (header.manifest_bytes, header.manifest_digest) == (5, digest(b"hello"))
    assert TENSORS_FILE_MAGIC.hex(" ") in section("Self-contained files")


def test_a_self_contained_file_is_laid_out_as_printed(tmp_path: Path) -> None:
    arrays = {"a": np.arange(50.0), "none": np.zeros((0, 3)), "b": np.arange(7, dtype=np.int8)}
    manifest = write_payload(tmp_path, arrays)
    data = (tmp_path / PAYLOAD_FILE).read_bytes()
    fields = {name: data[int(at) : int(at) + int(n_bytes)] for at, n_bytes, name, _ in rows("Self-contained files")}
    manifest_end = 64 + int.from_bytes(fields["manifest_bytes"], "little")
    first = -(-manifest_end // 64) * 64

    assert fields["magic"] == TENSORS_FILE_MAGIC
    assert fields["manifest_digest"] == digest(data[64:manifest_end])
    assert data[64:manifest_end] == manifest.to_bytes() == (tmp_path / MANIFEST_FILE).read_bytes()
    assert data[first : first + 400] == arrays["a"].tobytes()
    assert data[first + 448 :] == arrays["b"].tobytes()
    assert not any(data[48:64] + data[manifest_end:first] + data[first + 400 : first + 448])


def test_the_codecs_are_those_of_the_table() -> None:
    assert {(int(number), name.strip("`")) for number, name, _ in rows("Codecs")} == {
        (codec.number, codec.name) for codec in CODECS.values()
    }


def test_the_format_that_is_printed_is_read_and_written() -> None:
    (text,) = examples("`format`", "json")
    backend = MemoryBackend()
    Store.init_backend(backend)
    written = json.loads(backend.get("format"))

    assert with_check(text).strip() == text.strip().encode()
    assert parse_format(text.encode()) == ("9f1c0e5a7b3d4c2e8f6a1b0c9d8e7f60", 262144)
    assert written == {**json.loads(text), "id": written["id"], "check": written["check"]}
    assert re.fullmatch("[0-9a-f]{32}", written["id"])


def with_check(text: str) -> bytes:
    """Put the check that it has to have into a record that is printed."""
    said, _, _ = text.rpartition(', "check": ')
    return f'{said}, "check": "{digest(said.encode()).hex()[:32]}"}}'.encode()


def written_store() -> tuple[MemoryBackend, Store]:
    backend = MemoryBackend()
    return backend, Store.init_backend(backend)


def test_the_ref_that_is_printed_is_read_and_has_the_fields_that_are_written() -> None:
    text = examples("Refs and intents", "json")[0].strip()
    name = "0" * 64
    ref = parse_ref("refs/x", with_check(text.replace("<name below manifests/>", name)))
    backend, store = written_store()
    target = RefTarget(path=ref.path, uri="u", run_id="r", step=3, model_id="m")
    with store.write_checkpoint({"a": np.arange(3)}, flavor="sklearn") as save:
        committed = save.commit(target)
    blob = backend.get(committed.key)
    written = json.loads(blob)

    assert with_check(blob.decode()) == blob
    assert (ref.path, ref.step, ref.n_bytes, ref.flavor) == (target.path, 3, 1840, "sklearn")
    assert set(written) == {*json.loads(text), "uri", "run_id", "model_id"}
    assert f"manifests/{written['manifest']}" in {info.key for info in backend.list("manifests")}


def test_the_intent_that_is_printed_is_read_and_has_the_fields_that_are_written() -> None:
    text = examples("Refs and intents", "json")[1].strip().replace("<name>", "0" * 64)
    text = text.replace("<32 hex>", digest(bytes(12 * 32)).hex()[:32], 1)
    info = BlobInfo(key="intents/x", size=0, modified_s=0.0, token="")
    intent = parse_intent(info, with_check(text) + b"\n" + bytes(12 * 32))
    backend, store = written_store()
    with store.write_checkpoint({"a": np.arange(3)}):
        (found,) = backend.list("intents")
        head, _, tail = backend.get(found.key).partition(b"\n")

    assert intent.digests is not None
    assert intent.digests.shape == (12, 32)
    assert set(json.loads(head)) == set(json.loads(text))
    assert tail == digest(np.arange(3).tobytes())


def test_a_condemned_list_has_the_fields_that_are_printed() -> None:
    found = re.search(r"A condemned list is one JSON object: `(\{.*?\})`", PAGE)
    assert found is not None
    printed = json.loads(found[1].replace(", …", ""))

    assert set(json.loads(condemned_bytes(frozenset(["a" * 32]), frozenset(["b" * 64])))) == set(printed)


def test_refs_stand_where_the_page_says() -> None:
    assert artifact_key("a b/c") == "refs/artifacts/a%20b/@c"
    assert RefTarget(run_id="r", step=3).key == "refs/runs/r/@3"
    elsewhere = re.compile(f"refs/copies/{digest(b's3://x').hex()}/@[0-9a-f]{{32}}")
    assert elsewhere.fullmatch(RefTarget(uri="s3://x").key)
    assert RefTarget(uri="s3://x").key != RefTarget(uri="s3://x").key
    assert quote_segment("ä") == "%C3%A4"
    assert quote_segment("x" * 180) == "x" * 180
    assert quote_segment("x" * 181) == "~" + digest(b"x" * 181).hex()[:32]


def test_a_segment_has_the_parts_that_are_printed() -> None:
    entries = np.zeros(130, ENTRY)
    entries["digest"][:, 9] = np.arange(130)
    data = segment_bytes(make_table({"1f" * 16: entries}))
    sizes = [
        len(data) and int(size) for size in re.findall(r"^\| (?:marks|packs|foot) \| (\d+)", section("The index"), re.M)
    ]
    places = rows("The index", 1)
    foot = rows("The index", 2)

    assert len(data) == 130 * (80 + sizes[0]) + 2 * 8 + sizes[1] + sizes[2]
    assert [int(row[0].split(" or ")[0]) for row in places] == [0, 68, 68, 72]
    row = data[80:160]
    assert row[:68] == entries[1].tobytes()[:68]
    assert row[72:] == digest(row[:72])[:8]
    assert data[130 * 80 : 130 * 82] == b"".join(bytes([0, n]) for n in range(130))
    end = data[130 * 82 :]
    assert end[:16] == bytes(16)
    assert end[16:32] == bytes.fromhex("1f" * 16)
    assert bytes.fromhex(foot[0][3].partition(" (")[0]) == SEGMENT_MAGIC == end[32:40]
    assert [int(row[0]) for row in foot] == [0, 8, 12, 16, 24, 28, 32]
    assert end[40:64] == (1).to_bytes(4, "little") * 2 + (130).to_bytes(8, "little") + (80).to_bytes(8, "little")
    assert end[64:] == digest(end[:64])


def test_a_manifest_has_the_columns_and_the_head_that_are_printed() -> None:
    _, store = written_store()
    with store.write_checkpoint({"a": np.arange(3)}, flavor="sklearn") as save:
        stream = save.manifest.to_bytes()
        blob = save.manifest.to_blob()
    schema = pa.ipc.open_stream(stream).schema
    head = json.loads(schema.metadata[b"tensorcas"])

    assert [name.strip("`") for name, _, _ in rows("Manifests")] == schema.names
    assert stream[:4] == b"\xff\xff\xff\xff"
    assert blob[:4] == b"\x28\xb5\x2f\xfd"
    said = section("Manifests").replace(section("Derived rows"), "")
    assert set(head) == set(re.findall(r'"([a-z_]+)":', said))


def test_the_derived_rows_that_are_printed_are_read() -> None:
    said = json.loads(examples("Derived rows", "json")[0])
    kinds = [("bfloat16", 2), ("float32", 4), ("float32", 4), ("float16", 2), ("float32", 4)]
    digests = np.zeros((1, 32), np.uint8)
    every = [
        Row(spec=Spec(name="ab"[at] if at < 2 else "", dtype=dtype, shape=(8,)), cuts=None, digests=digests)
        for at, (dtype, _) in enumerate(kinds)
    ]
    manifest = Manifest(
        kind="file",
        chunk_bytes=4096,
        store_id="s",
        flavor=None,
        rows=every[: len(every) - said["n_inputs"]],
        inputs=every[len(every) - said["n_inputs"] :],
        derived=tuple(Derivation(row, name, params, tuple(of)) for row, name, params, of in said["derived"]),
    )
    head = json.loads(pa.ipc.open_stream(manifest.to_bytes()).schema.metadata[b"tensorcas"])

    assert {name: head[name] for name in said} == said
    assert Manifest.from_bytes(manifest.to_bytes()).derived == manifest.derived
    named = [
        (f"`{name}`", params) for names, params, *_ in rows("Derived rows") for name in re.findall(r"`(\w+)`", names)
    ]
    assert [name.strip("`") for name, _ in named] == list(_FUNCTIONS)
    for name, params in named:
        assert set(re.findall(r"`([a-z0-9]+)`", params.split(":")[0] if name != "`slice`" else params)) == (
            _FUNCTIONS[name.strip("`")].params
        )


def test_the_identity_of_a_tensor_is_as_printed() -> None:
    _, store = written_store()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    with store.write_checkpoint({"a": array}) as save:
        row = Manifest.from_bytes(save.manifest.to_bytes()).row("a")
    shape = np.array([2, 3], "<i8").tobytes()

    assert row.identity == digest(b"float32\0" + shape + digest(array.tobytes())).hex()


@pytest.mark.parametrize("name", re.findall(r"`((?:u?int|float|complex|bfloat|bool)[0-9]*)`", section("Manifests")))
def test_every_dtype_that_is_printed_is_known(name: str) -> None:
    assert parse_dtype(name).itemsize > 0


def test_every_key_that_is_written_is_of_a_kind_that_is_printed() -> None:
    backend, store = written_store()
    with store.write_checkpoint({"a": np.arange(3)}) as save:
        save.commit(RefTarget(path="a/b"))
    patterns = [
        r"format",
        r"packs/[0-9a-f]{32}\.pack",
        r"index/[0-9a-f]{32}\.(loose|segment)",
        r"manifests/[0-9a-f]{64}(\.[0-9a-f]{8})?",
        r"refs/artifacts/a/@b",
    ]

    for key in backend._blobs:
        assert any(re.fullmatch(pattern, check_key(key)) for pattern in patterns), key
