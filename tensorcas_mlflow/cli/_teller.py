"""Progress, told on standard error."""

from __future__ import annotations

from typing import TextIO

_LINE_BYTES = 256 << 20
"""Where nobody sits at a terminal, a line for so much read."""


class Teller:
    """Tells of progress: at a terminal in one line, else by a line now and then."""

    def __init__(self, stream: TextIO, *, is_quiet: bool) -> None:
        self._stream = stream
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        self._width = 0
        self._told_bytes = 0

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._stream.write("\n")
            self._stream.flush()

    def tell(self, line: str, read_bytes: int, *, is_last: bool = False) -> None:
        """Show how far it has come.

        Args:
            line: In words.
            read_bytes: What has been read so far.
            is_last: Whether this is to be told in any case.
        """
        if self._is_quiet or not (self._is_terminal or is_last or read_bytes >= self._told_bytes + _LINE_BYTES):
            return
        self._told_bytes = read_bytes
        if self._is_terminal:
            self._stream.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
