"""Faults between a client and an object store, and rules that choose the requests they happen to."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.backends.objects.requests_seen import Kind


@dataclass(frozen=True, slots=True)
class Answer:
    """The request is read and never forwarded; an error comes back."""

    status: int
    code: str
    """S3's name of the error."""
    retry_after_s: int | None = None


SLOW_DOWN = Answer(503, "SlowDown")
TOO_MANY_REQUESTS = Answer(429, "TooManyRequests")
INTERNAL_ERROR = Answer(500, "InternalError")
EXPIRED_TOKEN = Answer(400, "ExpiredToken")  # what S3 answers; others say 403
EXPIRED_TOKEN_403 = Answer(403, "ExpiredToken")


@dataclass(frozen=True, slots=True)
class ResetBefore:
    """The connection is reset when the request's head has come; nothing is forwarded."""


@dataclass(frozen=True, slots=True)
class LostAnswer:
    """The request is forwarded and fully answered; then the connection is reset, before the client gets any of it."""


@dataclass(frozen=True, slots=True)
class CutUpload:
    """Part of the request's body is forwarded; then both connections are reset."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class CutBody:
    """The answer's head and a part of its body come; then the connection ends."""

    after_bytes: int
    reset: bool = False
    """True if the connection ends with a reset, not with its usual end."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The answer is withheld for a time, or until the client has gone; the server has carried the request out."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Late:
    """The request is forwarded only after a time, even if the client has given up and asked again since."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Twice:
    """The request is served as ever, and kept: it is carried out once more when the test says so (`Proxy.repeat`)."""


Fault = Answer | ResetBefore | LostAnswer | CutUpload | CutBody | Stall | Late | Twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault, and the requests it happens to."""

    fault: Fault
    kinds: tuple[Kind, ...] = ()
    """Kinds of requests that match; all, if none is named."""
    path: str = ""
    """A regular expression that is searched for in ``/bucket/key``."""
    header: str = ""
    """A header that the request must have, in lower case."""
    nth: int = 1
    """Number of the first matching request that meets the fault, counted from 1."""
    times: int | None = 1
    """Number of matching requests that may meet it from there on; None for no end."""
    probability: float = 1.0
    seed: int = 0

    def matches(self, kind: Kind, path: str, headers: Sequence[str]) -> bool:
        """Tell whether a request is one that this rule counts."""
        return (
            (not self.kinds or kind in self.kinds)
            and re.search(self.path, path) is not None
            and (not self.header or self.header in headers)
        )


class Rulebook:
    """Rules, and how far each has counted. Not for several threads at once."""

    def __init__(self) -> None:
        self._rules: list[tuple[Rule, list[int], random.Random]] = []

    def add(self, rule: Rule) -> None:
        self._rules.append((rule, [0], random.Random(rule.seed)))

    def clear(self) -> None:
        self._rules.clear()

    def fault_for(self, kind: Kind, path: str, headers: Sequence[str]) -> Fault | None:
        """Count one request, and say what happens to it: the first rule that strikes wins, and all that match count."""
        found: Fault | None = None
        for rule, seen, chance in self._rules:
            if not rule.matches(kind, path, headers):
                continue
            seen[0] += 1
            due = seen[0] >= rule.nth and (rule.times is None or seen[0] < rule.nth + rule.times)
            # Drawn for every match that is due, so that a seed means the same requests whatever other rules say.
            if due and chance.random() < rule.probability and found is None:
                found = rule.fault
        return found
