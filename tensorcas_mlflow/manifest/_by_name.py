"""Lookup of rows by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.manifest._columns import Columns
from tensorcas_mlflow.manifest._row import Row
from tensorcas_mlflow.manifest._specs import Specs

_MAX_SEARCHES = 16
"""Number of names searched for in place; beyond it, building a table of all names is faster."""


class Numbers:
    """Positions of rows by name.

    Every method except a lookup of a few names raises `FormatError` if two rows have one name.
    """

    def __init__(self, specs: Specs, *, allows_nameless: bool = False) -> None:
        """Index rows by name.

        Args:
            specs: The rows.
            allows_nameless: Whether any number of rows may have the empty name; a lookup returns the last of them.
        """
        self._specs = specs
        self._allows_nameless = allows_nameless
        self._n_searches = 0

    def number(self, name: str) -> int:
        """Return the position of a row; raise KeyError if no row has the name."""
        if "numbers" in self.__dict__ or self._n_searches >= _MAX_SEARCHES:
            return self.numbers[name]
        self._n_searches += 1
        found = self._specs.find(name)
        if len(found) > 1 and not (name == "" and self._allows_nameless):
            raise FormatError("a manifest must not give two rows one name")
        if len(found) == 0:
            raise KeyError(name)
        return int(found[-1])

    @Lazy
    def numbers(self) -> dict[str, int]:
        """Return the positions of all rows by name."""
        names = self._specs.names.to_pylist()
        numbers = dict(zip(names, range(len(names)), strict=True))
        n_nameless = names.count("") if self._allows_nameless else 0
        if len(numbers) - min(n_nameless, 1) != len(names) - n_nameless:
            raise FormatError("a manifest must not give two rows one name")
        return numbers


class ByName(Numbers, Mapping[str, Row]):
    """The rows of a manifest by name, each built on access."""

    def __init__(self, columns: Columns, *, allows_nameless: bool) -> None:
        """Index the rows of columns; see `Numbers`."""
        super().__init__(columns, allows_nameless=allows_nameless)
        self._columns = columns

    def __getitem__(self, name: str) -> Row:
        return self._columns.row(self.number(name))

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.number(name) >= 0
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)
