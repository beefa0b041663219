"""Rounds of maintenance: their records in the store, and the lease of the server that runs a scheduled one.

Any number of servers may share one schedule (``docs/design/caches.md``, Maintenance). The lease saves work and protects
nothing: two collections, verifications or optimizations at once are safe.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tensorcas_mlflow.backends import Backend, map_requests
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, CorruptError, NewerFormatError, without_secrets
from tensorcas_mlflow.layout import list_blobs, load_record, record_bytes, writer_facts, writer_is_dead

Outcome = Literal["done", "problems", "failed", "died"]

PREFIX = "maintenance"
LEASE = f"{PREFIX}/@lease"
LEASE_S = 600.0
"""A lease that has not been renewed for this long is free."""
MOST_ROUNDS = 40
"""Records that are kept, besides the last one of each action."""
_TAG_AT, _TAG_CHARS = len(PREFIX) + 1 + 12, 2
"""Place of the action's tag in a key, behind the time."""
_MAX_BYTES = 64 * 1024
_MOST_CHARS = 4000
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Record of one verification, repair, collection or optimization."""

    action: str
    began_s: float
    """Unix time."""
    ended_s: float
    """Unix time; of a round that died, when this was noticed."""
    outcome: Outcome
    """``problems``: it ended, and a verification found damage or a repair left some. ``died``: its process vanished."""
    summary: str
    """The report in words, or the error; at most 4000 characters."""
    host: str


def read_rounds(backend: Backend) -> list[Round]:
    """Read the records of the last rounds, the newest first. Unreadable records are left out."""
    keys = _kept(info.key for info in list_blobs(backend, PREFIX) if info.key != LEASE)

    def read(key: str) -> Round | None:
        try:
            return _round_of(load_record(key, backend.get(key, max_bytes=_MAX_BYTES)))
        except (BlobNotFoundError, CorruptError, NewerFormatError):
            return None

    return [each for each in map_requests(backend, read, keys) if each is not None]


def _kept(keys: Iterable[str]) -> list[str]:
    """Return the keys of the newest records, and of the newest one of each action, the newest first."""
    newest = sorted(keys, reverse=True)
    first_of = {key[_TAG_AT : _TAG_AT + _TAG_CHARS]: key for key in reversed(newest)}
    others = set(first_of.values())
    return [key for number, key in enumerate(newest) if number < MOST_ROUNDS or key in others]


def record_round(backend: Backend, done: Round) -> None:
    """Record a round, and delete old records: those beyond `MOST_ROUNDS`, except the last one of each action."""
    facts = asdict(done) | {"summary": without_secrets(done.summary)[:_MOST_CHARS], "format": _VERSION}
    # Names sort by time, so that a reader finds the newest without reading all.
    tag = digest(done.action.encode()).hex()[:_TAG_CHARS]
    name = f"{int(done.began_s * 1000):012x}"[-12:] + tag + secrets.token_hex(9)
    backend.put_new(f"{PREFIX}/{name}", [record_bytes(facts)])
    keys = [info.key for info in list_blobs(backend, PREFIX) if info.key != LEASE]
    for key in sorted(set(keys) - set(_kept(keys))):
        backend.delete(key)


def round_since(began_s: float, action: str, outcome: Outcome, summary: str) -> Round:
    """Describe a round of this process that ends now; ``began_s`` is in Unix time."""
    host = str(writer_facts()["host"])
    return Round(action=action, began_s=began_s, ended_s=time.time(), outcome=outcome, summary=summary, host=host)


class Lease:
    """The right to run one round. It names its holder."""

    def __init__(self, backend: Backend, action: str, began_s: float) -> None:
        self._backend = backend
        self._id = secrets.token_hex(8)
        self.action = action
        self.began_s = began_s

    @classmethod
    def take(cls, backend: Backend, action: str) -> Lease | None:
        """Take the lease; return None while somebody else holds it.

        The round of a holder that is gone is recorded as one that died.
        """
        info = backend.stat(LEASE)
        if info is not None:
            held = _read_lease(backend)
            is_dead = held is not None and writer_is_dead(held)
            if not is_dead and time.time() - info.modified_s < LEASE_S:
                return None
            if not backend.withdraw(LEASE, info.token):
                return None
            if held is not None:
                record_round(backend, _died(held))
        lease = cls(backend, action, time.time())
        return lease if lease._put() else None

    def renew(self) -> bool:
        """Keep the lease for `LEASE_S` more; return False if somebody else has it by now."""
        return self.give_back() and self._put()

    def end(self, outcome: Outcome, summary: str) -> Round:
        """Record the round, and give the lease back."""
        done = round_since(self.began_s, self.action, outcome, summary)
        record_round(self._backend, done)
        self.give_back()
        return done

    def give_back(self) -> bool:
        """Give the lease back without a record; return False if it was no longer held."""
        info, held = self._backend.stat(LEASE), _read_lease(self._backend)
        # The token alone does not tell: a new file may have the number and the time of a deleted one.
        if info is None or held is None or held.get("id") != self._id:
            return False
        return self._backend.withdraw(LEASE, info.token)

    def _put(self) -> bool:
        facts = {"action": self.action, "began_s": self.began_s, "id": self._id, "format": _VERSION}
        try:
            self._backend.put_new(LEASE, [record_bytes(facts | writer_facts())])
        except BlobExistsError:
            return False
        return True


def running_round(backend: Backend) -> Round | None:
    """Return the round under way, with an empty summary and the present as its end; None if there is none."""
    info = backend.stat(LEASE)
    held = None if info is None else _read_lease(backend)
    if info is None or held is None or writer_is_dead(held) or time.time() - info.modified_s >= LEASE_S:
        return None
    return _held_round(held, outcome="done", summary="")


def utc_text(unix_s: float) -> str:
    """Write a Unix time for people, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M")


def _read_lease(backend: Backend) -> dict[str, Any] | None:
    with contextlib.suppress(BlobNotFoundError, CorruptError, NewerFormatError):
        return load_record(LEASE, backend.get(LEASE, max_bytes=_MAX_BYTES))
    return None


def _died(held: Mapping[str, Any]) -> Round:
    return _held_round(held, outcome="died", summary="the process that ran it is gone")


def _held_round(held: Mapping[str, Any], *, outcome: Outcome, summary: str) -> Round:
    began = held.get("began_s")
    return Round(
        action=str(held.get("action", ""))[:40],
        began_s=float(began) if isinstance(began, int | float) else time.time(),
        ended_s=time.time(),
        outcome=outcome,
        summary=summary,
        host=str(held.get("host", ""))[:200],
    )


def _round_of(record: Mapping[str, Any]) -> Round | None:
    outcome, began, ended = record.get("outcome"), record.get("began_s"), record.get("ended_s")
    if outcome not in ("done", "problems", "failed", "died"):
        return None
    if not (isinstance(began, int | float) and isinstance(ended, int | float) and 0 <= began <= ended < 1 << 40):
        return None
    return Round(
        action=str(record.get("action", ""))[:40],
        began_s=float(began),
        ended_s=float(ended),
        outcome=outcome,
        summary=str(record.get("summary", ""))[:_MOST_CHARS],
        host=str(record.get("host", ""))[:200],
    )
