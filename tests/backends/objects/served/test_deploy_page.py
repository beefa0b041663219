"""The page on a team on S3, from top to bottom as it stands, by somebody who may do no more than it says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import requests

from tests.backends.objects.faults import Answer
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.proxy import proxy as way_to
from tests.backends.objects.requests_seen import Kind, Traffic
from tests.backends.objects.servers import S3Server
from tests.deploy.postgres import program
from tests.deploy.servers import ANSWER_S, START_S, environment, free_port

pytestmark = pytest.mark.long

PAGE = Path(__file__).resolve().parents[4] / "docs/deploy.md"
COMMAND_S = 300
ACTIONS = {
    Kind.GET: "s3:GetObject",
    Kind.HEAD: "s3:GetObject",
    Kind.PUT: "s3:PutObject",
    Kind.CREATE: "s3:PutObject",
    Kind.PART: "s3:PutObject",
    Kind.COMPLETE: "s3:PutObject",
    Kind.DELETE: "s3:DeleteObject",
    Kind.ABORT: "s3:AbortMultipartUpload",
    Kind.LIST: "s3:ListBucket",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of the page."""

    section: str
    language: str
    text: str


def blocks() -> list[Block]:
    """All blocks of the page, in order."""
    found: list[Block] = []
    for section in re.split(r"^#+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        title = section.partition("\n")[0]
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL):
            found.append(Block(section=title, language=language, text=text))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Results of the page's commands."""

    printed: dict[str, str]
    """By section, in one text each."""
    traffic: Traffic
    """All that was asked of S3 since the store was made."""
    folder: Path
    listed: list[str]
    """Artifacts of a training machine's run, as the server lists them."""


def settings(database: str, way: Proxy, s3: S3Server, folder: Path) -> dict[str, str]:
    """The page's own settings, but for where things are on this machine."""
    [block] = [block for block in blocks() if block.section == "Settings" and "export" in block.text]
    names = re.findall(r"^export (\w+)=", block.text, flags=re.MULTILINE)
    shown = "".join(f'echo "{name}=${name}"\n' for name in names)
    done = subprocess.run(["bash", "-euc", block.text + shown], capture_output=True, text=True, check=True)
    said = dict(line.split("=", 1) for line in done.stdout.splitlines())
    admin, port = urlsplit(database.replace("+psycopg2", "")), str(free_port())
    said["ADMIN_DATABASE"] = admin.geturl()
    said["DATABASE"] = said["DATABASE"].replace("127.0.0.1:5432", f"127.0.0.1:{admin.port}")
    said["MLFLOW_TRACKING_URI"] = said["MLFLOW_TRACKING_URI"].replace(said["PORT"], port)
    here = s3.at(way.endpoint).environment | {"AWS_REGION": said["AWS_DEFAULT_REGION"]}
    programs = [str(Path(sys.executable).parent), str(Path(program("pg_dump")).parent), os.environ["PATH"]]
    # pip looks whether all is there, and touches nothing.
    offline = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "TENSORCAS_CACHE": str(folder / "cache")}
    return here | said | offline | {"PORT": port, "PATH": os.pathsep.join(programs)}


@contextmanager
def serving(command: str, env: dict[str, str], folder: Path) -> Iterator[None]:
    """Run the page's server for as long as the block lasts."""
    with (folder / "server.log").open("wb") as log:
        words = ["bash", "-euc", command]
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and process.poll() is None:
            with suppress(requests.ConnectionError, requests.Timeout):
                if requests.get(f"{env['MLFLOW_TRACKING_URI']}/health", timeout=ANSWER_S).ok:
                    break
            time.sleep(0.1)
        else:
            pytest.fail((folder / "server.log").read_text()[-3000:])
        yield
    finally:
        # It began its process group, so the id is its own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def run(block: Block, env: dict[str, str], folder: Path) -> str:
    words = ["bash", "-euo", "pipefail", "-c", block.text]
    if block.language == "python":
        words = [sys.executable, "-c", block.text]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode != 0:
        log = folder / "server.log"
        pytest.fail(f"{block.text}\n{done.stdout}\n{done.stderr}\n{log.read_text()[-3000:] if log.exists() else ''}")
    return done.stdout


@pytest.fixture(scope="module")
def walk(s3: S3Server, postgresql_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """The whole page, walked through once."""
    folder = tmp_path_factory.mktemp("page")
    printed: dict[str, str] = {}
    with way_to(s3.endpoint) as way:
        env = settings(postgresql_uri, way, s3, folder)
        of_client = environment(plugin=False, MLFLOW_TRACKING_URI=env["MLFLOW_TRACKING_URI"], PORT=env["PORT"])
        ours = environment(plugin=True, **env)
        todo = [block for block in blocks() if block.language in ("sh", "python")]
        [server] = [block for block in todo if block.text.startswith("mlflow server")]
        at = todo.index(server)
        for block in todo[:at]:
            if block.section == "The store":
                # From here on nobody may do more than the policy says.
                for bucket in (env["BUCKET"], env["BUCKET"] + "-backup"):
                    way.inject(Answer(status=403, code="AccessDenied"), path=f"/{bucket}/.tensorcas/", times=None)
                way.forget()
            printed[block.section] = printed.get(block.section, "") + run(block, ours, folder)
        with serving(server.text, ours, folder):
            for block in todo[at + 1 :]:
                has_package = "tensorcas" in block.text or block.language == "sh"
                printed[block.section] = printed.get(block.section, "") + run(
                    block, ours if has_package else of_client, folder
                )
            ajax = f"{env['MLFLOW_TRACKING_URI']}/ajax-api/2.0/mlflow"
            found = requests.post(f"{ajax}/experiments/search", json={"max_results": 10}, timeout=ANSWER_S).json()
            [large] = [each["experiment_id"] for each in found["experiments"] if each["name"] == "large"]
            runs = requests.post(f"{ajax}/runs/search", json={"experiment_ids": [large]}, timeout=ANSWER_S).json()
            asked = {"run_id": runs["runs"][0]["info"]["run_id"], "path": "checkpoints/checkpoint"}
            listing = requests.get(f"{ajax}/artifacts/list", params=asked, timeout=ANSWER_S).json()
        yield Walk(
            printed=printed,
            traffic=way.traffic(),
            folder=folder,
            listed=[Path(file["path"]).name for file in listing["files"]],
        )


def policy() -> dict[str, list[str]]:
    """Return the actions that the page allows, by resource."""
    [block] = [block for block in blocks() if block.language == "json"]
    allowed: dict[str, list[str]] = {}
    for statement in json.loads(block.text)["Statement"]:
        actions = statement["Action"]
        allowed[statement["Resource"]] = [actions] if isinstance(actions, str) else actions
    return allowed


def test_the_bucket_is_found_to_keep_conditions(walk: Walk) -> None:
    assert walk.printed["The bucket"] == "a store can be kept here\n"


def test_broken_uploads_are_removed_after_a_day(walk: Walk, s3: S3Server) -> None:
    for bucket in ("example-mlflow", "example-mlflow-backup"):
        [rule] = s3.client().get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]

        assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
        assert "Expiration" not in rule


def numbers(printed: str) -> list[list[float]]:
    """The arrays of numbers among what was printed."""
    return [[float(word) for word in found.split()] for found in re.findall(r"^\[(.*)\]$", printed, re.MULTILINE)]


def test_all_clients_get_back_what_they_logged(walk: Walk) -> None:
    through_the_server = numbers(walk.printed["Clients"])
    direct = numbers(walk.printed["Training machines that reach the bucket"])

    assert through_the_server == [[pytest.approx(5.0)], [1, 1, 0]]
    assert direct == [[-1, -1, -1, 1]]


def test_the_server_shows_what_training_machines_have_written(walk: Walk) -> None:
    assert [name for name in walk.listed if name.endswith(".arrow")] != []


def test_there_is_one_store_in_the_bucket_and_one_in_the_backups(walk: Walk, s3: S3Server) -> None:
    for bucket in ("example-mlflow", "example-mlflow-backup"):
        found = s3.client().list_objects_v2(Bucket=bucket)["Contents"]
        formats = [item["Key"] for item in found if item["Key"].endswith(".tensorcas/format")]

        assert formats == ["mlflow/.tensorcas/format"]


def test_backup_of_the_deployment_is_whole(walk: Walk) -> None:
    assert (walk.folder / "tracking.dump").stat().st_size > 10_000
    assert "0 problems" in walk.printed["Backup"] or "no problem" in walk.printed["Backup"], walk.printed["Backup"]


def test_the_policy_allows_what_is_asked_and_no_more(walk: Walk) -> None:
    allowed = policy()
    done = [it for it in walk.traffic.exchanges if it.fault is None]
    asked = {ACTIONS[it.kind] for it in done}

    assert asked | {"s3:AbortMultipartUpload"} == {action for actions in allowed.values() for action in actions}
    assert list(allowed) == ["arn:aws:s3:::example-mlflow/mlflow/*", "arn:aws:s3:::example-mlflow"]
    assert {it.path.partition("/mlflow/")[0].strip("/") for it in done if it.kind != Kind.LIST} <= {
        "example-mlflow",
        "example-mlflow-backup",
    }
    assert [it.path for it in done if it.kind != Kind.LIST and "/mlflow/" not in it.path] == []
    prefixes = [dict(parse_qsl(it.query)).get("prefix", "") for it in done if it.kind == Kind.LIST]
    assert [prefix for prefix in prefixes if not prefix.startswith("mlflow")] == []


def test_page_about_deployment_is_linked(walk: Walk) -> None:
    for page in ("README.md", "docs/deployments.md"):
        assert "deploy.md)" in (PAGE.parents[1] / page).read_text()
