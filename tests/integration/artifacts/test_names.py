"""Names of any kind, paths that lead out, links, the store's own folder; and what a deletion leaves."""

from __future__ import annotations

import io
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from tensorcas_mlflow.backends import LocalPlainFiles
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.store import Store
from tests.integration.artifacts.odd_names import BINARY, NAMES, check_name

RUN_ID = uuid.uuid4().hex

Repo = TensorCasArtifactRepository


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return tmp_path / "experiment"


@pytest.fixture
def root(experiment: Path) -> Path:
    return experiment / RUN_ID / "artifacts"


@pytest.fixture
def repo(root: Path) -> Repo:
    return TensorCasArtifactRepository(f"tensorcas://{root}")


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """A folder to log, with a text and a binary on two levels."""
    inbox = tmp_path / "inbox"
    for folder in (inbox, inbox / "sub"):
        folder.mkdir()
        (folder / "note.txt").write_text("text")
        (folder / "weights.bin").write_bytes(BINARY)
    return inbox


def shown(repo: Repo, path: str | None = None) -> list[str]:
    return [info.path for info in repo.list_artifacts(path)]


def everything(repo: Repo) -> list[str]:
    return sorted(info.path for info in repo._iter_artifacts_recursive(""))


def refusal(call: Callable[[], object]) -> MlflowException:
    with pytest.raises(MlflowException) as caught:
        call()
    return caught.value


def error_code(call: Callable[[], object]) -> str:
    return str(refusal(call).error_code)


@pytest.mark.parametrize("name", NAMES)
def test_any_name_works_for_files_and_folders(repo: Repo, tmp_path: Path, name: str) -> None:
    check_name(repo, tmp_path / "source", name)

    assert everything(repo) == sorted(f"{n}/{name}/{name}" for n in (4, 1000))
    repo.delete_artifacts(f"1000/{name}")
    assert everything(repo) == ["1000", f"4/{name}/{name}"]


BAD_PATHS = ["..", "../other", "a/../../other", "a/..", "/etc", "//etc", "a\0b"]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_no_path_leads_out_of_the_root(repo: Repo, inbox: Path, path: str) -> None:
    repo.log_artifacts(inbox)
    calls: list[Callable[[], object]] = [
        lambda: repo.log_artifact(inbox / "note.txt", path),
        lambda: repo.log_artifact(inbox / "weights.bin", path),
        lambda: repo.log_artifacts(inbox, path),
        lambda: repo.log_artifact_from_stream(io.BytesIO(b"text"), "note.txt", path),
        lambda: repo.list_artifacts(path),
        lambda: repo._is_directory(path),
        lambda: list(repo._iter_artifacts_recursive(path)),
        lambda: repo.download_artifacts(path),
        lambda: repo._download_file(path, inbox / "out"),
        lambda: repo.get_local_path(path),
        lambda: repo.delete_artifacts(path),
    ]

    assert {error_code(call) for call in calls} == {"INVALID_PARAMETER_VALUE"}
    assert len(everything(repo)) == 4


@pytest.mark.parametrize("path", [".", "a/", "a//b", "./a", "a/./b"])
def test_a_path_to_write_has_the_one_form_mlflow_demands(repo: Repo, inbox: Path, path: str) -> None:
    assert error_code(lambda: repo.log_artifact(inbox / "note.txt", path)) == "INVALID_PARAMETER_VALUE"
    assert error_code(lambda: repo.log_artifacts(inbox, path)) == "INVALID_PARAMETER_VALUE"


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", ".tensorcas", ".artifact.uploading.x", "\udcff"])
def test_no_file_gets_an_invalid_name(repo: Repo, name: str) -> None:
    for data in (b"text", BINARY):
        assert error_code(lambda data=data: repo.log_artifact_from_stream(io.BytesIO(data), name)) == (
            "INVALID_PARAMETER_VALUE"
        )


def test_a_name_too_long_for_the_file_system_is_a_wrong_call(repo: Repo) -> None:
    call = lambda: repo.log_artifact_from_stream(io.BytesIO(b"text"), "x" * 300)  # noqa: E731

    assert error_code(call) == "INVALID_PARAMETER_VALUE"
    assert error_code(lambda: repo.download_artifacts("x" * 300)) == "INVALID_PARAMETER_VALUE"


@pytest.fixture
def at_store(experiment: Path, inbox: Path) -> Repo:
    """A repository whose root is the store's, with something in it."""
    repo = TensorCasArtifactRepository(f"tensorcas://{experiment}")
    repo.log_artifacts(inbox, "data")
    return repo


@pytest.mark.parametrize("name", [".tensorcas", ".TensorCAS"])
def test_the_stores_own_folder_is_not_to_be_seen(at_store: Repo, experiment: Path, inbox: Path, name: str) -> None:
    (experiment / ".TensorCAS").mkdir()  # as a file system would show it that does not tell the two apart
    (experiment / ".TensorCAS/format").touch()

    assert shown(at_store) == ["data"]
    assert shown(at_store, name) == shown(at_store, f"{name}/packs") == []
    assert not at_store._is_directory(name)
    assert at_store.get_local_path(f"{name}/format") is None
    assert error_code(lambda: at_store.download_artifacts(f"{name}/format")) == "RESOURCE_DOES_NOT_EXIST"
    assert error_code(lambda: at_store.download_artifacts(f"./{name}/format")) == "RESOURCE_DOES_NOT_EXIST"
    assert error_code(lambda: at_store._download_file(f"{name}/format", inbox / "x")) == "RESOURCE_DOES_NOT_EXIST"
    assert [path for path in everything(at_store) if "ensor" in path] == []


@pytest.mark.parametrize("folder", [".tensorcas", "data/.tensorcas", ".tensorcas/refs", ".TensorCAS"])
def test_nothing_is_written_into_the_stores_own_folder(at_store: Repo, inbox: Path, folder: str) -> None:
    for name in ("note.txt", "weights.bin"):
        assert error_code(lambda name=name: at_store.log_artifact(inbox / name, folder)) == "INVALID_PARAMETER_VALUE"
    assert error_code(lambda: at_store.log_artifacts(inbox, folder)) == "INVALID_PARAMETER_VALUE"


def test_a_folder_that_is_itself_a_store_is_not_logged(repo: Repo, inbox: Path) -> None:
    Store.init(inbox / "sub")

    assert error_code(lambda: repo.log_artifacts(inbox)) == "INVALID_PARAMETER_VALUE"
    assert shown(repo) == []


@pytest.mark.parametrize("path", [".tensorcas", ".tensorcas/refs", ".tensorcas/", "./.tensorcas"])
def test_the_stores_own_folder_is_not_deleted(at_store: Repo, path: str) -> None:
    at_store.delete_artifacts(path)

    assert Path(at_store.download_artifacts("data/weights.bin")).read_bytes() == BINARY


def test_deleting_a_file_leaves_its_neighbours(repo: Repo, experiment: Path, inbox: Path) -> None:
    repo.log_artifacts(inbox, "data")

    repo.delete_artifacts("data/weights.bin")
    repo.delete_artifacts("data/note.txt")

    assert everything(repo) == ["data/sub/note.txt", "data/sub/weights.bin"]
    assert len(Store.open(experiment).checkpoints()) == 1


@pytest.mark.parametrize("path", ["data", "data/", "data//", "./data"])
def test_deleting_a_folder_deletes_all_below_it(
    repo: Repo, root: Path, experiment: Path, inbox: Path, path: str
) -> None:
    repo.log_artifacts(inbox, "data")
    repo.log_artifacts(inbox, "database")

    repo.delete_artifacts(path)
    repo.delete_artifacts(path)

    assert shown(repo) == ["database"]
    assert not (root / "data").exists()
    assert len(Store.open(experiment).checkpoints()) == 2


@pytest.mark.parametrize("path", [None, "", "/.", "."])
def test_deleting_the_root_as_gc_does_leaves_the_store_and_other_runs(
    repo: Repo, root: Path, experiment: Path, inbox: Path, path: str | None
) -> None:
    other = TensorCasArtifactRepository(f"tensorcas://{experiment}/{uuid.uuid4().hex}/artifacts")
    other.log_artifacts(inbox)
    repo.log_artifacts(inbox)
    if path == "/.":
        assert error_code(lambda: repo.delete_artifacts(path)) == "INVALID_PARAMETER_VALUE"
        return

    repo.delete_artifacts(path)
    repo.delete_artifacts(path)

    assert not root.exists()
    assert shown(repo) == []
    assert len(everything(other)) == 4
    assert len(Store.open(experiment).checkpoints()) == 2


def test_deleting_the_stores_own_root_leaves_the_store_empty(at_store: Repo, experiment: Path, inbox: Path) -> None:
    at_store.delete_artifacts()

    assert [path.name for path in experiment.iterdir()] == [".tensorcas"]
    assert Store.open(experiment).checkpoints() == []
    at_store.log_artifacts(inbox)
    assert len(everything(at_store)) == 4


def test_deleting_above_stores_drops_what_they_keep(at_store: Repo, experiment: Path, tmp_path: Path) -> None:
    TensorCasArtifactRepository(f"tensorcas://{tmp_path}").delete_artifacts()

    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]
    assert Store.open(experiment).checkpoints() == []
    assert shown(at_store) == []


def test_a_later_artifact_may_take_a_deleted_ones_path_in_any_form(repo: Repo, inbox: Path) -> None:
    repo.log_artifact(inbox / "weights.bin", "data")
    repo.delete_artifacts("data")
    repo.log_artifacts(inbox, "data/weights.bin")

    assert len(everything(repo)) == 4


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    return outside


def test_links_that_lead_out_of_the_root_are_not_followed(repo: Repo, root: Path, inbox: Path, outside: Path) -> None:
    repo.log_artifact(inbox / "note.txt")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret.txt")
    (root / "packs").symlink_to(root.parents[1] / ".tensorcas")

    assert shown(repo) == everything(repo) == ["note.txt"]
    assert shown(repo, "folder") == shown(repo, "packs") == []
    for path in ("file", "folder/secret.txt", "packs/format"):
        assert repo.get_local_path(path) is None
        assert error_code(lambda path=path: repo.download_artifacts(path)) == "RESOURCE_DOES_NOT_EXIST"
    for name in ("note.txt", "weights.bin"):
        for folder in ("folder", "folder/sub"):
            call = lambda name=name, folder=folder: repo.log_artifact(inbox / name, folder)  # noqa: E731
            assert error_code(call) == "INVALID_PARAMETER_VALUE"
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]


def test_a_link_does_not_open_another_store(repo: Repo, root: Path, inbox: Path, tmp_path: Path) -> None:
    other = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/other")
    other.log_artifact(inbox / "weights.bin", "data")
    repo.log_artifact(inbox / "note.txt")
    (root / "link").symlink_to(tmp_path / "other")

    assert shown(repo, "link/data") == []
    assert error_code(lambda: repo.download_artifacts("link/data/weights.bin")) == "RESOURCE_DOES_NOT_EXIST"
    repo.delete_artifacts("link/data")
    assert everything(other) == ["data/weights.bin"]


def test_deleting_removes_links_and_not_what_they_lead_to(repo: Repo, root: Path, inbox: Path, outside: Path) -> None:
    repo.log_artifact(inbox / "note.txt", "data")
    (root / "data/folder").symlink_to(outside)
    (root / "data/file").symlink_to(outside / "secret.txt")

    repo.delete_artifacts("data/folder/secret.txt")
    repo.delete_artifacts("data/folder")
    assert sorted(path.name for path in (root / "data").iterdir()) == ["file", "note.txt"]
    repo.delete_artifacts("data")
    assert not (root / "data").exists()
    assert (outside / "secret.txt").read_text() == "secret"


def test_a_link_to_a_file_below_the_root_is_that_file(repo: Repo, root: Path, inbox: Path) -> None:
    repo.log_artifact(inbox / "note.txt", "data")
    (root / "latest").symlink_to("data/note.txt")

    assert shown(repo) == ["data", "latest"]
    assert Path(repo.download_artifacts("latest")).read_text() == "text"


def test_links_that_lead_nowhere_or_in_circles_are_not_there(repo: Repo, root: Path, inbox: Path) -> None:
    repo.log_artifact(inbox / "note.txt")
    (root / "nowhere").symlink_to("missing")
    (root / "circle").symlink_to("circle")
    (root / "up").symlink_to("..")

    assert shown(repo) == everything(repo) == ["note.txt"]
    for path in ("nowhere", "circle", "up"):
        assert error_code(lambda path=path: repo.download_artifacts(path)) == "RESOURCE_DOES_NOT_EXIST"


def test_links_that_stay_below_the_root_are_read_as_mlflow_reads_them(repo: Repo, root: Path, tmp_path: Path) -> None:
    (root / "model/sub").mkdir(parents=True)
    (root / "model/empty").mkdir()
    for name in ("model/note.txt", "model/sub/deep.txt"):
        (root / name).write_text(name)
    for name, target in (
        ("latest", "model"),
        ("best", "latest/sub"),
        ("model/again", "sub"),
        ("one.txt", "best/deep.txt"),
    ):
        (root / name).symlink_to(target)
    mlflows = LocalArtifactRepository(str(root))

    def seen(repository: ArtifactRepository, path: str) -> list[tuple[str, bool, int | None]]:
        return [(info.path, info.is_dir, info.file_size) for info in repository.list_artifacts(path)]

    def downloaded(repository: ArtifactRepository, path: str) -> dict[str, str | None]:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        found = Path(repository.download_artifacts(path, str(out)))
        return {str(each.relative_to(out)): each.read_text() if each.is_file() else None for each in found.rglob("*")}

    for folder in ("", "model", "latest", "latest/sub", "latest/again", "best", "model/again"):
        assert seen(repo, folder) == seen(mlflows, folder)
        assert downloaded(repo, folder) == downloaded(mlflows, folder)
    assert repo.get_local_path("latest/again/deep.txt") == str(root / "model/sub/deep.txt")
    assert Path(repo.download_artifacts("best/deep.txt")).read_text() == "model/sub/deep.txt"


def test_links_lead_to_what_the_store_keeps(repo: Repo, root: Path, inbox: Path) -> None:
    repo.log_artifacts(inbox, "model")
    (root / "latest").symlink_to("model")
    (root / "best.bin").symlink_to("latest/weights.bin")

    assert shown(repo) == ["best.bin", "latest", "model"]
    assert shown(repo, "latest") == ["latest/note.txt", "latest/sub", "latest/weights.bin"]
    assert len(everything(repo)) == 9
    folder = Path(repo.download_artifacts(""))
    for name in ("best.bin", "latest/weights.bin", "latest/sub/weights.bin"):
        assert (folder / name).read_bytes() == BINARY
        assert Path(repo.download_artifacts(name)).read_bytes() == BINARY


def test_links_that_lead_round_are_entered_once(repo: Repo, root: Path, inbox: Path) -> None:
    repo.log_artifacts(inbox, "a")
    repo.log_artifacts(inbox, "b")
    (root / "a/up").symlink_to("..")
    (root / "a/b").symlink_to("../b")
    (root / "b/a").symlink_to("../a")

    assert shown(repo, "a") == ["a/b", "a/note.txt", "a/sub", "a/weights.bin"]
    assert shown(repo, "a/b") == ["a/b/note.txt", "a/b/sub", "a/b/weights.bin"]
    assert len(everything(repo)) == 16
    assert "'b/a' is a link" in str(refusal(lambda: repo.download_artifacts("a/b/a/note.txt")))


def test_a_link_that_is_not_followed_is_named(repo: Repo, root: Path, inbox: Path, outside: Path) -> None:
    repo.log_artifact(inbox / "note.txt")
    (root / "folder").symlink_to(outside)

    for path in ("folder/secret.txt", "folder"):
        message = str(refusal(lambda path=path: repo.download_artifacts(path)))
        assert "'folder' is a link that leads out of the artifact root" in message


def test_nothing_is_deleted_through_a_link(repo: Repo, root: Path, inbox: Path) -> None:
    repo.log_artifacts(inbox, "model")
    (root / "latest").symlink_to("model")

    for name in ("note.txt", "weights.bin", "sub"):
        message = str(refusal(lambda name=name: repo.delete_artifacts(f"latest/{name}")))
        assert f"delete 'model/{name}'" in message
    repo.delete_artifacts("latest")
    assert shown(repo) == ["model"]
    assert len(everything(repo)) == 4


@pytest.mark.parametrize("swapped", ["data", "data/note.txt"])
def test_a_link_that_is_put_there_while_a_file_is_opened_is_not_followed(
    swapped: str, repo: Repo, root: Path, inbox: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.log_artifact(inbox / "note.txt", "data")
    (outside / "note.txt").write_text("secret")
    find = LocalPlainFiles.find

    def find_and_swap(self: LocalPlainFiles, path: str) -> Path | None:
        found = find(self, path)
        if path == "data/note.txt" and not (root / swapped).is_symlink():
            (root / swapped).rename(root / "aside")
            (root / swapped).symlink_to(outside / "note.txt" if swapped.endswith("txt") else outside)
        return found

    monkeypatch.setattr(LocalPlainFiles, "find", find_and_swap)

    assert error_code(lambda: repo.download_artifacts("data/note.txt")) == "RESOURCE_DOES_NOT_EXIST"


def test_a_root_may_be_reached_through_links(experiment: Path, inbox: Path, tmp_path: Path) -> None:
    experiment.mkdir()
    (tmp_path / "link").symlink_to(experiment)
    real, linked = (TensorCasArtifactRepository(f"tensorcas://{tmp_path}/{name}") for name in ("experiment", "link"))

    linked.log_artifacts(inbox, "data")

    assert everything(real) == everything(linked)
    assert Path(real.download_artifacts("data/weights.bin")).read_bytes() == BINARY
    linked.delete_artifacts()
    assert shown(real) == []


def test_a_file_is_logged_through_a_link_to_it(repo: Repo, inbox: Path) -> None:
    (inbox / "link.bin").symlink_to("weights.bin")

    repo.log_artifact(inbox / "link.bin")

    assert Path(repo.download_artifacts("link.bin")).read_bytes() == BINARY
