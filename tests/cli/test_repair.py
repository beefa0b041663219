"""The command ``tensorcas repair``."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs
from tests.cli.conftest import Tensorcas

pytestmark = pytest.mark.usefixtures("store_of_files")
CHUNK_BYTES = 4096


def save(store: Store, step: int, *names: str) -> None:
    arrays = {name: np.random.default_rng(ord(name)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8) for name in names}
    with store.write_checkpoint(arrays) as pending:
        pending.commit(RefTarget(run_id="8f3c", step=step))


def damage(folder: Path, key: str, at: int) -> None:
    """Flip a bit of a file of a store; what is not writable is made so."""
    path = folder / ".tensorcas" / key
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of one step, of which a chunk is damaged."""
    store = Store.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES)
    save(store, 1, "a", "b")
    [(name, _)] = list_packs(store.backend)
    damage(tmp_path / "store", f"packs/{name}.pack", 100)
    return tmp_path / "store"


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """Another store that has the step too."""
    save(Store.init(tmp_path / "backup", chunk_bytes=CHUNK_BYTES), 1, "a", "b")
    return tmp_path / "backup"


def test_repair_of_a_sound_store_does_not_ask(tensorcas: Tensorcas, backup: Path) -> None:
    done = tensorcas("repair", "--root", backup)

    assert (done.status, done.out) == (0, "nothing is damaged\n")


@pytest.mark.long
@pytest.mark.parametrize("words", [["verify", "--full", "--json"], ["repair", "--dry-run", "--json"]])
def test_two_processes_find_what_one_finds(tensorcas: Tensorcas, folder: Path, words: list[str]) -> None:
    one = tensorcas(*words, "--root", folder)
    two = tensorcas(*words, "--root", folder, "--jobs", "2")

    assert (two.status, two.out) == (one.status, one.out)
    assert one.status == 3


def test_number_of_processes_of_a_cluster_is_refused(tensorcas: Tensorcas, folder: Path) -> None:
    done = tensorcas("verify", "--full", "--root", folder, "--engine", "ray", "--jobs", "2")

    assert done.status == 2
    assert "--jobs is for processes of this machine" in done.err


def test_repair_dry_run_prints_losses_and_changes_nothing(tensorcas: Tensorcas, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = tensorcas("repair", "--root", folder, "--dry-run")

    assert done.status == 3
    assert "1 good chunk to a new pack, this one to quarantine" in done.out
    assert "does not load now: run 8f3c step 1, tensor 'a', refs/runs/8f3c/@1: 1 of 2 chunks damaged" in done.out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_repair_changes_nothing_after_a_no(tensorcas: Tensorcas, folder: Path) -> None:
    done = tensorcas("repair", "--root", folder, typed="n\n")

    assert done.status == 3
    assert done.out.endswith("nothing was changed\n")
    assert not (folder / ".tensorcas" / "quarantine").exists()


def test_repair_names_losses_and_exits_with_3(tensorcas: Tensorcas, folder: Path) -> None:
    done = tensorcas("repair", "--root", folder, typed="yes\n")

    assert done.status == 3
    assert "is lost: run 8f3c step 1, tensor 'a', refs/runs/8f3c/@1: " in done.out
    assert "replaced 1 damaged pack, put 1 into quarantine" in done.out
    assert tensorcas("verify", "--root", folder, "--full").status == 3


def test_repair_from_a_backup_heals_everything(tensorcas: Tensorcas, folder: Path, backup: Path) -> None:
    done = tensorcas("repair", "--root", folder, "--from", backup, "--yes")

    assert done.status == 0
    assert "healed 1 chunk" in done.out
    assert tensorcas("verify", "--root", folder, "--full").status == 0


def test_repair_in_json_prints_plan_and_report(tensorcas: Tensorcas, folder: Path, backup: Path) -> None:
    dry = tensorcas("repair", "--root", folder, "--dry-run", "--json")
    done = tensorcas("repair", "--root", folder, "--from", backup, "--yes", "--json")

    [finding] = dry.json["plan"]["findings"]
    assert finding["is_mended"]
    assert dry.json["report"] is None
    [loss] = dry.json["plan"]["losses"]
    assert loss == {
        "key": "refs/runs/8f3c/@1",
        "checkpoint": "run 8f3c step 1",
        "tensors": ["a"],
        "reason": "1 of 2 chunks damaged or missing (1 tensor of 4,096 bytes)",
    }
    assert done.json["report"]["n_healed"] == 1
    assert done.json["report"]["losses"] == []


def test_repair_mends_a_damaged_format_on_which_other_commands_fail(
    tensorcas: Tensorcas, folder: Path, backup: Path
) -> None:
    damage(folder, "format", 0)
    failed = tensorcas("list", "--root", folder)
    done = tensorcas("repair", "--root", folder, "--from", backup, "--yes")

    assert failed.status == 1
    assert "`tensorcas repair` repairs it as far as possible" in failed.err
    assert done.status == 0
    assert "restored format" in done.out
    assert tensorcas("list", "--root", folder).status == 0


@pytest.mark.parametrize("is_gone", [False, True])
def test_verify_reports_a_damaged_format_and_everything_else(tensorcas: Tensorcas, folder: Path, is_gone: bool) -> None:
    if is_gone:
        (folder / ".tensorcas" / "format").unlink()
    else:
        damage(folder, "format", 0)
    done = tensorcas("verify", "--root", folder, "--full", "--json")

    assert done.status == 3
    assert sorted(problem["key"].partition("/")[0] for problem in done.json["problems"]) == ["format", "packs"]


def test_repair_on_a_full_disk_gives_nothing_up(
    tensorcas: Tensorcas, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def refuse(descriptor: int, data: bytes) -> int:
        if "/quarantine/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    [(name, _)] = list_packs(Store.open(folder).backend)
    monkeypatch.setattr(os, "write", refuse)
    done = tensorcas("repair", "--root", folder, "--abandon", f"packs/{name}.pack", "--yes")

    assert done.status == 1
    assert "No space left on device" in done.err
    assert "abandon" not in done.err
    assert (folder / ".tensorcas" / "packs" / f"{name}.pack").exists()


@pytest.mark.parametrize("kind", ["refs", "manifests"])
def test_repair_does_not_report_a_link_in_place_of_a_blob_as_restored(
    tensorcas: Tensorcas, backup: Path, tmp_path: Path, kind: str
) -> None:
    other = tmp_path / "other"
    assert tensorcas("copy", backup, other).status == 0
    [path] = [path for path in (backup / ".tensorcas" / kind).rglob("*") if path.is_file()]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    done = tensorcas("repair", "--root", backup, "--from", other, "--yes", "--json")

    assert done.status == 3
    assert done.json["report"]["restored"] == []
    [reason] = done.json["report"]["left"].values()
    assert "remove it, then repair again" in reason
    path.unlink()
    assert tensorcas("verify", "--root", backup).status == (3 if kind == "manifests" else 0)


def test_repair_reports_a_link_in_place_of_the_format(tensorcas: Tensorcas, backup: Path, tmp_path: Path) -> None:
    path = backup / ".tensorcas" / "format"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    done = tensorcas("repair", "--root", backup, "--yes")

    assert done.status == 1
    assert "remove it, then repair again" in done.err


def test_repair_refuses_the_store_itself_as_a_source(tensorcas: Tensorcas, folder: Path) -> None:
    done = tensorcas("repair", "--root", folder, "--from", folder, "--yes")

    assert done.status == 1
    assert "give --from another one" in done.err


def test_repair_escapes_names(tensorcas: Tensorcas, tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES)
    with store.write_checkpoint({"a\x1b[31m": np.arange(100)}) as pending:
        pending.commit(RefTarget(run_id="8f3c\x1b", step=1))
    for path in (tmp_path / "store" / ".tensorcas" / "packs").iterdir():
        path.unlink()
    done = tensorcas("repair", "--root", tmp_path / "store", "--dry-run")

    assert done.status == 3
    assert "\x1b" not in done.out


def test_repair_through_a_server_names_the_place_to_run_it(tensorcas: Tensorcas) -> None:
    done = tensorcas("repair", "--root", "mlflow-artifacts://host/1", "--yes")

    assert done.status == 1
    assert "repair cannot be done through the MLflow server" in done.err
