"""Errors of this package, sorted by what a reader can do; texts without secrets; and the running release."""

from __future__ import annotations

import re
from functools import cache

_LOGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[^\s/?#'\"]*@")
_CONTAINER = re.compile(r"://[A-Za-z0-9][A-Za-z0-9._-]*@\Z")
_CONTAINER_SCHEMES = ("tensorcas-az", "abfs", "abfss", "wasb", "wasbs")
"""Schemes with a container in place of the login."""
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?'\"]*\?)[^\s'\"]+")


def without_secrets(text: str) -> str:
    """Remove the credentials from the URIs in a text: logins, and queries, since these hold signatures and tokens."""
    return _QUERY.sub(r"\1…", _LOGIN.sub(_without_login, text)) if "://" in text else text


def _without_login(match: re.Match[str]) -> str:
    is_container = match[1].lower() in _CONTAINER_SCHEMES and _CONTAINER.search(match[0])
    return match[0] if is_container else f"{match[1]}://…@"


@cache
def release() -> str:
    """Return the installed version of the package; ``0+unknown`` for a checkout that was never installed."""
    # The import is slow, and `import mlflow` must not pay for it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensorcas-mlflow")
    except PackageNotFoundError:
        return "0+unknown"


_N_NAMES = 3
_MOST_BELOW = 10


class TensorCasError(Exception):
    """Base of all errors of this package, except `ValueError` and `TypeError`."""


class BackendError(TensorCasError):
    """The storage under a store failed."""

    def __init__(self, action: str, key: str, reason: str) -> None:
        key, reason = without_secrets(key), without_secrets(reason)
        super().__init__(action, key, reason)
        self.action = action
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"could not {self.action} {self.key!r}: {self.reason}"


class RefusedError(BackendError):
    """The storage under a store refuses the request; a retry does not help."""


class ForbiddenError(RefusedError):
    """The storage under a store denies this user the permission."""


class StarvedError(BackendError):
    """This process may open no more files, or gets no more memory; the data may be sound."""


class NotFoundError(TensorCasError):
    """There is nothing of the given name."""


class FileMissingError(BackendError, NotFoundError, FileNotFoundError):
    """A file of this machine that does not exist."""


class BlobNotFoundError(NotFoundError):
    """A key without a blob."""

    def __init__(self, key: str) -> None:
        key = without_secrets(key)
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"there is no blob at {self.key!r}"


class StoreNotFoundError(NotFoundError):
    """A place without a store."""

    def __init__(self, uri: str, below: tuple[str, ...] = ()) -> None:
        uri, below = without_secrets(uri), tuple(map(without_secrets, below))
        super().__init__(uri, below)
        self.uri = uri
        self.below = below
        """Stores below the place, if they were looked for."""

    def __str__(self) -> str:
        if self.uri.startswith("mlflow-artifacts:"):
            return (
                f"there is no store at {self.uri!r}: log a first model or checkpoint there to create one, or "
                "name the right one in TENSORCAS_STORE"
            )
        if self.below:
            more = f" and {len(self.below) - _MOST_BELOW} more" if len(self.below) > _MOST_BELOW else ""
            listed = ", ".join(map(repr, self.below[:_MOST_BELOW]))
            return (
                f"there is no store at {self.uri!r} or above it, but below it at {listed}{more}: name one of them in "
                "TENSORCAS_STORE"
            )
        return (
            f"there is no store at {self.uri!r} or above it: name the right one in TENSORCAS_STORE, log a first model "
            f"or checkpoint there, or create an empty one with `tensorcas init {self.uri}`; for one that was moved see "
            "docs/deploy.md, Move a store"
        )


class StoreLostError(StoreNotFoundError):
    """A place without a store, where a run has logged checkpoints or models."""

    def __init__(self, uri: str, run_id: str) -> None:
        super().__init__(uri)
        self.args = (self.uri, run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return (
            f"run {self.run_id!r} has logged checkpoints or models, and there is no store at {self.uri!r} or above it "
            "any more: it was moved or deleted, or is not mounted. Put it back, or a symbolic link in its place, or "
            "change the artifact locations in MLflow's database (docs/deploy.md, Move a store); `tensorcas init` there "
            "creates an empty store"
        )


class CheckpointNotFoundError(NotFoundError):
    """A checkpoint name unknown to the store."""

    def __init__(self, name: str, known: str = "") -> None:
        super().__init__(name, known)
        self.name = name
        self.known = known

    def __str__(self) -> str:
        hint = f"; there are {self.known}" if self.known else ""
        return f"there is no checkpoint {self.name}{hint}"


class TensorNotFoundError(NotFoundError, KeyError):
    """A checkpoint holds no tensor of that name. A `KeyError`, since a reader is a mapping of names to tensors."""

    def __init__(self, name: str, type: str | None = None) -> None:
        super().__init__(name, type)
        self.name = name
        self.type = type
        """The tensor's type in the words of its file, if the file has it and it cannot be read."""

    def __str__(self) -> str:
        if self.type is not None:
            return f"tensor {self.name!r} cannot be read: its type is {self.type}"
        return f"the checkpoint has no tensor named {self.name!r}"


class PartNotFoundError(NotFoundError):
    """A checkpoint has no such layer, expert, prefix or matching name."""

    def __init__(self, what: str, known: str) -> None:
        super().__init__(what, known)
        self.what = what
        self.known = known

    def __str__(self) -> str:
        return f"the checkpoint has no {self.what}: {self.known}"


def in_words(checkpoint: str | None, tensors: tuple[str, ...]) -> str:
    """Describe the checkpoint or file affected by damage, and its tensors; empty if unknown."""
    said = [] if checkpoint is None else [checkpoint]
    if tensors:
        names = ", ".join(repr(name) for name in tensors[:_N_NAMES])
        more = f" and {len(tensors) - _N_NAMES} more" if len(tensors) > _N_NAMES else ""
        said.append(f"tensors {names}{more}" if len(tensors) > 1 else f"tensor {names}")
    return ", ".join(said)


class ChunkNotFoundError(NotFoundError):
    """A chunk a checkpoint needs and no pack of the store holds."""

    def __init__(
        self,
        digest: str,
        n_missing: int,
        checkpoint: str | None = None,
        tensors: tuple[str, ...] = (),
        suspects: tuple[str, ...] = (),
    ) -> None:
        super().__init__(digest, n_missing, checkpoint, tensors, suspects)
        self.digest = digest
        self.n_missing = n_missing
        self.checkpoint = checkpoint
        """The checkpoint or file that needs the chunk, as a text; None if unknown."""
        self.tensors = tensors
        """The known tensors without all of their chunks."""
        self.suspects = suspects
        """Keys of packs that may have held the chunk: they are gone, or their tables are damaged."""

    def __str__(self) -> str:
        who = in_words(self.checkpoint, self.tensors)
        more = f" and {self.n_missing - 1} more" if self.n_missing > 1 else ""
        keys = ", ".join(repr(key) for key in self.suspects[:_N_NAMES])
        lost = f"; lost or damaged are {keys}" if keys else ""
        return (
            f"{who}{': ' if who else ''}no pack of this store holds chunk {self.digest}{more}: the checkpoint was "
            f"deleted and collected, or a pack is lost or damaged{lost} (run `tensorcas repair --from` to restore it "
            "from a backup)"
        )


class FormatError(TensorCasError):
    """Bytes that violate the format."""


class CorruptError(FormatError):
    """A damaged blob of a store."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"the blob at {self.key!r} is damaged: {self.reason}"


class MalformedFileError(FormatError):
    """A file violates the specification of its format."""

    def __init__(self, path: str, format: str, reason: str) -> None:
        super().__init__(path, format, reason)
        self.path = path
        self.format = format
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path!r} is not a sound {self.format} file: {self.reason}"


class NoCheckpointError(MalformedFileError):
    """A folder holds no checkpoint of a known format."""


class CorruptChunkError(FormatError):
    """A chunk without a good copy: in none of its packs does it hash to its digest."""

    def __init__(
        self, digest: str, key: str, reason: str, checkpoint: str | None = None, tensors: tuple[str, ...] = ()
    ) -> None:
        super().__init__(digest, key, reason, checkpoint, tensors)
        self.digest = digest
        self.key = key
        self.reason = reason
        self.checkpoint = checkpoint
        """The checkpoint or file that needs the chunk, as a text; None if unknown."""
        self.tensors = tensors
        """The damaged tensors, as far as they are known."""

    def __str__(self) -> str:
        who = in_words(self.checkpoint, self.tensors)
        return (
            f"{who}{': ' if who else ''}chunk {self.digest} is damaged in {self.key!r}: {self.reason} "
            "(run `tensorcas repair` to heal it from a backup, or to let the next save write it again)"
        )


class DerivedTensorError(CorruptChunkError):
    """The function of a derived tensor gives other bytes than the save had, and its inputs are sound."""

    def __str__(self) -> str:
        who = in_words(self.checkpoint, self.tensors)
        return (
            f"{who}{': ' if who else ''}{self.reason}: this process flushes subnormal numbers to zero, the "
            "manifest is forged, or this release computes the function in another way (read it in a new process, and "
            "report the error if it stays)"
        )


class NewerFormatError(FormatError):
    """A store or blob written by a later release of this package."""

    def __init__(self, what: str, version: int, supported: int) -> None:
        super().__init__(what, version, supported)
        self.what = what
        self.version = version
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.what} has format version {self.version}: it needs a release of tensorcas-mlflow that reads format "
            f"{self.version} or later, and this is {release()}, which reads up to {self.supported}: upgrade "
            "tensorcas-mlflow"
        )


class WrongStoreError(FormatError):
    """A checkpoint belongs to another store than the one at its place."""

    def __init__(self, wanted: str, found: str, uri: str) -> None:
        uri = without_secrets(uri)
        super().__init__(wanted, found, uri)
        self.wanted = wanted
        self.found = found
        self.uri = uri

    def __str__(self) -> str:
        return (
            f"this checkpoint was written to store {self.wanted}, but {self.uri!r} is store {self.found}: "
            "name the right one in TENSORCAS_STORE"
        )


class ConflictError(TensorCasError):
    """Another writer or a collector was first, or something is there already."""


class BlobExistsError(ConflictError):
    """A blob already exists at the key of a new one."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"there is already a blob at {self.key!r}"


class CheckpointExistsError(ConflictError):
    """A step of a run is there already; it is untouched."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"there is already a checkpoint {self.name}: delete it, save under another step, or pass overwrite=True"


class FencedError(ConflictError):
    """A collector treated a save as dead, several times in a row."""

    def __init__(self, attempts: int) -> None:
        super().__init__(attempts)
        self.attempts = attempts

    def __str__(self) -> str:
        return (
            f"collectors treated the save as dead {self.attempts} times and nothing was committed: "
            "run gc with a longer grace, then save again"
        )


class PendingSavesError(ConflictError):
    """Saves through an MLflow server are under way, and a collection cannot fence them."""

    def __init__(self, uri: str, saves: tuple[tuple[str, str], ...]) -> None:
        uri = without_secrets(uri)
        super().__init__(uri, saves)
        self.uri = uri
        self.saves = saves
        """The id of each save, and its maker and time, in words."""

    def __str__(self) -> str:
        listed = "; ".join(f"{name} ({who})" for name, who in self.saves)
        return (
            f"saves through an MLflow server into {self.uri!r} are under way, and nothing can stop them: {listed}. "
            "Wait until they are done. If one is certainly dead, give it up with `tensorcas gc --abandon ID`"
        )


class DirectAccessError(TensorCasError):
    """An action needs direct access to the folder of a store, and the store is behind an MLflow server."""

    def __init__(self, action: str, uri: str) -> None:
        uri = without_secrets(uri)
        super().__init__(action, uri)
        self.action = action
        self.uri = uri

    def __str__(self) -> str:
        return (
            f"{self.action} cannot be done through the MLflow server that keeps {self.uri!r}: run it on the server's "
            "artifact folder, with `--root <the server's artifact folder>/<experiment id>`"
        )


class AdapterError(TensorCasError):
    """A model cannot be taken apart, or not put together again."""

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(adapter, reason)
        self.adapter = adapter
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.adapter}: {self.reason}"


class PickleForbiddenError(AdapterError):
    """A model needs a pickle, and pickles are forbidden in this process."""

    def __init__(self, adapter: str, switch: str) -> None:
        super().__init__(adapter, switch)
        self.switch = switch

    def __str__(self) -> str:
        return (
            f"{self.adapter}: this model holds a pickle, and {self.switch} is false: fill a live "
            "model (into=model), or read its tensors alone (weights_only=True)"
        )
