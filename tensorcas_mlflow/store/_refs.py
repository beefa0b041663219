"""Operations of a store on its refs alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from urllib.parse import unquote

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend, Token
from tensorcas_mlflow.blob_names import list_blobs, list_dir
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.store._keys import STAND_INS, artifact_key, artifact_prefix, label_of
from tensorcas_mlflow.store._records import Ref, read_ref, read_refs_around

_log = logging.getLogger(__name__)


class Refs:
    """The refs of one store."""

    backend: Backend

    def ref(self, key: str) -> Ref | None:
        """Read the ref at a key, or return None."""
        return read_ref(self.backend, key)

    def artifact(self, path: str) -> Ref | None:
        """Return the ref of an artifact path, relative to the root; None if there is none."""
        return None if path == "" else read_ref(self.backend, artifact_key(path))

    def artifacts(self, directory: str = "", *, damaged: list[str] | None = None) -> tuple[list[Ref], list[str]]:
        """List an artifact directory.

        Args:
            directory: The directory; ``""`` is the root.
            damaged: Receives the paths of damaged refs in it, as far as their keys show them. Without it they raise.

        Returns:
            The refs directly in it, and the names of subdirectories with refs below them.

        Raises:
            CorruptError: A ref is damaged.
        """
        blobs, segments = list_dir(self.backend, artifact_prefix(directory))
        refs = [ref for ref in self._read((info.key for info in blobs), damaged) if ref.path is not None]
        prefix = f"{directory}/" if directory else ""

        def name_of(segment: str) -> str | None:
            # The segment is an encoding of the name; the refs below contain the name itself.
            name = None
            for info in list_blobs(self.backend, f"{artifact_prefix(directory)}/{segment}"):
                refs, errors = read_refs_around(self.backend, [info.key])
                for ref in refs:
                    if ref.path is not None:
                        return ref.path.removeprefix(prefix).split("/")[0]
                if errors:
                    name = unquote(segment)  # unless the name was long
            return name

        names = threads.ordered_map(name_of, segments, waits=True) if self.backend.is_remote else map(name_of, segments)
        return refs, sorted({name for name in names if name is not None})

    def walk_artifacts(self, directory: str = "", *, damaged: list[str] | None = None) -> list[Ref]:
        """List all refs below an artifact directory, by path; ``damaged`` is that of `artifacts`."""
        keys = (info.key for info in list_blobs(self.backend, artifact_prefix(directory)))
        return sorted(self._read(keys, damaged), key=lambda ref: ref.path or "")

    def _read(self, keys: Iterable[str], damaged: list[str] | None) -> list[Ref]:
        refs, errors = read_refs_around(self.backend, keys)
        for key, error in errors.items():
            if damaged is None:
                raise error
            damaged.append(label_of(key) or key)
        return refs

    def artifact_token(self, path: str) -> Token | None:
        """Return a token of an artifact path's ref, different from its replacement's; None if there is no ref."""
        info = self.backend.stat(artifact_key(path))
        return None if info is None else info.token

    def drop_artifact(self, path: str, token: Token | None) -> bool:
        """Drop the ref of an artifact path if it still has the token; return whether it had."""
        return token is not None and self.backend.withdraw(artifact_key(path), token)

    def drop_artifacts(self, path: str) -> int:
        """Drop the ref of an artifact path and all refs below it; ``""`` means all artifacts.

        The next collection removes their data.

        Returns:
            The number of dropped refs; dropping none is no error.
        """
        keys = [info.key for info in list_blobs(self.backend, artifact_prefix(path))]
        if path and self.backend.stat(artifact_key(path)) is not None:
            keys.append(artifact_key(path))
        threads.run_all(self.backend.delete, keys, waits=self.backend.is_remote)
        return len(keys)

    def drop(self, ref: Ref) -> None:
        """Drop one ref; a missing one is no error."""
        self.backend.delete(ref.key)

    def checkpoints(self) -> list[Ref]:
        """List every ref of the store except stand-ins, in the order of their creation.

        A damaged ref is left out, with a warning.
        """
        refs, damaged = self.readable_checkpoints()
        for error in damaged.values():
            _log.warning("%s; it is left out, and `tensorcas verify` says more", error)
        return refs

    def readable_checkpoints(self) -> tuple[list[Ref], dict[str, CorruptError]]:
        """List refs like `checkpoints`, and the error of each damaged one, by its key."""
        keys = (info.key for info in list_blobs(self.backend, "refs"))
        refs, damaged = read_refs_around(self.backend, (key for key in keys if not key.startswith(f"{STAND_INS}/")))
        return sorted(refs, key=lambda ref: (ref.created, ref.key)), damaged
