"""JSON of files that nobody vouches for (RFC 8259), read strictly.

What is short is parsed as a whole; of what may be long, one entry at a time is found by a pattern and then parsed, so
that a hostile file never becomes objects many times its size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from tensorcas_mlflow.errors import FormatError

SPACE = rb"[ \t\r\n]*+"
TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+"'

_BETWEEN = re.compile(SPACE + rb"([,}\]])")
_BLANK = re.compile(SPACE)


def strict_json(text: bytes | memoryview) -> Any:
    """Parse JSON.

    Raises:
        FormatError: It is none, or not in UTF-8; a key stands twice in an object; a number is not finite; or it is
            nested deeper than any sane file.
    """
    try:
        return json.loads(bytes(text).decode(), object_pairs_hook=_object, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its JSON cannot be read: {error}") from error


def whole(number: Any) -> int:
    """Check that a value from JSON is a whole number, 0 or more.

    Raises:
        FormatError: It is not: a boolean, a text and 1.0 are none.
    """
    if type(number) is not int or number < 0:
        raise FormatError(f"{str(number)[:80]!r} stands where a size or place is wanted")
    return number


def entries(text: bytes | memoryview, entry: re.Pattern[bytes], brackets: bytes) -> Iterator[re.Match[bytes]]:
    """Find the entries of an object or array that is all of a text.

    Args:
        text: The JSON.
        entry: What an entry is.
        brackets: How the whole begins and ends: ``b"{}"`` or ``b"[]"``.

    Raises:
        FormatError: There is something else than entries.
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
        raise ValueError("a key stands twice in an object")
    return made


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")
