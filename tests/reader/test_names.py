"""Names as patterns and the numbers in them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend, ReadCounter
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.errors import FormatError, TensorNotFoundError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Columns, Manifest, Rows
from tensorcas_mlflow.reader import CheckpointReader, open_manifest
from tensorcas_mlflow.reader._outline import NUMBER, Patterns
from tensorcas_mlflow.store import Store


def as_expected(name: str) -> tuple[str, list[int]]:
    parts = name.split(".")
    numbers = [part for part in parts if part.isascii() and part.isdigit() and len(part) <= 18]
    return ".".join(NUMBER if part in numbers else part for part in parts), list(map(int, numbers))


@pytest.mark.parametrize("seed", range(20))
def test_each_name_is_its_pattern_with_its_numbers(seed: int) -> None:
    rng = random.Random(seed)
    names = [
        ".".join(rng.choice(["0", "12", "007", "w", "w1", "1w", "", "é", "9" * 18, "9" * 19]) for _ in range(size))
        for size in (rng.randrange(1, 5) for _ in range(rng.randrange(40)))
    ]

    found = Patterns.of(Texts.of(names))

    for row, name in enumerate(names):
        numbers = found.numbers[found.number_at[row] : found.number_at[row + 1]].tolist()
        assert (found.texts[found.pattern[row]], numbers) == as_expected(name)


def test_names_are_gathered_by_their_pattern() -> None:
    found = Patterns.of(Texts.of(["a.1", "b", "a.2", "b.2", "a.1.w"]))

    assert found.texts == [f"a.{NUMBER}", "b", f"b.{NUMBER}", f"a.{NUMBER}.w"]
    assert [rows.tolist() for rows in found.rows_by_pattern()] == [[0, 2], [1], [3], [4]]


def test_no_names_have_no_patterns() -> None:
    assert Patterns.of(Texts.of([])).rows_by_pattern() == []


N_MANY = 5000
"""More than a manifest whose names are all checked at once."""


def many(monkeypatch: pytest.MonkeyPatch, *names: str) -> CheckpointReader:
    """Open a checkpoint of very many tensors; each string that is built of a name fails from now on."""
    rows = [f"layers.{n}.weight" for n in range(N_MANY)]
    rows[-len(names) :] = names
    digests = digest(bytes(4)) * N_MANY
    columns = Columns(
        names=Texts.of(rows),
        dtypes=("float32",),
        dtype=np.zeros(N_MANY, np.intp),
        shape_offsets=np.arange(N_MANY + 1),
        sides=np.ones(N_MANY, np.int64),
        chunk_offsets=np.arange(N_MANY + 1),
        digests=np.frombuffer(digests, np.uint8).reshape(-1, 32),
        cuts=None,
    )
    store = Store.init_backend(MemoryBackend())
    with store.write_checkpoint({"w": np.zeros(1, np.float32)}) as save:
        save.commit(RefTarget(run_id="run", step=1))
    manifest = Manifest(
        kind="checkpoint", chunk_bytes=store.chunk_bytes, store_id=store.id, flavor=None, rows=Rows(columns)
    )
    reader = open_manifest(store, manifest, ReadCounter(), label="many")
    monkeypatch.setattr(Texts, "to_list", lambda texts: pytest.fail("a string of each name"))
    return reader


def test_one_of_many_tensors_is_found_without_a_string_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = many(monkeypatch, "odd")

    assert reader["odd"].tolist() == [0.0]
    assert reader.rows("layers.3.weight", slice(0, 1)).tolist() == [0.0]
    assert reader.spec("odd").shape == (1,)
    assert "odd" in reader
    assert "none" not in reader
    with pytest.raises(TensorNotFoundError):
        reader["none"]


USES: list[Callable[[CheckpointReader], object]] = [
    list,
    CheckpointReader.full,
    CheckpointReader.digest,
    CheckpointReader.summary,
    CheckpointReader.specs,
    lambda reader: reader["odd"],
]


@pytest.mark.parametrize("use", USES)
def test_name_of_two_of_many_tensors_is_refused_by_whoever_goes_by_names(
    use: Callable[[CheckpointReader], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = many(monkeypatch, "odd", "odd")
    monkeypatch.undo()

    with pytest.raises(FormatError, match="two rows one name"):
        use(reader)
    assert reader["layers.3.weight"].tolist() == [0.0]
