"""Folders that hold one checkpoint in several files, as `transformers` writes and the hub's cache keeps them.

Shards and their index are described at https://huggingface.co/docs/transformers/big_models: a JSON object whose
``weight_map`` maps every tensor's name to the file that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorcas_mlflow.containers import strict_json
from tensorcas_mlflow.errors import FormatError, MalformedFileError
from tensorcas_mlflow.formats._folder import file_in, files_named
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, LocalFile

INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,8})-of-(?P<all>\d{1,8})(?P<suffix>\.\w+)")
_MOST_SHARDS = 100_000
_CONFIG = "config.json"
_MAX_INDEX_BYTES = 32 << 20
_MAX_CONFIG_BYTES = 1 << 20

ListFile = Callable[[LocalFile], Listing]


def list_shards(folder: Path, names: Sequence[str], format: str, list_file: ListFile) -> Listing:
    """List files as one checkpoint, in this order; no two of their tensors may be called alike.

    The metadata are those that no two files disagree about, and ``config``, what ``config.json`` says if it is there.

    Raises:
        FormatError: Two tensors have one name, or a name leads out of the folder.
        BackendError: A file is not there.
    """
    listing, _ = _joined(folder, names, format, list_file)
    return listing


def list_indexed(folder: Path, index: str, format: str, list_file: ListFile) -> Listing:
    """List the shards that an index names as one checkpoint; see `list_shards`.

    What the index says of a tensor must be so, and it must say it of every tensor of its shards, which are the files it
    names and those that are numbered like them. Other files beside them are left alone, as `transformers` does.

    Raises:
        FormatError: It is not so, or a name leads out of the folder.
        BackendError: A file is not there.
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
    """List files as one, and say by the name of every tensor, left out or not, in which file it is."""
    sources: list[ByteSource] = []
    places = Places()
    shards: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    disagreed: set[str] = set()
    for name in names:
        listing = list_file(LocalFile(file_in(folder, name)))
        assert isinstance(listing.places, Places)
        try:
            places.join(listing.places, len(sources))
        except FormatError as error:
            raise FormatError(f"{error} in {', '.join(names)[:200]}: name the one file that is meant") from error
        sources += listing.sources
        shards.update(dict.fromkeys((*listing.places, *listing.left_out), name))
        for key, value in listing.metadata.items():
            if metadata.setdefault(key, value) != value:
                disagreed.add(key)
    metadata = {key: value for key, value in metadata.items() if key not in disagreed}
    config = _config(folder)
    if config is not None:
        metadata["config"] = config
    return Listing(format=format, sources=sources, places=places, metadata=metadata, left_out=places.left_out), shards


def check_numbers(names: Sequence[str]) -> None:
    """See that of files that are numbered as shards (``model-00001-of-00003.safetensors``) none is missing.

    Raises:
        FormatError: One is; the message names it.
    """
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is None:
            continue
        for number in range(1, min(int(match["all"]), _MOST_SHARDS) + 1):
            wanted = f"{match['stem']}-{number:0{len(match['number'])}}-of-{match['all']}{match['suffix']}"
            if wanted not in names:
                raise FormatError(f"{wanted} is not there, and {name} says that there is one")


def _numbered(folder: Path, index: str) -> list[str]:
    """List the files that are numbered as shards of an index of this name."""
    stem, _, suffix = index.removesuffix(INDEX_SUFFIX).rpartition(".")
    shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{re.escape(suffix)}")
    return [name for name in files_named(folder, f".{suffix}") if shard.fullmatch(name)]


def index_of(folder: Path, suffix: str) -> str | None:
    """Find the index of a folder's files that end so; None if there is none.

    Raises:
        FormatError: There are several, and none of them has the usual name.
    """
    found = files_named(folder, suffix + INDEX_SUFFIX)
    usual = {".safetensors": "model", ".bin": "pytorch_model"}[suffix] + suffix + INDEX_SUFFIX
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
