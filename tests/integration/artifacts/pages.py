"""Pages of checkpoints as tests read them."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

from tensorcas_mlflow.base.text import size_text


class Page(HTMLParser):
    """A page as a browser reads it: its texts, its elements, the cells of its tables, and the data of its script."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.facts: dict[str, Any] = {}
        self.bits = b""
        self._is_in_cell = False
        self.feed(data.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        given = dict(attrs)
        if tag == "data":
            line, _, self.bits = zlib.decompress(b64decode(given["value"] or "")).partition(b"\n")
            self.facts = json.loads(line)
        if tag == "a":
            self.links.append(given["data-to"] or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._is_in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._is_in_cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._is_in_cell:
            self.rows[-1][-1] += data.strip()

    @property
    def tensors(self) -> dict[str, list[str]]:
        """The dtype, shape, size and state of each tensor."""
        facts = self.facts
        return {
            name: [facts["dtypes"][dtype], facts["shapes"][shape], size_text(n_bytes), facts["states"][state][1]]
            for name, dtype, shape, n_bytes, state in zip(
                *(facts[key] for key in ("names", "dtype", "shape", "bytes", "state")), strict=True
            )
        }

    def value(self, name: str) -> list[float | None] | None:
        """Return how much a tensor changed: relative norm, share of equal elements, largest change."""
        found: list[float | None] | None = (self.facts["values"] or {}).get(str(self.facts["names"].index(name)))
        return found

    def before(self, name: str) -> str:
        """Return the page's statement of a tensor's origin."""
        return self.tensors[name][-1]

    @property
    def text(self) -> str:
        return " ".join(text.strip() for text in self.texts)
