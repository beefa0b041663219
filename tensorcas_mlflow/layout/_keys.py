"""Keys: the names of a store's blobs, and the text form of steps (``docs/format.md``, Blobs, Refs and intents)."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import SupportsIndex
from urllib.parse import unquote

from tensorcas_mlflow.backends import Backend, BlobInfo, is_key
from tensorcas_mlflow.base.digest import digest

DEFAULT_NAME = "checkpoint"
"""Name of a series without a name."""


def as_step(step: SupportsIndex) -> int:
    """Convert a step to an integer MLflow's database can hold.

    Raises:
        ValueError: It is no whole number, or does not fit into 64 bits.
    """
    try:
        # A NumPy integer would reach files as a Python object.
        whole = operator.index(step)
        if isinstance(step, bool):
            raise TypeError
    except TypeError as error:
        raise ValueError(f"step must be a whole number, not {step!r}") from error
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"step must fit MLflow's database, in 64 bits: {whole}")
    return whole


STEP_TEXT = r"minus-\d+|-?\d+"
"""Pattern of the texts accepted by `step_of_text`."""


def step_text(step: int) -> str:
    """Return a step's text for the name of a file: padded, so names sort like steps from 0 on."""
    return f"{step:08d}" if step >= 0 else f"minus-{-step:08d}"


def step_of_text(text: str) -> int:
    """Parse a step written by `step_text`, or a whole number."""
    return int(text.replace("minus-", "-"))


_N_NAMED = 3
_MANIFEST = r"[0-9a-f]{64}(?:\.[0-9a-f]{8})?"
_HEX = r"[0-9a-f]{32}"
_SEGMENT = r"[A-Za-z0-9._=%~-]{1,200}"
_MANIFEST_NAME = re.compile(_MANIFEST)
_PACK_NAME = re.compile(_HEX)
_KEY = re.compile(
    "format"
    rf"|packs/{_HEX}\.pack"
    rf"|index/{_HEX}\.(?:loose|segment)"
    rf"|manifests/{_MANIFEST}"
    rf"|(?:intents|census|ref-tables)/{_HEX}"
    rf"|condemned/(?:{_HEX}|@generation)"
    rf"|maintenance/(?:{_HEX}|@lease)"
    rf"|quarantine/(?:{_HEX}(?:\.pack|\.db(?:-wal|-lost|-head)?)?|@{_HEX})"
    rf"|refs/runs/{_SEGMENT}/(?:{_SEGMENT}/)?@-?[0-9]+"
    rf"|refs/copies/[0-9a-f]{{64}}/@{_HEX}"
    rf"|refs/replacing/@{_HEX}"
    r"|refs/forms/[0-9a-f]{64}/@[0-9a-f]{8}"
    # A ref of a later kind keeps a manifest alive like any other.
    r"|refs/(?:artifacts|runs|copies|replacing|forms)"  # a file in place of a folder of refs: damage
    rf"|refs/(?!runs/|copies/|replacing/|forms/)(?:{_SEGMENT}/)+@{_SEGMENT}"
)


def is_blob_key(key: str) -> bool:
    """Tell whether a key has the form of a blob's key in a store."""
    return _KEY.fullmatch(key) is not None


def is_manifest_name(name: object) -> bool:
    """Tell whether an object is the name of a manifest, in the form of its key."""
    return isinstance(name, str) and _MANIFEST_NAME.fullmatch(name) is not None


def is_pack_name(name: object) -> bool:
    """Tell whether an object is the name of a pack."""
    return isinstance(name, str) and _PACK_NAME.fullmatch(name) is not None


def list_blobs(backend: Backend, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
    """List the blobs of a store below a prefix, like `Backend.list`, without foreign files."""
    return filter(_is_ours, backend.list(prefix, after=after))


def list_dir(backend: Backend, prefix: str) -> tuple[list[BlobInfo], list[str]]:
    """List the direct children of a prefix, blobs and next segments, both sorted and without foreign files."""
    found = backend.list_dir(prefix)
    # A folder of refs is named by a segment of a path, and quoting removes "@" from it.
    return list(filter(_is_ours, found.facts())), sorted(name for name in found.segments if "@" not in name)


def _is_ours(info: BlobInfo) -> bool:
    # A link among refs may have replaced a folder of refs: every collector has to see it.
    return is_blob_key(info.key) or (info.is_link and info.key.startswith("refs/"))


def find_strangers(backend: Backend) -> tuple[str, ...]:
    """Return the foreign files in a store's folder, or the foreign objects at its place.

    Those in a folder whose name is in no key count as one, with a slash at its end.
    """
    foreign = (file.path for file in backend.files() if not (file.is_own or is_blob_key(file.path)))
    return tuple(sorted({_up_to_no_key(path) for path in foreign}))


def _up_to_no_key(path: str) -> str:
    """Cut a path behind its first folder whose name is in no key."""
    ends = (match.start() for match in re.finditer("/", path))
    return next((path[: end + 1] for end in ends if not is_key(path[:end])), path)


def strangers_text(strangers: Sequence[str]) -> str:
    """Count and name foreign files."""
    named = ", ".join(repr(path) for path in strangers[:_N_NAMED])
    more = f" and {len(strangers) - _N_NAMED} more" if len(strangers) > _N_NAMED else ""
    are = "1 file that is" if len(strangers) == 1 else f"{len(strangers)} files that are"
    return f"{are} not of the store ({named}{more})"


_PLAIN = re.compile(r"[A-Za-z0-9._=~-]*")
_MAX_SEGMENT = 180

ARTIFACTS = "refs/artifacts/"
"""Prefix of the keys of refs by artifact path."""

RUNS = "refs/runs/"
"""Prefix of the keys of refs of runs' steps."""

COPIES = "refs/copies/"
"""Prefix of the keys of refs of models with a copy of the manifest in MLflow."""

STAND_INS = "refs/replacing"
"""Key prefix of stand-ins: refs holding a save while it replaces another through a carrier."""

FORMS = "refs/forms"
"""Key prefix of forms: refs of manifests that say how the content of other manifests is stored."""


def form_key(manifest: str) -> str:
    """Return the key of the form of a manifest, given its name."""
    digest_text, _, end = manifest.partition(".")
    return f"{FORMS}/{digest_text}/@{end}"


def formed_by(key: str) -> str | None:
    """Return the name of the manifest whose form a ref is; None if it is no form."""
    if not key.startswith(f"{FORMS}/"):
        return None
    digest_text, _, end = key.removeprefix(f"{FORMS}/").partition("/@")
    return f"{digest_text}.{end}"


def is_shown(key: str) -> bool:
    """Tell whether lists show a ref: they show no stand-in and no form."""
    return not key.startswith((f"{STAND_INS}/", f"{FORMS}/"))


@lru_cache(maxsize=4096)
def quote_segment(text: str) -> str:
    """Encode any text as a segment of a key, reversibly unless it is long."""
    quoted = text
    if not _PLAIN.fullmatch(text):
        encoded = text.encode("utf-8", "surrogateescape")
        quoted = "".join(chr(c) if _PLAIN.fullmatch(chr(c)) else f"%{c:02X}" for c in encoded)
    if len(quoted) <= _MAX_SEGMENT and quoted not in ("", ".", "..") and not quoted.startswith("~"):
        return quoted
    return _hashed_segment(text)


def unquote_segment(segment: str) -> str:
    """Decode a segment of `quote_segment`; the name of a long text is lost."""
    return unquote(segment, errors="surrogateescape")


def _hashed_segment(text: str) -> str:
    return "~" + digest(text.encode("utf-8", "surrogateescape")).hex()[:32]


def is_run_key(key: str, run_id: str, name: str | None, step: int | None) -> bool:
    """Tell whether a key is that of a run's step; a carrier writes quoted segments like long ones."""
    # Almost every key has the quoted texts, so few texts are hashed.
    if key == f"{run_prefix(run_id, name)}/@{step}":
        return True
    *folders, leaf = key.removeprefix(RUNS).split("/")
    texts = [run_id, *([] if name is None else [name])]
    return (
        leaf == f"@{step}"
        and len(folders) == len(texts)
        and all(
            segment == quote_segment(text) or segment == _hashed_segment(text)
            for segment, text in zip(folders, texts, strict=True)
        )
    )


def run_prefix(run_id: str, name: str | None = None) -> str:
    """Return the key prefix of the refs of a run's steps, or of those of one name."""
    return "/".join([RUNS.rstrip("/"), quote_segment(run_id), *([] if name is None else [quote_segment(name)])])


def copies_prefix(place: str) -> str:
    """Return the key prefix of the refs of models with a copy of the manifest at a place in MLflow."""
    return COPIES + digest(place.encode()).hex()


def label_of(key: str) -> str | None:
    """Describe the ref at a key in words, like `Ref.label`, as far as the key shows it."""
    folders, _, leaf = key.rpartition("/@")
    texts = [unquote_segment(segment) for segment in folders.split("/")[2:]]
    if key.startswith(RUNS) and 1 <= len(texts) <= 2:
        return f"run {' '.join(texts)} step {unquote_segment(leaf)}"
    if key.startswith(ARTIFACTS):
        return "/".join([*texts, unquote_segment(leaf)])
    return None


def artifact_prefix(directory: str) -> str:
    """Return the key prefix of the refs below an artifact directory."""
    return "/".join([ARTIFACTS.rstrip("/"), *map(quote_segment, path_segments(directory))])


# A save asks for the key of its step again and again.
@lru_cache(maxsize=256)
def artifact_key(path: str) -> str:
    """Return the key of the ref of an artifact path."""
    *folders, leaf = path_segments(path)
    return ARTIFACTS + "/".join([*map(quote_segment, folders), "@" + quote_segment(leaf)])


_NO_SEGMENTS = frozenset(["", ".", ".."])


def path_segments(path: str) -> list[str]:
    """Split an artifact path.

    Raises:
        ValueError: It is no artifact path.
    """
    if path == "":
        return []
    segments = path.split("/")
    if "\0" in path or not _NO_SEGMENTS.isdisjoint(segments):
        raise ValueError(f"not an artifact path: {path[:200]!r}")
    return segments
