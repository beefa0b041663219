"""Names of the blobs of a store (``docs/format.md``, Blobs), and of foreign files between them.

File managers, editors, network file systems and sync tools put files of their own into any folder. Every listing of a
store's blobs goes through `list_blobs` and `list_dir`, and these leave foreign files out; `find_strangers` names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tensorcas_mlflow.backends import Backend, BlobInfo, Children

_N_NAMED = 3
_MANIFEST = r"[0-9a-f]{64}(?:\.[0-9a-f]{8})?"
_HEX = r"[0-9a-f]{32}"
_SEGMENT = r"[A-Za-z0-9._=%~-]{1,200}"
_MANIFEST_NAME = re.compile(_MANIFEST)
_KEY = re.compile(
    "format"
    rf"|packs/{_HEX}\.pack"
    rf"|index/{_HEX}\.(?:loose|arrow)"
    rf"|manifests/{_MANIFEST}"
    rf"|(?:intents|census)/{_HEX}"
    rf"|condemned/(?:{_HEX}|@generation)"
    rf"|quarantine/(?:{_HEX}-[0-9a-f]{{1,16}}-[0-9a-f]{{1,16}}\.[0-9a-f]{{8}}|@{_HEX})"
    rf"|refs/runs/{_SEGMENT}/(?:{_SEGMENT}/)?@(?:-?[0-9]+|True|False)"  # an earlier release accepted a bool as a step
    rf"|refs/copies/[0-9a-f]{{64}}/@{_HEX}"
    rf"|refs/replacing/@{_HEX}"
    # A ref of a later kind keeps a manifest alive like any other.
    r"|refs/(?:artifacts|runs|copies|replacing)"  # a file in place of a folder of refs: damage
    rf"|refs/(?!runs/|copies/|replacing/)(?:{_SEGMENT}/)+@{_SEGMENT}"
)


def is_blob_key(key: str) -> bool:
    """Tell whether a key has the form of a blob's key in a store."""
    return _KEY.fullmatch(key) is not None


def is_manifest_name(name: object) -> bool:
    """Tell whether an object is the name of a manifest, in the form of its key."""
    return isinstance(name, str) and _MANIFEST_NAME.fullmatch(name) is not None


def list_blobs(backend: Backend, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
    """List the blobs of a store below a prefix, like `Backend.list`, without foreign files."""
    return filter(_is_ours, backend.list(prefix, after=after))


def list_dir(backend: Backend, prefix: str) -> Children:
    """List the direct children of a prefix, like `Backend.list_dir`, without foreign files."""
    blobs, names = backend.list_dir(prefix)
    # A folder of refs is named by a segment of a path, and quoting removes "@" from it.
    return list(filter(_is_ours, blobs)), [name for name in names if "@" not in name]


def _is_ours(info: BlobInfo) -> bool:
    # A link among refs may have replaced a folder of refs: every collector has to see it.
    return is_blob_key(info.key) or (info.is_link and info.key.startswith("refs/"))


def find_strangers(backend: Backend) -> tuple[str, ...]:
    """Return the foreign files in a store's folder, or the foreign objects at its place."""
    return tuple(sorted(path for path in backend.paths() if not is_blob_key(path)))


def strangers_text(strangers: Sequence[str]) -> str:
    """Count and name foreign files."""
    named = ", ".join(repr(path) for path in strangers[:_N_NAMED])
    more = f" and {len(strangers) - _N_NAMED} more" if len(strangers) > _N_NAMED else ""
    are = "1 file that is" if len(strangers) == 1 else f"{len(strangers)} files that are"
    return f"{are} not of the store ({named}{more})"
