"""The files of a folder that belong together, and which of them may be opened.

An index names files, and a folder may hold links; neither may lead out of the folder. The one exception is how the
cache of Hugging Face's hub links files: ``models--<name>/snapshots/<revision>/<file>`` to
``models--<name>/blobs/<digest>`` (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

from pathlib import Path

from tensorcas_mlflow.errors import BackendError, FormatError


def file_in(folder: Path, name: str) -> Path:
    """Find a file of a folder by a name that somebody else has chosen.

    Raises:
        FormatError: The name is more than a name, or what it names lies somewhere else.
        BackendError: There is no such file.
    """
    if name in ("", ".", "..") or "\0" in name or "/" in name or "\\" in name:
        raise FormatError(f"{name[:80]!r} is no file of the folder")
    try:
        home, file = folder.resolve(strict=True), (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise BackendError("open", str(folder / name), f"{type(error).__name__}: {error}") from error
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if file.parent not in homes:
        raise FormatError(f"{name[:80]!r} is a link to a file outside of the folder")
    return file


def files_named(folder: Path, suffix: str) -> list[str]:
    """List the names of a folder's files that end so, hidden ones left out, sorted.

    Raises:
        BackendError: The folder cannot be read.
    """
    try:
        return sorted(
            path.name
            for path in folder.iterdir()
            if path.name.endswith(suffix) and not path.name.startswith(".") and path.is_file()
        )
    except OSError as error:
        raise BackendError("list", str(folder), f"{type(error).__name__}: {error}") from error
