"""Saves, deletions and sweeps of several processes on a disk whose syncs fail at random, and then a power cut."""

from __future__ import annotations

import errno
import os
import random
import uuid
from collections import OrderedDict, defaultdict
from pathlib import Path

import pytest
from tensorcas_mlflow.backends._log_records import HEADER_BYTES

from tensorcas_mlflow.backends import LoggedBackend, _log_writer
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError

_fsync = os.fsync


class Disk:
    """Model of a disk below the page cache: it loses the bytes of a failed sync, and the next sync succeeds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rate = rng.choice([0.05, 0.15, 0.3])
        self._evicts = rng.choice([0, 0.5])
        self._synced: dict[str, int] = {}
        self._lost: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def sync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/logs/+staging-" in path:  # the header of a new log
            if self._rng.random() < self._rate:
                raise OSError(errno.EIO, "no disk")
            return
        if not path.endswith((".log", ".dead")):
            _fsync(descriptor)
            return
        start, stop = self._durable(path), os.fstat(descriptor).st_size
        self._synced[path] = stop
        if self._rng.random() >= self._rate:
            return
        self._lost[path].append((start, stop))
        if self._rng.random() < self._evicts:  # from now on the system reads the bytes from the disk
            with open(path, "r+b") as file:
                file.seek(start)
                file.write(bytes(max(0, stop - start)))
        raise OSError(errno.EIO, "no disk")

    def cut_power(self, folder: Path) -> None:
        for path in (*folder.glob("*.log"), *folder.glob("*.dead")):
            data, synced = bytearray(path.read_bytes()), self._durable(str(path))
            for start, stop in self._lost[str(path)]:
                data[start:stop] = bytes(max(0, stop - start))
            path.write_bytes(data[: self._rng.choice([synced, self._rng.randint(synced, max(synced, len(data)))])])

    def _durable(self, path: str) -> int:
        """Return the size of a file at its last sync; a log gets its name after the sync of its header."""
        return self._synced.get(path, HEADER_BYTES if path.endswith(".log") else 0)


class Process:
    """A process with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self.backend = LoggedBackend(folder)
        self.writers: OrderedDict[str, _log_writer.LogWriter] = OrderedDict()

    def kill(self) -> None:
        for writer in self.writers.values():
            if writer.descriptor in LockedFile._held:
                LockedFile.release(writer.descriptor)


def save(
    backend: LoggedBackend, ref: str, name: str, packs: list[str], rng: random.Random, bases: dict[str, list[str]]
) -> None:
    """Commit a ref with a new pack, and perhaps with an earlier one."""
    pack = f"packs/{name}"
    intent = f"intents/{uuid.uuid4().hex}"
    token = backend.put_new(intent, [b"x"], durable=False)
    backend.put_all([(pack, [rng.randbytes(rng.choice([200, 100_000]))])])
    bases[name] = [pack]
    try:
        if packs and rng.random() < 0.5:
            base = rng.choice(packs)
            bases[name] += {base} - backend.missing([base])
        if rng.random() < 0.3:
            backend._flush()
        packs.append(pack)
        backend.promote(intent, ref, name.encode(), token=token, replace=True)
    except BackendError:
        backend.discard([pack])
        raise


def check_failed_syncs(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a random history, cut the power, and check each ref; return the number of commits."""
    rng = random.Random(seed)
    disk = Disk(rng)
    monkeypatch.setattr(os, "fsync", disk.sync)
    LoggedBackend(folder).make_logs()
    processes = [Process(folder) for _ in range(3)]
    expected: defaultdict[str, set[str | None]] = defaultdict(lambda: {None})
    packs: list[str] = []
    bases: dict[str, list[str]] = {}
    n_commits = 0
    for step in range(rng.randrange(5, 60)):
        number = rng.randrange(3)
        if rng.random() < 0.08:
            processes[number].kill()
            processes[number] = Process(folder)
        backend = processes[number].backend
        monkeypatch.setattr(_log_writer, "_writers", processes[number].writers)
        ref, act = f"refs/@{rng.randrange(4)}", rng.random()
        try:
            if act < 0.6:
                expected[ref] = {*expected[ref], f"{step}"}
                save(backend, ref, f"{step}", packs, rng, bases)
                expected[ref] = {f"{step}"}
                n_commits += 1
            elif act < 0.75:
                expected[ref] = {*expected[ref], None}
                backend.delete(ref)
            elif act < 0.85:
                backend.settle("refs")
            else:
                backend.sweep(3600)
        except (BackendError, CorruptError):  # a process that has read lost records may meet their damage
            pass
    for process in processes:
        process.kill()
    monkeypatch.setattr(_log_writer, "_writers", OrderedDict())
    monkeypatch.setattr(os, "fsync", _fsync)
    disk.cut_power(folder / "logs")

    after = LoggedBackend(folder)
    for ref, names in expected.items():
        try:
            name = after.get(ref).decode()
        except BlobNotFoundError:
            assert None in names
        else:
            assert name in names
            assert after.missing(bases[name]) == set()
    return n_commits


def test_power_cut_after_failed_syncs_loses_no_acknowledged_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(check_failed_syncs(tmp_path / str(seed), seed, monkeypatch) for seed in range(40)) > 100


@pytest.mark.long
def test_power_cut_after_failed_syncs_loses_no_acknowledged_commit_in_any_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(check_failed_syncs(tmp_path / str(seed), seed, monkeypatch) for seed in range(40, 1000)) > 2000
