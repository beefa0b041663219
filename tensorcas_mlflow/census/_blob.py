"""A census as bytes (``docs/format.md``, Census)."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from tensorcas_mlflow.census._facts import NO_BASE, Facts, RefSeen
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.errors import CorruptError, NewerFormatError

VERSION = 3
MAGIC = b"\x89TCCN\r\n\x01"
MAX_BYTES = 2 << 30
"""No larger census is written or read."""
MAX_HEAD_BYTES = 64 << 20
_HEADER = struct.Struct("<8sQ16s32s")
_COLUMNS = (
    ("manifest_bytes", "<u8", "manifests"),
    ("sums", "<u8", "manifests"),
    ("pack_bytes", "<u8", "packs"),
    ("pack_entries", "<u4", "packs"),
    ("span_chunk", "<u4", "n_spans"),
    ("span_start", "<u4", "n_spans"),
    ("span_stop", "<u4", "n_spans"),
    ("entry_chunk", "<u4", "n_entries"),
    ("entry_bytes", "<u4", "n_entries"),
    ("entry_base", "<u4", "n_entries"),
    ("entry_base_pack", "<u4", "n_entries"),
    ("entry_effort", "u1", "n_entries"),
)
"""What follows the digests: name, type, and what there is one of it for."""
_N_COLUMNS = {1: 9, 2: 11}
"""How many of them earlier versions had."""
_MANIFEST_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{8})?")
_PACK_NAME = re.compile(r"[0-9a-f]{32}")


def census_bytes(facts: Facts) -> list[bytes]:
    """Write a census, in pieces."""
    head = json.dumps(
        {
            "format": VERSION,
            "manifests": facts.manifests,
            "packs": facts.packs,
            "base_packs": facts.base_packs,
            "refs": [[*seen, name] for seen, name in facts.refs.items()],
            "n_digests": len(facts.digests),
            "n_spans": len(facts.span_chunk),
            "n_entries": len(facts.entry_chunk),
        },
        sort_keys=True,
    ).encode()
    given: dict[str, Any] = {name: getattr(facts, name) for name, _, _ in _COLUMNS if name != "pack_entries"}
    given["pack_entries"] = np.bincount(facts.entry_pack, minlength=len(facts.packs))
    columns = b"".join(given[name].astype(dtype).tobytes() for name, dtype, _ in _COLUMNS)
    body = b"".join([head, facts.digests.tobytes(), columns])
    begin = _HEADER.pack(MAGIC, len(head), b"", b"")[:32]
    return [begin, digest(body + begin), body]


def read_census(key: str, blob: bytes) -> Facts:
    """Read a census.

    Raises:
        CorruptError: It is none, or is damaged, or says what cannot be.
        NewerFormatError: A later release wrote it.
    """
    if len(blob) < _HEADER.size or not blob.startswith(MAGIC):
        raise CorruptError(key, "it does not begin as a census does")
    _, head_bytes, _, wanted = _HEADER.unpack_from(blob)
    body = memoryview(blob)[_HEADER.size :]
    if digest(b"".join([body, blob[:32]])) != wanted:
        raise CorruptError(key, "it does not hash to the digest in its header")
    if head_bytes > min(len(body), MAX_HEAD_BYTES):
        raise CorruptError(key, "its header says impossible sizes")
    try:
        head = json.loads(bytes(body[:head_bytes]))
        version = head["format"]
        if type(version) is not int:
            raise CorruptError(key, "it says no version")
        if version > VERSION:
            raise NewerFormatError(f"{key!r}", version, VERSION)
        manifests, packs = _names(head["manifests"], _MANIFEST_NAME), _names(head["packs"], _PACK_NAME)
        fields = _COLUMNS[: _N_COLUMNS.get(version, len(_COLUMNS))]
        base_packs = _names(head["base_packs"] if version > 1 else [], _PACK_NAME)
        refs = {_seen(*seen): _names([name], _MANIFEST_NAME)[0] for *seen, name in head["refs"]}
        counts = {name: head[name] for name in ("n_digests", "n_spans", "n_entries")}
        if not all(type(count) is int and 0 <= count < 1 << 32 for count in counts.values()):
            raise ValueError("it says impossible counts")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(key, f"it is not a census: {error!r}") from error
    counts |= {"manifests": len(manifests), "packs": len(packs)}
    n_bytes = counts["n_digests"] * DIGEST_BYTES
    n_bytes += sum(np.dtype(dtype).itemsize * counts[of] for _, dtype, of in fields)
    # What is there is what is said to be there, so nothing below takes more memory than the blob does.
    if head_bytes + n_bytes != len(body):
        raise CorruptError(key, "it has another size than it says")
    at = int(head_bytes) + counts["n_digests"] * DIGEST_BYTES
    digests: Digests = np.frombuffer(body[head_bytes:at], np.uint8).reshape(-1, DIGEST_BYTES)
    columns: dict[str, Any] = {}
    for name, dtype, of in fields:
        columns[name] = np.frombuffer(body, dtype, counts[of], at)
        at += columns[name].nbytes
    if version == 1:
        # It is from before there were deltas.
        columns |= dict.fromkeys(("entry_base", "entry_base_pack"), np.full(counts["n_entries"], NO_BASE))
    columns.setdefault("entry_effort", np.zeros(counts["n_entries"], np.uint8))
    pack_entries = columns.pop("pack_entries")
    if int(pack_entries.sum(dtype=np.uint64)) != counts["n_entries"]:
        raise CorruptError(key, "its packs have other entries than it says")
    facts = Facts(
        digests=digests,
        manifests=manifests,
        packs=packs,
        base_packs=base_packs,
        refs=refs,
        entry_pack=np.repeat(np.arange(len(packs), dtype=np.uint32), pack_entries),
        **columns,
    )
    if not _is_possible(facts) or not facts.is_consistent:
        raise CorruptError(key, "it contradicts itself")
    if version < VERSION:
        # What was spent on the chunks of packs stands in their tables alone.
        return replace(facts.only(manifests=facts.manifests, packs={}), refs=refs)
    return facts


def _is_possible(facts: Facts) -> bool:
    """Tell whether every number points to something and everything stands in its order."""
    n_chunks = len(facts.digests)
    chunk, start, stop = facts.span_chunk, facts.span_start, facts.span_stop
    if any(len(chunks) and int(chunks.max()) >= n_chunks for chunks in (chunk, facts.entry_chunk)):
        return False
    deltas = facts.entry_base != NO_BASE
    base, base_pack = facts.entry_base[deltas], facts.entry_base_pack[deltas]
    if len(base) and (int(base.max()) >= n_chunks or int(base_pack.max()) >= len(facts.base_packs)):
        return False
    if len(stop) and (int(stop.max()) > len(facts.manifests) or (start >= stop).any()):
        return False
    follows = (chunk[1:] > chunk[:-1]) | ((chunk[1:] == chunk[:-1]) & (start[1:] > stop[:-1]))
    return bool(follows.all()) and _is_ascending(facts.digests)


def _is_ascending(digests: Digests) -> bool:
    """Tell whether digests are in their order and all different."""
    words = digests.view(">u8") if len(digests) else np.empty((0, 4), np.uint64)
    undecided = np.arange(1, len(words))
    for column in range(4):
        here, before = words[undecided, column], words[undecided - 1, column]
        if (here < before).any():
            return False
        undecided = undecided[here == before]
    return len(undecided) == 0


def _names(given: object, pattern: re.Pattern[str]) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(name, str) and pattern.fullmatch(name) for name in given):
        raise ValueError("it lists something that is no name")
    if len(set(given)) < len(given):
        raise ValueError("it lists a name twice")
    return tuple(given)


def _seen(key: object, token: object, size: object, modified_s: object) -> RefSeen:
    is_ref = isinstance(key, str) and key.startswith("refs/") and isinstance(token, str)
    if not is_ref or type(size) is not int or type(modified_s) is not float:
        raise ValueError("it lists something that is no ref")
    return RefSeen(str(key), str(token), size, modified_s)
