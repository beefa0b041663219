"""Artifacts through a server whose destination is a store, from clients that know nothing of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import yaml
from mlflow import MlflowClient

from tests.deploy.calls import (
    contents,
    download,
    failure,
    fill,
    log_file,
    log_folder,
    new_experiment,
    new_run,
    pack_bytes,
    refs,
    root_of,
    sizes,
)
from tests.deploy.clients import Client
from tests.deploy.servers import Server

pytestmark = pytest.mark.long

BINARY = b"\0" + bytes(range(256)) * 4000


def plugin_traces() -> list[str]:
    from mlflow.store.artifact import artifact_repository_registry as registry

    found = [scheme for scheme in registry._artifact_repository_registry._registry if "tensorcas" in scheme]
    try:
        import tensorcas_mlflow
    except ModuleNotFoundError:
        return found
    return [*found, str(tensorcas_mlflow)]


def test_the_client_has_no_plugin(plain_client: Client) -> None:
    assert plain_client(plugin_traces) == []


def test_artifacts_of_new_experiments_go_through_the_server(plain_client: Client) -> None:
    assert plain_client(root_of, plain_client(new_run)).startswith("mlflow-artifacts:/")


def test_folders_come_back_bit_for_bit_through_every_address(
    proxy: Server, plain_client: Client, tmp_path: Path
) -> None:
    files = {"note.txt": b"text", "sub/weights.bin": BINARY, "sub/deep/er/x.npy": BINARY[:1000]}
    run_id = plain_client(log_folder, fill(tmp_path / "inbox", files), "folder")

    assert plain_client(sizes, run_id) == {"folder": None}
    assert plain_client(sizes, run_id, "folder/sub") == {"folder/sub/deep": None, "folder/sub/weights.bin": len(BINARY)}
    for address in (f"runs:/{run_id}/folder", plain_client(root_of, run_id) + "/folder"):
        assert contents(plain_client(download, address)) == files
    assert Path(plain_client(download, f"runs:/{run_id}/folder/sub/weights.bin")).read_bytes() == BINARY
    assert proxy.backend.stat("format") is not None


def log_one_of_each() -> tuple[str, dict[str, Any]]:
    from matplotlib import pyplot

    pixels = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    mlflow.set_experiment(experiment_id=new_experiment())
    with mlflow.start_run() as run:
        mlflow.log_text("a note", "notes/note.txt")
        mlflow.log_dict({"names": ["ä", "b"]}, "settings.json")
        mlflow.log_dict({"names": ["ä", "b"]}, "settings.yaml")
        mlflow.log_image(pixels, "image.png")
        mlflow.log_image(pixels, key="sample", step=3, synchronous=True)
        mlflow.log_figure(figure, "figure.png")
        mlflow.log_table({"x": [1, 2], "y": ["a", "b"]}, "table.json")
        mlflow.log_table({"x": [3], "y": ["c"]}, "table.json")
    root = run.info.artifact_uri
    return run.info.run_id, {
        "text": mlflow.artifacts.load_text(f"{root}/notes/note.txt"),
        "json": mlflow.artifacts.load_dict(f"{root}/settings.json"),
        "yaml": yaml.safe_load(mlflow.artifacts.load_text(f"{root}/settings.yaml")),
        "image": bool((np.array(mlflow.artifacts.load_image(f"{root}/image.png")) == pixels).all()),
        "figure": mlflow.artifacts.load_image(f"{root}/figure.png").size,
        "table": mlflow.load_table("table.json", run_ids=[run.info.run_id])["x"].tolist(),
    }


def test_whatever_mlflow_logs_can_be_loaded(plain_client: Client) -> None:
    run_id, loaded = plain_client(log_one_of_each)

    assert loaded["text"] == "a note"
    assert loaded["json"] == {"names": ["ä", "b"]}
    assert loaded["yaml"] == {"names": ["ä", "b"]}
    assert loaded["image"]
    assert loaded["figure"] == (640, 480)
    assert loaded["table"] == [1, 2, 3]
    assert len(plain_client(sizes, run_id, "images")) == 2


def trace_with_attachment(data: bytes) -> tuple[str, str]:
    from mlflow.tracing.attachments import Attachment

    mlflow.set_experiment(experiment_id=new_experiment())
    with mlflow.start_span("look") as span:
        span.set_inputs({"image": Attachment(content_type="image/png", content_bytes=data)})
        trace_id = span.trace_id
    mlflow.flush_trace_async_logging()
    trace = MlflowClient().get_trace(trace_id)
    return trace_id, trace.data.spans[0].inputs["image"]


def test_attachments_of_traces_are_kept(proxy: Server, plain_client: Client) -> None:
    data = b"\x89PNG\r\n\x1a\n" + BINARY[:5000]
    trace_id, reference = plain_client(trace_with_attachment, data)

    attachment = reference.removeprefix("mlflow-attachment://").partition("?")[0]
    shown = proxy.get("ajax-api/3.0/mlflow/get-trace-artifact", request_id=trace_id, path=attachment)
    assert (shown.status_code, shown.content) == (200, data)
    assert [name for name in refs(proxy) if attachment in name] != []


def test_an_artifact_that_is_logged_again_is_the_new_one(plain_client: Client, tmp_path: Path) -> None:
    # Each kind follows each: small text stays a file, all else goes to the store.
    versions = [b"text", BINARY, b"other text", b"", BINARY[::-1]]
    run_id = plain_client(new_run)
    shown = []
    for version in versions:
        (tmp_path / "a.bin").write_bytes(version)
        plain_client(log_file, run_id, str(tmp_path / "a.bin"))
        shown.append(Path(plain_client(download, f"runs:/{run_id}/a.bin")).read_bytes())

    assert shown == versions
    assert plain_client(sizes, run_id) == {"a.bin": len(BINARY)}


def test_an_empty_file_is_kept(plain_client: Client, tmp_path: Path) -> None:
    run_id = plain_client(log_folder, fill(tmp_path / "inbox", {"empty": b"", "sub/empty.bin": b""}))

    assert contents(plain_client(download, f"runs:/{run_id}/")) == {"empty": b"", "sub/empty.bin": b""}


def test_names_with_spaces_and_unicode_and_long_paths_are_kept(plain_client: Client, tmp_path: Path) -> None:
    names = [
        "with space/a b.bin",
        "größe/重み.bin",
        "ünï.txt",
        "a+b&c=d;e.bin",
        "~@(x)'!.bin",
        "/".join(f"{n}" * 80 for n in range(8)),
    ]
    names += ["/".join(f"{n}" * 80 for n in range(8)), "n" * 200 + ".bin", "tab.bin ", ".hidden/.x"]
    files = {name: name.encode() + b"\0" for name in names}
    run_id = plain_client(log_folder, fill(tmp_path / "inbox", files), "ein Ordner")

    assert contents(plain_client(download, f"runs:/{run_id}/ein Ordner")) == files


@pytest.mark.parametrize("n_files", [100, 2000])
def test_many_small_files_are_kept(plain_client: Client, tmp_path: Path, n_files: int) -> None:
    files = {f"{n % 7}/{n}.bin": b"\0" * (n % 2) + str(n).encode() for n in range(n_files)}
    run_id = plain_client(log_folder, fill(tmp_path / "inbox", files))

    assert len(plain_client(sizes, run_id)) == 7
    assert contents(plain_client(download, f"runs:/{run_id}/")) == files


def log_at_once(folder: str, n_clients: int) -> list[str]:
    with ThreadPoolExecutor(n_clients) as pool:
        return list(pool.map(lambda _: log_folder(folder), range(n_clients)))


def test_several_clients_that_upload_the_same_at_once_all_succeed(
    proxy: Server, plain_client: Client, tmp_path: Path
) -> None:
    data = np.random.default_rng(0).bytes(3_000_000)
    files = {"model/data/weights.bin": data, "model/MLmodel": b"flavors: {}\n"}
    run_ids = plain_client(log_at_once, fill(tmp_path / "inbox", files), 6)

    assert len(set(run_ids)) == 6
    for run_id in run_ids:
        assert contents(plain_client(download, f"runs:/{run_id}/")) == files
    # All six may have begun before the first had ended, but what comes later finds all of it.
    before = pack_bytes(proxy)
    plain_client(log_folder, str(tmp_path / "inbox"))
    assert pack_bytes(proxy) == before


def overwrite_at_once(run_id: str, folder: str, n_clients: int) -> None:
    with ThreadPoolExecutor(n_clients) as pool:
        list(pool.map(lambda n: log_file(run_id, f"{folder}/{n}/same.bin"), range(n_clients)))


def test_several_clients_that_write_one_artifact_leave_one_of_theirs(plain_client: Client, tmp_path: Path) -> None:
    versions = [bytes([n]) * 500_000 for n in range(5)]
    fill(tmp_path, {f"{n}/same.bin": data for n, data in enumerate(versions)})
    run_id = plain_client(new_run)
    plain_client(overwrite_at_once, run_id, str(tmp_path), len(versions))

    assert plain_client(sizes, run_id) == {"same.bin": 500_000}
    assert Path(plain_client(download, f"runs:/{run_id}/same.bin")).read_bytes() in versions


def test_errors_reach_the_client_at_once_and_say_what_is_wrong(
    proxy: Server, plain_client: Client, tmp_path: Path
) -> None:
    run_id = plain_client(log_folder, fill(tmp_path / "inbox", {"a.bin": BINARY}))
    n_requests = proxy.log.count(run_id)

    _, code, sentence = plain_client(failure, download, f"runs:/{run_id}/missing.bin")
    assert (code, "missing.bin" in sentence) == ("RESOURCE_DOES_NOT_EXIST", True)
    _, _, sentence = plain_client(failure, log_file, run_id, str(tmp_path / "inbox/a.bin"), "a.bin")
    assert "a.bin' is not a folder" in sentence
    answer = proxy.proxied("PUT", f"0/{run_id}/artifacts/.tensorcas/format", data=b"{}")
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    # A client repeats what it takes for a passing trouble, seven times over.
    assert proxy.log.count(run_id) - n_requests < 12
