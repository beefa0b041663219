"""Folders that hold one checkpoint in several files: shards with an index, as `transformers` writes and the hub caches.

Shards and their index are described at https://huggingface.co/docs/transformers/big_models: a JSON object whose
``weight_map`` maps every tensor's name to the file that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorcas_mlflow.errors import FormatError, MalformedFileError, NoCheckpointError
from tensorcas_mlflow.file_formats._dcp import DCP_METADATA
from tensorcas_mlflow.file_formats._headers import strict_json
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._serverlessllm import SERVERLESSLLM_INDEX, list_serverlessllm
from tensorcas_mlflow.file_formats._source import LocalFile, file_in, files_named

_INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,8})-of-(?P<all>\d{1,8})(?P<suffix>\.\w+)")
_SHARDED = (("safetensors", ".safetensors", "model.safetensors"), ("torch", ".bin", "pytorch_model.bin"))
"""Formats with shards: name, suffix of a shard, and name of the only file without shards."""
_MAX_SHARDS = 100_000
_CONFIG = "config.json"
_MAX_INDEX_BYTES = 32 << 20
_MAX_CONFIG_BYTES = 1 << 20

ListFile = Callable[[LocalFile, str | None], Listing]
"""Lists one file, which must have a format unless that is None."""


def list_folder(folder: Path, format: str | None, list_file: ListFile) -> Listing:
    """List the one checkpoint of a folder; the first kind that is there, in the order of `docs/design/formats.md`.

    Args:
        folder: The folder.
        format: The format of the checkpoint; None for any.
        list_file: Lists one of its files.

    Raises:
        NoCheckpointError: There is none.
        FormatError: The checkpoint is malformed.
        BackendError: A file is missing.
    """
    if format in (None, "serverlessllm") and (folder / SERVERLESSLLM_INDEX).is_file():
        return list_serverlessllm(folder)
    if format in (None, "dcp") and (folder / DCP_METADATA).is_file():
        return list_file(LocalFile(folder / DCP_METADATA), format)
    for kind, suffix, only in _SHARDED:
        if format not in (None, kind):
            continue
        index = _index_of(folder, suffix, only)
        if index is not None:
            return _list_indexed(folder, index, kind, list_file)
        names = files_named(folder, suffix)
        if kind == "torch":
            names = [name for name in names if name == only]
        if names:
            _check_numbers(names)
            return _joined(folder, names, kind, list_file)[0]
    reason = f"it is a folder that holds no checkpoint in {format or 'a known format'}"
    raise NoCheckpointError(str(folder), format or "checkpoint", reason)


def list_index(path: Path, format: str | None, list_file: ListFile) -> Listing | None:
    """List the checkpoint of an index; None if the file is not named as one. See `list_folder`."""
    if path.name == SERVERLESSLLM_INDEX and format in (None, "serverlessllm"):
        return list_serverlessllm(path.parent)
    if not path.name.endswith(_INDEX_SUFFIX):
        return None
    kind = "safetensors" if path.name.endswith(".safetensors" + _INDEX_SUFFIX) else "torch"
    return _list_indexed(path.parent, path.name, kind, list_file)


def _list_indexed(folder: Path, index: str, format: str, list_file: ListFile) -> Listing:
    """List the shards of an index as one checkpoint; see `_joined`.

    The index must agree with its shards about every tensor, either way. Shards are the files that it names and the
    files numbered like them. Other files beside them are ignored, as by `transformers`.

    Raises:
        FormatError: The index disagrees, or a name leads out of the folder.
        BackendError: A file is missing.
    """
    weight_map = _weight_map(folder, index)
    names = sorted({*weight_map.values(), *_numbered(folder, index)})
    listing, shards = _joined(folder, names, format, list_file)
    if shards != weight_map:
        name = min(dict(shards.items() ^ weight_map.items()))
        where, said = shards.get(name, "no shard"), weight_map.get(name, "none")
        raise MalformedFileError(
            str(folder / index), "index", f"tensor {name[:80]!r} is in {where}, and it says {said}"
        )
    return listing


def _joined(folder: Path, names: Sequence[str], format: str, list_file: ListFile) -> tuple[Listing, Mapping[str, str]]:
    """List files as one checkpoint, in this order; no two tensors may share a name.

    The metadata holds the values that no two files disagree about, and ``config``, the content of ``config.json``.

    Returns:
        The listing, and the file of every tensor, left out or not.

    Raises:
        FormatError: Two tensors share a name, or a name leads out of the folder.
        BackendError: A file is missing.
    """
    table = LocationTable()
    shards: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    disagreed: set[str] = set()
    for name in names:
        listing = list_file(LocalFile(file_in(folder, name)), format)
        try:
            table.join(listing)
        except FormatError as error:
            raise FormatError(f"{error} in {', '.join(names)[:200]}: name the one file that is meant") from error
        shards.update(dict.fromkeys((*listing.locations, *listing.left_out), name))
        for key, value in listing.metadata.items():
            if metadata.setdefault(key, value) != value:
                disagreed.add(key)
    metadata = {key: value for key, value in metadata.items() if key not in disagreed}
    config = _config(folder)
    if config is not None:
        metadata["config"] = config
    return table.listing(format, metadata), shards


def _check_numbers(names: Sequence[str]) -> None:
    """Check that no numbered shard (``model-00001-of-00003.safetensors``) is missing.

    Raises:
        FormatError: One is; the message names it.
    """
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is None:
            continue
        for number in range(1, min(int(match["all"]), _MAX_SHARDS) + 1):
            wanted = f"{match['stem']}-{number:0{len(match['number'])}}-of-{match['all']}{match['suffix']}"
            if wanted not in names:
                raise FormatError(f"{wanted} is missing, and {name} says that there is one")


def _numbered(folder: Path, index: str) -> list[str]:
    """List the files numbered as shards of an index of this name."""
    stem, _, suffix = index.removesuffix(_INDEX_SUFFIX).rpartition(".")
    shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{re.escape(suffix)}")
    return [name for name in files_named(folder, f".{suffix}") if shard.fullmatch(name)]


def _index_of(folder: Path, suffix: str, only: str) -> str | None:
    """Return the index of a folder's files with this suffix; None if there is none.

    Raises:
        FormatError: There are several, and none has the usual name.
    """
    found = files_named(folder, suffix + _INDEX_SUFFIX)
    usual = only + _INDEX_SUFFIX
    if len(found) > 1 and usual not in found:
        raise FormatError(f"there are {', '.join(found)[:200]}: name the one that is meant")
    return usual if usual in found else next(iter(found), None)


def _weight_map(folder: Path, index: str) -> Mapping[str, str]:
    fields = strict_json(_text(folder, index, _MAX_INDEX_BYTES))
    weight_map = fields.get("weight_map") if type(fields) is dict else None
    if type(weight_map) is not dict or not all(type(name) is str for name in weight_map.values()):
        raise MalformedFileError(str(folder / index), "index", "it maps no tensors to files")
    return weight_map


def _config(folder: Path) -> Any:
    try:
        return strict_json(_text(folder, _CONFIG, _MAX_CONFIG_BYTES)) if (folder / _CONFIG).is_file() else None
    except FormatError:
        return None


def _text(folder: Path, name: str, max_bytes: int) -> memoryview:
    file = LocalFile(file_in(folder, name))
    if file.size > max_bytes:
        raise FormatError(f"{name} has {file.size} bytes")
    return file.read(0, file.size)
