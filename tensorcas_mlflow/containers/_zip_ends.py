"""Where an entry of a zip archive ends that was written to a stream: at its descriptor.

A descriptor (APPNOTE.TXT, section 4.3.9) is taken for the entry's own if the size in it is its distance from the
entry's first byte, and an entry or the directory follows. Archives within archives have descriptors too, but at other
distances.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

from tensorcas_mlflow.containers._parts import Part
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.errors import FormatError

LOCAL = b"PK\x03\x04"
CENTRAL = b"PK\x01\x02"
DESCRIPTOR = b"PK\x07\x08"

_SIZES = struct.Struct("<8xI4x")
_SIZES_64 = struct.Struct("<8xQ8x")
_MAX_DESCRIPTOR_BYTES = _SIZES_64.size + len(LOCAL)
_CANDIDATE = re.compile(rb"PK\x07\x08(?=.{12}PK(?:\x01\x02|\x03\x04)|.{20}PK(?:\x01\x02|\x03\x04))", re.DOTALL)

_FIRST_LOOK_BYTES = 4 << 10
_WINDOW_BYTES = 1 << 20
_MAX_FALSE = 100_000


def descriptor_bytes(tape: Tape, entry_bytes: int) -> int:
    """Tell how long the descriptor is that the tape is at.

    Raises:
        FormatError: There is none, or it is that of an entry of another size.
    """
    size = _fits(tape.peek(_MAX_DESCRIPTOR_BYTES), 0, entry_bytes)
    if not size:
        raise FormatError(f"a zip entry of {entry_bytes} bytes without its descriptor")
    return size


class Ends:
    """Finds the ends of one archive's entries, looking at every byte about once."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._n_false = 0

    def look_ahead(self, max_bytes: int = _WINDOW_BYTES) -> int | None:
        """Get the size of the entry that the tape is at the beginning of; None if it is larger than so many bytes."""
        begun, looked = 0, min(_FIRST_LOOK_BYTES, max_bytes)
        while begun < max_bytes:
            window = self._tape.peek(looked + _MAX_DESCRIPTOR_BYTES)
            end = self._find(window, begun, looked, passed_bytes=0)
            if end is not None or len(window) < looked:
                return end
            begun, looked = looked, min(4 * looked, max_bytes)
        return None

    def stretch(self, n_bytes: int | None, first: Callable[..., Part], more: Callable[..., Part]) -> Iterator[Part]:
        """Announce an entry of one kind.

        Args:
            n_bytes: Its size; None if only its descriptor tells.
            first: Makes its first part.
            more: Makes the parts after the first, in an entry whose end is still to come.
        """
        if n_bytes is not None:
            if n_bytes:
                yield first(n_bytes=n_bytes)
            return
        passed_bytes, end = 0, None
        while end is None and not self._tape.is_at_end():
            window = self._tape.peek(_WINDOW_BYTES + _MAX_DESCRIPTOR_BYTES)
            end = self._find(window, 0, _WINDOW_BYTES, passed_bytes=passed_bytes)
            n_next = _WINDOW_BYTES if end is None else end
            if n_next:
                yield (more if passed_bytes else first)(n_bytes=n_next)
            passed_bytes += n_next

    def _find(self, window: memoryview, start: int, stop: int, *, passed_bytes: int) -> int | None:
        """Find where between two places of a window the entry ends, so many bytes of which have passed."""
        for match in _CANDIDATE.finditer(window, start):
            at = match.start()
            if at >= stop:
                break
            if _fits(window, at, passed_bytes + at):
                return at
            self._n_false += 1
            if self._n_false > _MAX_FALSE:
                raise FormatError(f"a zip archive with more than {_MAX_FALSE} descriptors that are none")
        return None


def _fits(window: memoryview, at: int, entry_bytes: int) -> int:
    """Get the size of a descriptor of an entry of this size, or 0 if it is none."""
    data = bytes(window[at : at + _MAX_DESCRIPTOR_BYTES])
    if data[:4] == DESCRIPTOR:
        # A small entry has the long form too, if it lies behind the fourth gigabyte.
        for sizes in (_SIZES_64, _SIZES):
            if data[sizes.size : sizes.size + 4] in (LOCAL, CENTRAL) and sizes.unpack_from(data)[0] == entry_bytes:
                return sizes.size
    return 0
