from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tensorcas_mlflow.base.ubjson import MAX_DEPTH, narrowest, parse, write

numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.binary(min_size=4, max_size=4).map(lambda b: np.frombuffer(b, ">f4")[0]),
    st.binary(min_size=8, max_size=8).map(lambda b: np.frombuffer(b, ">f8")[0]),
    st.integers(0, 255).map(np.uint8),
    st.integers(-(2**15), 2**15 - 1).map(np.int16),
)
arrays = st.sampled_from(["i1", "u1", ">i2", "<i4", ">i8", ">f4", "<f8"]).flatmap(
    lambda dtype: npst.arrays(dtype, st.integers(0, 20))
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts, arrays),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


@pytest.fixture(scope="module")
def model() -> bytes:
    import xgboost

    rng = np.random.default_rng(0)
    data = xgboost.DMatrix(rng.normal(size=(60, 3)), rng.integers(0, 2, 60), feature_names=["a", "b", "ü"])
    return bytes(xgboost.train({"max_depth": 3}, data, 3).save_raw("ubj"))


def test_a_model_is_written_back_to_the_byte(model: bytes) -> None:
    assert write(parse(model)) == model


def test_the_ubjson_of_a_model_equals_its_json(model: bytes) -> None:
    import json

    import xgboost

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(member) for key, member in value.items()}
        if isinstance(value, list | np.ndarray):
            return [plain(item) for item in value]
        return value

    read = plain(parse(model))
    said = json.loads(xgboost.Booster(model_file=bytearray(model)).save_raw("json").decode())

    tree, said_tree = (m["learner"]["gradient_booster"]["model"]["trees"][0] for m in (read, said))
    assert read["learner"]["feature_names"] == ["a", "b", "ü"]
    assert tree["left_children"] == said_tree["left_children"]
    assert tree["split_conditions"] == pytest.approx(said_tree["split_conditions"])
    assert read["version"] == said["version"]


@pytest.mark.long
@given(documents)
@settings(max_examples=200)
def test_any_document_is_read_back_and_written_to_the_same_bytes(document: Any) -> None:
    written = write(document)

    assert write(parse(written)) == written


@pytest.mark.long
@given(st.binary(max_size=60) | st.text("{}[$#LliUdDSZTF\0\x01\x02", max_size=60).map(str.encode))
@settings(max_examples=500)
def test_any_bytes_are_refused_or_round_trip(data: bytes) -> None:
    try:
        document = parse(data)
    except ValueError:
        return

    assert write(document) == data


@pytest.mark.long
@given(st.data())
@settings(max_examples=300)
def test_a_damaged_model_is_refused_or_written_back(model: bytes, data: st.DataObject) -> None:
    damaged = bytearray(model)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        cut = data.draw(st.integers(0, 9))
        damaged[at : at + cut] = data.draw(st.binary(max_size=9))
    try:
        document = parse(bytes(damaged))
    except ValueError:
        return

    assert write(document) == bytes(damaged)


@pytest.mark.parametrize(
    ("value", "marker"),
    [
        (126, "i"),
        (127, "I"),
        (-127, "i"),
        (-128, "I"),
        (32767, "l"),
        (-(2**31), "L"),
        (2**31 - 1, "L"),
        (-(2**63), "L"),
    ],
)
def test_an_integer_takes_the_type_that_xgboost_gives_it(value: int, marker: str) -> None:
    assert narrowest(value) == marker
    assert parse(write(value)) == value


def test_an_integer_of_another_width_keeps_it() -> None:
    read = parse(b"l\x00\x00\x00\x05")

    assert isinstance(read, np.int32)
    assert write(read) == b"l\x00\x00\x00\x05"


def test_the_bits_of_a_nan_survive() -> None:
    signalling = b"d\x7f\xa0\x00\x01"

    assert write(parse(signalling)) == signalling


def test_text_that_is_not_utf8_survives() -> None:
    text = b"SL" + (2).to_bytes(8, "big") + b"\xff\xfe"

    assert write(parse(text)) == text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"X",
        b"ZZ",
        b"[Z]",
        b"[$d#L" + (2**60).to_bytes(8, "big"),
        b"[$L#L" + (9).to_bytes(8, "big") + bytes(70),
        b"[#L" + (2**62).to_bytes(8, "big"),
        b"[#L" + (-1).to_bytes(8, "big", signed=True),
        b"SL" + (-1).to_bytes(8, "big", signed=True),
        b"{" + 2 * (b"L" + (1).to_bytes(8, "big") + b"kZ") + b"}",
    ],
    ids=["empty", "open", "unknown", "trailing", "end mark", "huge", "short", "long list", "negative", "text", "twice"],
)
def test_other_dialects_of_ubjson_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(data)


def test_nesting_is_bounded_both_ways() -> None:
    deep: Any = None
    for _ in range(MAX_DEPTH):
        deep = [deep]

    assert parse(write(deep)) == deep
    with pytest.raises(ValueError, match="deeper"):
        write([deep])
    with pytest.raises(ValueError, match="deeper"):
        parse(b"[#L" + (1).to_bytes(8, "big") + write(deep))


@pytest.mark.parametrize("value", [2**63, 1.5, (1,), b"x", np.zeros((2, 2)), np.zeros(2, "f2"), np.bool_(True)])
def test_a_value_without_a_type_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        write([value])


def test_a_claimed_length_reserves_no_memory() -> None:
    tracemalloc.start()
    for marker in (b"[$d#L", b"[#L", b"SL", b"{L"):
        with pytest.raises(ValueError, match="claimed"):
            parse(marker + (2**40).to_bytes(8, "big") + bytes(1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2**20
