"""Names that a file system and an object store keep, but that a careless path or URL breaks."""

from __future__ import annotations

from pathlib import Path

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

NAMES = [
    "with space.x",
    " leading and trailing ",
    "größe-模型-🦄.x",
    "100%.x",
    "a%20b%2Fc.x",
    "a@b#c?d=e&f+g.x",
    "semi;colon:'\"$(x)`~!.x",
    "back\\slash.x",
    "new\nline\ttab.x",
    "@x",
    "~x",
    ".hidden",
    "-",
    "…" * 70,
    "x" * 250,
    "tensorcas",
    ".tensorcas.bak",
]
TEXT = b"text"
BINARY = b"\0" * 1000


def check_name(repo: TensorCasArtifactRepository, inbox: Path, name: str) -> None:
    """Log a text and a binary file of a name into folders of that name, and check that both come back.

    The text is then at ``4/<name>/<name>``, and the binary at ``1000/<name>/<name>``.
    """
    for data in (TEXT, BINARY):
        source = inbox / name
        source.parent.mkdir(exist_ok=True)
        source.write_bytes(data)
        folder = f"{len(data)}/{name}"
        repo.log_artifact(source, folder)

        assert [info.path for info in repo.list_artifacts(str(len(data)))] == [folder]
        assert [info.path for info in repo.list_artifacts(folder)] == [f"{folder}/{name}"]
        assert Path(repo.download_artifacts(f"{folder}/{name}")).read_bytes() == data
        assert repo._is_directory(folder)
