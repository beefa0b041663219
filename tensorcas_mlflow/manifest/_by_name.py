"""Finding rows by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.manifest._columns import Columns
from tensorcas_mlflow.manifest._row import Row
from tensorcas_mlflow.manifest._specs import Specs

_MAX_SEARCHES = 16
"""So many names are searched for in place before a table of all of them is made, which takes longer than that."""


class Numbers:
    """The positions of rows by their names.

    Every method raises `FormatError` if it meets two rows of one name. All but the look-up of a few names meet them.
    """

    def __init__(self, specs: Specs, *, allows_nameless: bool = False) -> None:
        """Find rows.

        Args:
            specs: Describes them.
            allows_nameless: Whether any number of rows may have the empty name; the last of them is found by it.
        """
        self._specs = specs
        self._allows_nameless = allows_nameless
        self._n_searches = 0

    def number(self, name: str) -> int:
        """Find the position of a row among all; raises KeyError if there is none of that name."""
        if "numbers" in self.__dict__ or self._n_searches >= _MAX_SEARCHES:
            return self.numbers[name]
        self._n_searches += 1
        found = self._specs.find(name)
        if len(found) > 1 and not (name == "" and self._allows_nameless):
            raise FormatError("a manifest must not name two rows alike")
        if len(found) == 0:
            raise KeyError(name)
        return int(found[-1])

    @Lazy
    def numbers(self) -> dict[str, int]:
        """The positions of all rows by name."""
        names = self._specs.names.to_pylist()
        numbers = dict(zip(names, range(len(names)), strict=True))
        n_nameless = names.count("") if self._allows_nameless else 0
        if len(numbers) - min(n_nameless, 1) != len(names) - n_nameless:
            raise FormatError("a manifest must not name two rows alike")
        return numbers


class ByName(Numbers, Mapping[str, Row]):
    """The rows of a manifest by name, each made when it is asked for."""

    def __init__(self, columns: Columns, *, allows_nameless: bool) -> None:
        """Find rows in columns; see `Numbers`."""
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
