"""Requests of an S3 client as values: the kinds a bill counts, one exchange, all traffic of a period."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qsl


class Kind(StrEnum):
    """Kind of a request, as S3 bills it."""

    PUT = "PUT"
    COPY = "COPY"
    GET = "GET"
    HEAD = "HEAD"
    LIST = "LIST"
    DELETE = "DELETE"
    """One key, or many at once; the latter is a POST."""
    CREATE = "CREATE"
    """Begin a multipart upload."""
    PART = "PART"
    COMPLETE = "COMPLETE"
    ABORT = "ABORT"
    OTHER = "OTHER"
    """A request about the bucket itself, such as its creation."""


def kind_of(method: str, path: str, query: str, *, copies: bool = False) -> Kind:
    """Tell what a request does.

    Args:
        method: GET, PUT and so on.
        path: ``/bucket/key``: path-style, as all clients address a server on loopback.
        query: What follows the question mark.
        copies: Whether the request names a source to copy from.
    """
    names = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    of_key = path.strip("/").count("/") > 0 or re.match(r"/[^/]+/.", path) is not None
    upload = "uploadId" in names
    if method == "POST":
        many = (("uploads", Kind.CREATE), ("uploadId", Kind.COMPLETE), ("delete", Kind.DELETE))
        return next((kind for name, kind in many if name in names), Kind.OTHER)
    if method == "GET" and (upload or "uploads" in names or "versions" in names):
        return Kind.LIST
    if not of_key:
        other = names & {"location", "versioning", "policy", "acl", "lifecycle", "tagging"}
        return Kind.LIST if method == "GET" and path.strip("/") and not other else Kind.OTHER
    if method == "PUT":
        return Kind.PART if upload else Kind.COPY if copies else Kind.PUT
    if method == "DELETE":
        return Kind.ABORT if upload else Kind.DELETE
    return Kind(method) if method in ("GET", "HEAD") else Kind.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and what came of it."""

    method: str
    kind: Kind
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    """Those that change what the request means, such as ``range`` and ``if-match``; lower-case names."""
    status: int | None
    """Status of the answer; None while there is none."""
    up_bytes: int
    """Size of the part of the request's body that arrived."""
    down_bytes: int
    """Size of the part of the answer's body that was passed on."""
    fault: str | None
    """Name of the fault injected into the exchange."""
    start_s: float
    """Arrival of the request, on the machine's monotonic clock."""
    stop_s: float | None
    """Time at which the last byte of the answer was passed on; None until then."""

    def __str__(self) -> str:
        what = self.path + (f"?{self.query}" if self.query else "")
        headers = " ".join(f"{name}={value}" for name, value in self.headers)
        end = f"-> {self.status or 'no answer'} up={self.up_bytes} down={self.down_bytes}"
        return " ".join(filter(None, (f"{self.kind:8} {self.method} {what}", headers, end, self.fault)))


@dataclass(frozen=True, slots=True)
class Traffic:
    """All exchanges of a while, in the order in which the requests came."""

    exchanges: tuple[Exchange, ...]

    def __len__(self) -> int:
        return len(self.exchanges)

    def __str__(self) -> str:
        return "\n".join(map(str, self.exchanges))

    @property
    def counts(self) -> Counter[tuple[str, Kind]]:
        """Number of requests by method and kind."""
        return Counter((it.method, it.kind) for it in self.exchanges)

    @property
    def up_bytes(self) -> int:
        return sum(it.up_bytes for it in self.exchanges)

    @property
    def down_bytes(self) -> int:
        return sum(it.down_bytes for it in self.exchanges)

    def of(self, *kinds: Kind) -> Traffic:
        """Look at some kinds only."""
        return Traffic(tuple(it for it in self.exchanges if it.kind in kinds))

    @property
    def n_billed(self) -> int:
        """Number of requests, where all of one multipart upload count as one."""
        return len(self) - sum(it.kind in (Kind.PART, Kind.COMPLETE, Kind.ABORT) for it in self.exchanges)

    @property
    def most_at_once(self) -> int:
        """Largest number of requests under way at the same time."""
        return _most_at_once((it.start_s, it.stop_s) for it in self.exchanges)


def _most_at_once(spans: Iterable[tuple[float, float | None]]) -> int:
    steps = [step for start, stop in spans for step in ((start, 1), (float("inf") if stop is None else stop, -1))]
    now = most = 0
    for _, change in sorted(steps):
        now += change
        most = max(most, now)
    return most
