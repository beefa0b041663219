"""Names in files of other programs that are not UTF-8 keep apart, also between two files."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorcas_mlflow import open_checkpoint

NAMES = ["w\udc80", "w\udc81", "w\ufffd"]


def write_tar(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in names:
            data = io.BytesIO()
            np.save(data, np.ones(300))
            member = tarfile.TarInfo(f"{name}.npy")
            member.size = len(data.getvalue())
            archive.addfile(member, io.BytesIO(data.getvalue()))


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "tar": write_tar,
    "torch": lambda path, names: torch.save({name: torch.ones(300) for name in names}, path),
    "pickle": lambda path, names: path.write_bytes(pickle.dumps({name: np.ones(300) for name in names})),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_name_that_is_no_utf8_is_listed_as_itself_alone(kind: str, tmp_path: Path) -> None:
    listed = []
    for number, names in enumerate([NAMES, *([name] for name in NAMES)]):
        WRITERS[kind](tmp_path / f"{number}.{kind}", names)
        with open_checkpoint(tmp_path / f"{number}.{kind}") as reader:
            listed.append(list(reader))

    together, *alone = listed
    assert sorted(together) == sorted(name for names in alone for name in names)
    assert len(set(together)) == len(NAMES)
