"""Headers that nobody vouches for: one tensor's entry, checked sizes and dtype names, and strict JSON (RFC 8259).

A short text is parsed as a whole. A long one is searched entry by entry with a pattern, and each entry is parsed alone,
so a hostile file never becomes objects many times its size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from tensorcas_mlflow.base.dtypes import DType, dtype_name, parse_dtype
from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._tape import MIN_TENSOR_BYTES, FilePart, Skeleton, Tensor

JSON_SPACE = rb"[ \t\r\n]*+"
JSON_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+"'

_BETWEEN = re.compile(JSON_SPACE + rb"([,}\]])")
_BLANK = re.compile(JSON_SPACE)

_SAME = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_WORDS = {
    **{name: name for name in _SAME},
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    "bf16": "bfloat16",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "c64": "complex64",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f8_e4m3fnuz": "float8_e4m3fnuz",
    "f8_e5m2fnuz": "float8_e5m2fnuz",
    "f8_e8m0": "float8_e8m0fnu",
}


class HeaderEntry(NamedTuple):
    """A header's entry for one tensor. Its size fits its shape and its dtype, if it has one."""

    name: str
    kind: str
    """The file's own name of the dtype."""
    dtype: str | None
    """A name of `tensorcas_mlflow.base.dtypes`; None if there is none."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    """One past the last byte."""


def check_shape(name: str, shape: Sequence[int], item_bytes: int, n_bytes: int) -> None:
    """Check that a shape is possible and has this size.

    Raises:
        FormatError: It is not, or has not.
    """
    # The sides of an empty tensor may not be impossible either: numpy refuses to make it.
    if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise FormatError(f"tensor {name[:80]!r} has an impossible shape")
    if math.prod(shape) * item_bytes != n_bytes:
        raise FormatError(f"tensor {name[:80]!r} has {n_bytes} bytes, which is not the size of its shape and dtype")
    if not n_bytes and math.prod(filter(None, shape)) * item_bytes > MAX_TENSOR_BYTES:
        raise FormatError(f"tensor {name[:80]!r} has an impossible shape")


@lru_cache(maxsize=64)
def item_bytes(dtype: str) -> int:
    """Return the size of one element."""
    return parse_dtype(dtype).itemsize


def dtype_by_word(word: str) -> str | None:
    """Return the dtype that torch, numpy, safetensors or bhckpt gives this name, in any case; None if there is none."""
    return _WORDS.get(word.lower().removeprefix("torch."))


def name_or_none(dtype: DType) -> str | None:
    """Return the name of a numpy dtype; None if a manifest has none for it."""
    try:
        return dtype_name(dtype)
    except ValueError:
        return None


def sorted_entries(entries: Iterable[HeaderEntry]) -> list[HeaderEntry]:
    """Sort tensors by position.

    Raises:
        FormatError: There are holes between tensors, or two tensors share bytes or a name.
    """
    ordered = sorted(entries, key=itemgetter(4, 5))
    begins = [entry.begin for entry in ordered]
    ends = [0, *(entry.end for entry in ordered)]
    if begins != ends[:-1]:
        entry, end = next((entry, end) for entry, end in zip(ordered, ends, strict=False) if entry.begin != end)
        what = "is a hole before" if entry.begin > end else "are bytes of another tensor in"
        raise FormatError(f"there {what} tensor {entry.name[:80]!r}")
    if len({entry.name for entry in ordered}) < len(ordered):
        raise FormatError("two tensors have one name")
    return ordered


def tensor_or_skeleton(
    n_bytes: int, name: str, dtype: str | None, shape: tuple[int, ...] | None
) -> Iterator[Skeleton | Tensor]:
    """Announce a tensor; a small one as skeleton, an empty one not at all."""
    if n_bytes >= MIN_TENSOR_BYTES:
        yield Tensor(n_bytes=n_bytes, name=name, dtype=dtype, shape=shape if dtype else None)
    elif n_bytes:
        yield Skeleton(n_bytes=n_bytes)


def parts_of_entries(header_bytes: int, entries: Iterable[HeaderEntry]) -> Iterator[FilePart]:
    """Announce a header and the tensors that follow it without gaps."""
    yield Skeleton(n_bytes=header_bytes)
    for entry in entries:
        yield from tensor_or_skeleton(entry.end - entry.begin, entry.name, entry.dtype, entry.shape)


def strict_json(text: bytes | memoryview) -> Any:
    """Parse JSON.

    Raises:
        FormatError: The text is not JSON or not UTF-8, an object repeats a key, a number is not finite, or values nest
            too deep.
    """
    try:
        return json.loads(bytes(text).decode(), object_pairs_hook=_object, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its JSON cannot be read: {error}") from error


def whole_number(number: Any) -> int:
    """Check that a JSON value is a whole number from 0 on.

    Raises:
        FormatError: It is not; a boolean, a text and 1.0 are not.
    """
    if type(number) is not int or number < 0:
        raise FormatError(f"{str(number)[:80]!r} stands where a size or place is wanted")
    return number


def json_entries(text: bytes | memoryview, entry: re.Pattern[bytes], brackets: bytes) -> Iterator[re.Match[bytes]]:
    """Find the entries of an object or array that is the whole text.

    Args:
        text: The JSON.
        entry: Pattern of an entry.
        brackets: First and last byte of the whole: ``b"{}"`` or ``b"[]"``.

    Raises:
        FormatError: The text holds something other than entries.
    """
    begin = _BLANK.match(text)
    at = begin.end() if begin else 0
    if bytes(text[at : at + 1]) != brackets[:1]:
        raise FormatError(f"its JSON does not begin with {brackets[:1].decode()!r}")
    at += 1
    empty = _BETWEEN.match(text, at)
    if empty and empty[1] == brackets[1:]:
        at = empty.end()
    else:
        while True:
            match = entry.match(text, at)
            if not match:
                raise FormatError(f"its JSON is unsound at byte {at}")
            yield match
            between = _BETWEEN.match(text, match.end())
            if not between or between[1] not in (b",", brackets[1:]):
                raise FormatError(f"its JSON is unsound at byte {match.end()}")
            at = between.end()
            if between[1] != b",":
                break
    if not _BLANK.fullmatch(text, at):
        raise FormatError(f"its JSON goes on after its end, at byte {at}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"JSON has no number {word}")
