from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tensorcas_mlflow.base.dtypes import MAX_RECORD_BYTES, dtype_name, parse_dtype
from tensorcas_mlflow.errors import FormatError

STORABLE = [
    "bool",
    "int8",
    "uint64",
    "float16",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "int4",
    "uint2",
    ">i4",
    ">f8",
    ">c16",
    "S7",
    "U3",
    ">U3",
    "datetime64[ns]",
    "datetime64[25s]",
    "datetime64[2000000000s]",
    "timedelta64[D]",
    "datetime64",
]


@pytest.mark.parametrize("spelling", STORABLE)
def test_a_dtype_is_read_back_as_itself(spelling: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, spelling, None) or spelling)

    assert parse_dtype(dtype_name(dtype)) == dtype


def test_a_record_type_is_read_back_as_itself() -> None:
    dtype = np.dtype([("left", "<i4"), ("gain", ">f8", (2, 3)), ("at", "datetime64[ns]"), ("name", "S5"), ("b", "?")])

    assert parse_dtype(dtype_name(dtype)) == dtype
    assert dtype_name(dtype) == "{left:int32,gain:>float64[2,3],at:datetime64[ns],name:S5,b:bool}"


def test_one_dtype_has_one_name_whatever_c_calls_it() -> None:
    assert dtype_name(np.dtype(np.longlong)) == dtype_name(np.dtype(np.int64))
    assert dtype_name(np.dtype("<f4")) == "float32"


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(object),
        np.dtype(np.longdouble),
        np.dtype(np.clongdouble),
        np.dtype("V8"),
        np.dtype(">M8[s]"),
        np.dtypes.StringDType(),
        np.dtype(("S", MAX_RECORD_BYTES + 1)),
        np.dtype([("a", "i1"), ("b", "i4")], align=True),
        np.dtype([("a", [("b", "i4")])]),
        np.dtype([("a", [("b", "i4")], (2,))]),
        np.dtype([("a", "i1", (0,))]),
        np.dtype([("a", "O")]),
        np.dtype([("a b{", "i4")]),
        np.dtype([("a", "i1", (MAX_RECORD_BYTES + 1,))]),
        np.dtype([]),
    ],
    ids=str,
)
def test_a_dtype_that_could_not_be_read_back_is_refused(dtype: np.dtype) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        dtype_name(dtype)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "object",
        "O",
        "float",
        "i4",
        "<i4",
        ">int8",
        ">bool",
        ">bfloat16",
        ">datetime64[s]",
        "S0",
        "S999999999",
        "U999999999",
        "datetime64[9999999999s]",
        "datetime64[xx]",
        "V8",
        "{}",
        "{a:int8[0]}",
        "{a:int8",
        "{a:int8}}",
        "{a:int8,a:int8}",
        "{a:{b:int8}}",
        "{a:int8[99999999,99999999]}",
        "{a:object}",
        "float32\x00",
        "float32\n",
        "int8,int8",
        "{" + "a" * 200 + ":int8}",
        "{" + ",".join(f"f{n}:int8" for n in range(2000)) + "}",
    ],
)
def test_a_name_that_no_dtype_has_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        parse_dtype(name)


@given(st.text(alphabet="abcfilnotuxSUM0123456789{}:,[]<>_ \n", max_size=60))
def test_a_hostile_name_is_a_small_dtype_or_a_format_error(name: str) -> None:
    try:
        dtype = parse_dtype(name)
    except FormatError:
        return

    assert 0 < dtype.itemsize <= MAX_RECORD_BYTES
    assert not dtype.hasobject


@pytest.mark.long
@settings(max_examples=100)
@given(
    npst.scalar_dtypes()
    | npst.array_dtypes(max_size=4, allow_subarrays=True)
    | npst.nested_dtypes(max_leaves=4, max_itemsize=64)
)
def test_every_dtype_is_refused_or_read_back_as_itself(dtype: np.dtype) -> None:
    try:
        name = dtype_name(dtype)
    except ValueError:
        return

    assert parse_dtype(name) == dtype
