"""Refs and intents: the small JSON blobs of the commit protocol (``docs/format.md``, Records, Refs and intents)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobInfo, map_requests
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.base.files import new_name, pid_space, started
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, NewerFormatError, without_secrets
from tensorcas_mlflow.layout._keys import (
    ARTIFACTS,
    COPIES,
    RUNS,
    artifact_key,
    copies_prefix,
    form_key,
    formed_by,
    is_manifest_name,
    is_pack_name,
    is_run_key,
    path_segments,
    run_prefix,
)

VERSION = 1

_CHECK = b', "check": "'
_as_json = json.JSONEncoder(sort_keys=True).encode


def short_digest(data: bytes) -> str:
    """Return the first half of the digest of bytes."""
    return digest(data).hex()[:32]


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """Serialize a record: one JSON object with a digest of everything before its last field."""
    said = _as_json(record).encode()[:-1]
    return said + _CHECK + short_digest(said).encode() + b'"}'


def is_whole(data: bytes) -> bool:
    """Tell whether a record, given by its bytes, is unchanged."""
    said, _, rest = data.rstrip().rpartition(_CHECK)
    return rest == short_digest(said).encode() + b'"}'


def load_record(key: str, data: bytes, *, newest: int = VERSION) -> dict[str, Any]:
    """Parse a record.

    Args:
        key: Its key, for errors.
        data: Its bytes.
        newest: The latest version the caller understands.

    Raises:
        CorruptError: It is no record, or has changed since it was written.
        NewerFormatError: A later release wrote it.
    """
    try:
        # Records are ASCII, and json takes longer to find that out.
        record = json.loads(data.decode() if data.isascii() else data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(key, f"it is not JSON: {error}") from error
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CorruptError(key, "it is not a record of a store")
    # This comes first: damage must not count as a later release's writing.
    if not is_whole(data):
        raise CorruptError(key, "it does not hash to the check in it")
    if record["format"] > newest:
        raise NewerFormatError(f"{key!r}", record["format"], newest)
    return record


MAX_REF_BYTES = 64 * 1024
_LEAST_NUMBER, _MAX_NUMBER = -(1 << 63), (1 << 63) - 1
MAX_LISTED_REF_BYTES = MAX_REF_BYTES + 256
"""Bound of a ref with the white space that a backend may have put behind it."""
_WITH_BASES = 2
"""Version of an intent with packs of bases: a collector that does not know this field must not collect beside it."""

RefKind = Literal["checkpoint", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefTarget:
    """Key of a ref, and the facts about its run.

    `path` identifies the ref of an artifact shown by our repository; ``run_id``, ``name`` (if given) and ``step``
    identify the ref of a step. MLflow keeps a copy of a model's manifest at ``copy_path`` or ``uri``. The ref of such a
    model is never replaced: each save adds one, and a ref without its copy is an orphan.
    """

    path: str | None = None
    """Artifact path, relative to the artifact root, of the checkpoint or file."""
    copy_path: str | None = None
    """Path, relative to the artifact root, of MLflow's copy of the manifest; it moves with the root."""
    uri: str | None = None
    """MLflow's artifact URI, without any login or signature in it."""
    run_id: str | None = None
    step: int | None = None
    name: str | None = None
    """Name of the checkpoint in its run, if the run has several of one step."""
    parent_step: int | None = None
    """The step the training continued from, if known; nothing depends on it."""
    metrics: Mapping[str, float] | None = None
    """Figures recorded with the step."""
    model_id: str | None = None
    of: str | None = None
    """Name of the manifest whose form this is: its content is stored as this ref's manifest says."""

    def __post_init__(self) -> None:
        # Lists and pages show these fields, and every reader of the store reads them.
        if self.uri is not None:
            object.__setattr__(self, "uri", without_secrets(self.uri))

    @property
    def key(self) -> str:
        """Return the key for this ref; a new one each time if MLflow keeps a copy of the model's manifest.

        Raises:
            ValueError: Its fields are not enough to find it again.
        """
        if self.of is not None:
            return form_key(self.of)
        if self.path is not None:
            return artifact_key(self.path)
        copy = self.copy_path or self.uri
        if copy is not None and self.name is None:
            return f"{copies_prefix(copy)}/@{new_name()}"
        if self.run_id is not None and self.step is not None:
            return f"{run_prefix(self.run_id, self.name)}/@{self.step}"
        raise ValueError("a ref needs an artifact path, an artifact URI, or a run and a step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref(RefTarget):
    """Record of a checkpoint or file; it keeps one manifest, and all its chunks, alive."""

    key_: str
    kind: RefKind
    manifest: str
    """Name of the manifest below ``manifests/``."""
    n_bytes: int
    """Size of the content at the artifact path."""
    flavor: str | None
    created: str
    """ISO 8601, UTC."""
    write: str
    """Random id of this commit."""

    @property
    def key(self) -> str:
        return self.key_

    @property
    def created_s(self) -> float:
        """Return the time of its creation, in seconds of Unix time.

        Raises:
            CorruptError: Its time is invalid.
        """
        try:
            return datetime.fromisoformat(self.created).timestamp()
        except (ValueError, OverflowError) as error:
            raise CorruptError(self.key, f"its time of creation is invalid: {error}") from error

    @property
    def label(self) -> str:
        """The ref in words, for messages."""
        name = "" if self.name is None else f" {self.name}"
        form = None if self.of is None else f"the form of manifests/{self.of}"
        return form or self.path or self.copy_path or self.uri or f"run {self.run_id}{name} step {self.step}"


class Intent(NamedTuple):
    """A save under way, as seen by a collector."""

    info: BlobInfo
    manifest: str
    digests: Digests | None
    """The digests the save relies on; None once its manifest, which lists them, is on disk."""
    bases: frozenset[str]
    """Packs of the bases of deltas the save may write."""
    writer_is_dead: bool
    """True if the process is known to be gone; False if this is unknown."""
    through_carrier: bool
    """True if the save goes through an MLflow server, and its commit cannot be fenced."""
    host: str
    created: str
    """ISO 8601, UTC."""

    @property
    def id(self) -> str:
        """Its name below ``intents/``."""
        return self.info.key.rpartition("/")[2]


def now() -> str:
    """Return the current time in the form of refs."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_ref(target: RefTarget, *, key: str, kind: RefKind, manifest: str, n_bytes: int, flavor: str | None) -> Ref:
    """Create the ref of a commit."""
    return Ref(
        key_=key,
        path=target.path,
        copy_path=target.copy_path,
        uri=target.uri,
        run_id=target.run_id,
        step=target.step,
        name=target.name,
        parent_step=target.parent_step,
        metrics=target.metrics,
        model_id=target.model_id,
        of=target.of,
        kind=kind,
        manifest=manifest,
        n_bytes=n_bytes,
        flavor=flavor,
        created=now(),
        write=new_name(),
    )


def ref_bytes(ref: Ref) -> bytes:
    """Serialize a ref.

    Raises:
        ValueError: A field is too long or has the wrong type, so no reader would accept it.
    """
    said: dict[str, Any] = {
        "path": ref.path,
        "copy_path": ref.copy_path,
        "uri": ref.uri,
        "run_id": ref.run_id,
        "step": ref.step,
        "name": ref.name,
        "parent_step": ref.parent_step,
        "model_id": ref.model_id,
        "flavor": ref.flavor,
        "of": ref.of,
    }
    if ref.metrics is not None:
        # JSON has no NaN and no infinity.
        try:
            said["metrics"] = {key: _write_float(value) for key, value in ref.metrics.items()}
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a metric is no number: {error}") from error
    record: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    record |= {"format": VERSION, "kind": ref.kind, "manifest": ref.manifest, "n_bytes": ref.n_bytes}
    record |= {"created": ref.created, "write": ref.write}
    try:
        data = record_bytes(record)
    except TypeError as error:
        raise ValueError(f"a ref has an invalid field: {error}") from error
    if len(data) > MAX_REF_BYTES:
        raise ValueError(
            f"a ref of {len(data)} bytes is too long: shorten its path, URI, run id or name, or give fewer metrics"
        )
    # An unreadable ref would block every operation that needs all refs.
    try:
        parse_ref(ref.key, data)
    except CorruptError as error:
        raise ValueError(f"a ref at {ref.key!r} has an invalid field: {error.reason}") from error
    return data


_TEXTS = ("path", "copy_path", "uri", "run_id", "name", "model_id", "flavor", "of")
"""The fields of a ref that are texts, or absent."""
_TEXT_KINDS = frozenset({str, NoneType})


def parse_ref(key: str, data: bytes) -> Ref:
    """Read a ref.

    Raises:
        CorruptError: It is no ref.
        NewerFormatError: A later release wrote it.
    """
    record = load_record(key, data)
    texts = list(map(record.get, _TEXTS))
    step, parent = record.get("step"), record.get("parent_step")
    n_bytes, metrics = record.get("n_bytes"), record.get("metrics")
    manifest, kind, created = record.get("manifest"), record.get("kind"), record.get("created")
    if (
        not _TEXT_KINDS.issuperset(map(type, texts))
        or not (step is None or (type(step) is int and _LEAST_NUMBER <= step <= _MAX_NUMBER))
        or not (parent is None or (type(parent) is int and _LEAST_NUMBER <= parent <= _MAX_NUMBER))
        or not (metrics is None or isinstance(metrics, dict))
        or type(n_bytes) is not int
        or not 0 <= n_bytes <= _MAX_NUMBER
        or kind not in ("checkpoint", "file")
        or not isinstance(created, str)
        or not is_manifest_name(manifest)
    ):
        raise CorruptError(key, "it is not a ref")
    path, copy_path, uri, run_id, name, model_id, flavor, of = texts
    try:
        for artifact in filter(None, (path, copy_path)):
            path_segments(artifact)
        _check_key(key, path=path, run_id=run_id, name=name, step=step, copy=copy_path or uri)
        if formed_by(key) != of:
            raise ValueError(f"it says it is the form of {of!r}")
        figures = None if metrics is None else {key: _read_float(value) for key, value in metrics.items()}
    except ValueError as error:
        raise CorruptError(key, str(error)) from error
    return Ref(
        key_=key,
        path=path,
        copy_path=copy_path,
        uri=uri,
        run_id=run_id,
        step=step,
        name=name,
        parent_step=parent,
        metrics=figures,
        model_id=model_id,
        of=of,
        kind=kind,
        manifest=str(manifest),
        n_bytes=n_bytes,
        flavor=flavor,
        created=created,
        write=str(record.get("write", "")),
    )


def _check_key(
    key: str, *, path: str | None, run_id: str | None, name: str | None, step: int | None, copy: str | None
) -> None:
    """Check that a ref belongs to its key: at another ref's key it would show the wrong tensors.

    Raises:
        ValueError: It belongs to another key.
    """
    if key.startswith(ARTIFACTS) and (not path or artifact_key(path) != key):
        raise ValueError(f"it says it is the ref of {path!r}")
    if key.startswith(RUNS) and (run_id is None or not is_run_key(key, run_id, name, step)):
        raise ValueError(f"it says it is the ref of run {run_id!r}, name {name!r}, step {step}")
    if key.startswith(COPIES) and copy is not None and not key.startswith(copies_prefix(copy)):
        raise ValueError(f"it says it is the ref of a copy at {without_secrets(copy)!r}")


def _write_float(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _read_float(value: object) -> float:
    if type(value) in (int, float) or value in ("nan", "inf", "-inf"):
        with suppress(OverflowError):  # JSON has numbers of any size
            return float(value)  # type: ignore[arg-type]
    raise ValueError("it has a metric that is no number")


def read_ref(backend: Backend, key: str) -> Ref | None:
    """Read the ref at a key, or return None if there is none."""
    try:
        data = backend.get(key, max_bytes=MAX_LISTED_REF_BYTES)
    except BlobNotFoundError:
        return None
    return parse_ref(key, data)


def read_refs_around(backend: Backend, keys: Iterable[str]) -> tuple[list[Ref], dict[str, CorruptError]]:
    """Read the refs at some keys, in their order, and collect the damaged ones.

    Returns:
        The refs, without deleted ones; and the error of each damaged one, by its key.

    Raises:
        NewerFormatError: A later release wrote one.
    """

    def read(key: str) -> Ref | CorruptError | None:
        try:
            return read_ref(backend, key)
        except CorruptError as error:
            return error

    keys = list(keys)
    found = list(map_requests(backend, read, keys))
    refs: list[Ref] = []
    damaged: dict[str, CorruptError] = {}
    for key, each in zip(keys, found, strict=True):
        if isinstance(each, Ref):
            refs.append(each)
        elif each is not None:
            damaged[key] = each
    return refs, damaged


def manifest_of_damaged_ref(backend: Backend, key: str) -> str | None:
    """Return the name of the manifest of a damaged ref, or None if it is unknown.

    A ref with a valid check, at its own key, names its manifest even if readers refuse something else in it.
    """
    try:
        record = load_record(key, backend.get(key, max_bytes=MAX_LISTED_REF_BYTES))
        copy = record.get("copy_path") or record.get("uri")
        said = {name: record.get(name) for name in ("path", "run_id", "name", "step")}
        _check_key(key, **said, copy=copy)
    except (BlobNotFoundError, CorruptError, ValueError, TypeError, AttributeError):
        return None
    name = record.get("manifest")
    return str(name) if is_manifest_name(name) and formed_by(key) == record.get("of") else None


def intent_bytes(
    manifest: str, digests: Digests, *, bases: Collection[str] = (), through_carrier: bool = False
) -> bytes:
    """Serialize an intent for a save by this process."""
    record: dict[str, Any] = {
        "format": _WITH_BASES if bases else VERSION,
        "manifest": manifest,
        "n_digests": len(digests),
        "created": now(),
        **writer_facts(),
    }
    if through_carrier:
        record["carrier"] = True
    if bases:
        record["bases"] = sorted(bases)
    tail = digests.tobytes()
    record["digest"] = short_digest(tail)
    return record_bytes(record) + b"\n" + tail


def parse_intent(info: BlobInfo, data: bytes) -> Intent:
    """Parse an intent, even one half overwritten with its ref by a commit.

    Raises:
        CorruptError: It is unreadable.
        NewerFormatError: A later release wrote it.
    """
    head, newline, tail = data.partition(b"\n")
    try:
        record = load_record(info.key, head, newest=_WITH_BASES)
    except CorruptError:
        # The commit writes the ref over the longer intent: the rest of the first line after the ref is the old end.
        text = head.decode("utf-8", "surrogateescape")
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise CorruptError(info.key, f"it is not an intent: {error}") from error
        record = load_record(info.key, text[:end].encode("utf-8", "surrogateescape"), newest=_WITH_BASES)
        newline = b""
    manifest = record.get("manifest")
    if not is_manifest_name(manifest):
        raise CorruptError(info.key, "it is not an intent")
    n_digests = record.get("n_digests")
    digests: Digests | None = None
    if n_digests == 0:
        digests = np.empty((0, DIGEST_BYTES), np.uint8)
    elif newline and type(n_digests) is int and len(tail) == n_digests * DIGEST_BYTES:
        if record.get("digest") != short_digest(tail):
            raise CorruptError(info.key, "the digests in it do not hash to its digest")
        digests = np.frombuffer(tail, np.uint8).reshape(-1, DIGEST_BYTES)
    bases = record.get("bases", [])
    if not isinstance(bases, list) or not all(map(is_pack_name, bases)):
        raise CorruptError(info.key, "it names an invalid pack")
    return Intent(
        info=info,
        manifest=str(manifest),
        digests=digests,
        bases=frozenset(bases),
        writer_is_dead=writer_is_dead(record),
        through_carrier=record.get("carrier") is True,
        host=str(record.get("host", ""))[:200],
        created=str(record.get("created", ""))[:200],
    )


def writer_facts() -> dict[str, Any]:
    """Return the fields of a record that tell other processes whether its writer is dead; see `writer_is_dead`."""
    boot, started = _this_process(os.getpid())
    return {"host": _host(), "boot": boot, "pid": os.getpid(), "pid_started": started}


def _host() -> str:
    import platform  # a reader writes no intent

    return platform.node()


@cache
def _this_process(pid: int) -> tuple[str, int]:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = f"{file.read().strip()} {pid_space()}"
        return boot, started(pid) or 0
    except OSError:
        return "", 0


def writer_is_dead(record: Mapping[str, Any]) -> bool:
    """Tell whether the writer of a record with `writer_facts` is known to be gone; False if this is unknown."""
    pid, boot = record.get("pid"), record.get("boot")
    here, _ = _this_process(os.getpid())
    if not here or boot != here or record.get("host") != _host() or type(pid) is not int:
        return False
    return started(pid) != record.get("pid_started")
