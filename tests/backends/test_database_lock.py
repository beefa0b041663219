"""No commit and no checkpoint of a database runs without the lock of its folder, so the two never run at once."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import FolderBackend, _database
from tensorcas_mlflow.backends._database import _try_lock


def test_no_checkpoint_runs_beside_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The WAL-reset defect of SQLite 3.7.0 to 3.51.2 needs a commit between two checkpoints of others."""
    seen: list[tuple[str, bool]] = []

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if any(word in sql for word in ("COMMIT", "BEGIN IMMEDIATE", "wal_checkpoint")):
                with _try_lock(str(tmp_path)) as is_free:
                    seen.append((sql, is_free))
            return super().execute(sql, *args)

    backend = FolderBackend(tmp_path)
    backend.prepare(database=True)
    connect = sqlite3.connect
    monkeypatch.setattr(_database.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Watched))
    monkeypatch.setattr(_database, "_CHECKPOINT_BYTES", 20_000)
    for number in range(20):
        token = backend.put_new(f"intents/{number:032x}", [b"x" * 3000], durable=False)
        backend.promote(f"intents/{number:032x}", f"refs/runs/r/@{number}", b"y", token=token, replace=False)
    backend.delete("refs/runs/r/@0")
    backend.sweep(0)
    backend._database.close()

    assert {"COMMIT", "BEGIN IMMEDIATE", "PRAGMA wal_checkpoint(TRUNCATE)"} <= {sql for sql, _ in seen}
    assert [sql for sql, is_free in seen if is_free] == []
    with connect(tmp_path / "blobs.db") as other:
        assert other.execute("SELECT count(*) FROM records WHERE number > 0").fetchone() == (21,)
