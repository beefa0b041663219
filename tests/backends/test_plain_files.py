"""Plain files of a local root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import NewText, Root, open_plain_files
from tensorcas_mlflow.backends._plain_files import _Staged


def test_removed_folder_leaves_no_other_text_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [NewText(path=f"{folder}/text", data=b"a text") for folder in "abcdefgh"]
    name, sync, synced = _Staged.name, os.fsync, set[str]()

    def name_and_remove(file: _Staged, *, replace: bool = True) -> None:
        name(file, replace=replace)
        if file.place.parent.name != "h":
            shutil.rmtree(file.place.parent)  # as another process may do
        else:
            synced.clear()

    def note(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(_Staged, "name", name_and_remove)
    monkeypatch.setattr(os, "fsync", note)
    open_plain_files(Root.parse(tmp_path)).write_all(texts)

    assert (tmp_path / "h/text").read_bytes() == b"a text"
    assert str(tmp_path / "h") in synced
