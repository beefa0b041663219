"""The tensors of a file whose parts are files of their own."""

from __future__ import annotations

from collections.abc import Callable

from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource


class Gathering:
    """A listing under way."""

    def __init__(self, source: ByteSource) -> None:
        """Begin without tensors.

        Args:
            source: The file.
        """
        self.places = Places()
        self._sources = [source]

    def add(self, listing: Listing, named: Callable[[str], str] = str) -> None:
        """Add the tensors of a part, and what is left out of it.

        Args:
            listing: The part; its places lie in the file.
            named: Says what a tensor of the part is called here. A name that is taken is given a number.

        Raises:
            FormatError: No tensor can be called so.
        """
        is_alone = len(listing.sources) == 1
        first = 0 if is_alone else len(self._sources)
        for name, place in listing.places.items():
            self.places.put(self.places.unused(named(name)), place, first)
        for name, kind in listing.left_out.items():
            self.leave_out(named(name), kind)
        if not is_alone:
            self._sources += listing.sources

    def leave_out(self, name: str, kind: str) -> None:
        """Note what is left out; a name that is taken is given a number."""
        self.places.leave_out(self.places.unused(name), kind)

    def listing(self, format: str) -> Listing:
        """Give what was gathered."""
        return Listing(format=format, sources=self._sources, places=self.places, left_out=self.places.left_out)
