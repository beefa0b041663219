"""Real object stores on loopback: started when a block begins, gone when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests.deploy.servers import free_port

START_S = 60
ASK_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A server that speaks S3, and who may use it."""

    endpoint: str
    access_key: str = "tensorcas"
    secret_key: str = "loopback-only"
    region: str = "us-east-1"

    def at(self, endpoint: str) -> S3Server:
        """The same server at another address, such as that of a proxy in front of it."""
        return S3Server(endpoint=endpoint, access_key=self.access_key, secret_key=self.secret_key, region=self.region)

    @property
    def environment(self) -> dict[str, str]:
        """What a process finds the server by, whether it asks as MLflow, boto3 or obstore do."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "MLFLOW_S3_ENDPOINT_URL": self.endpoint,
        }

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of obstore's ``S3Store``."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": self.region,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    def client(self) -> Any:
        """A client of boto3, which knows nothing of this process's settings."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=32),
        )

    def make_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name


@contextmanager
def moto() -> Iterator[S3Server]:
    """Run moto's server, with its data in memory."""
    port = free_port()
    command = [sys.executable, "-m", "tests.objects.moto_server", str(port)]
    with _running(command, port):
        yield S3Server(endpoint=f"http://127.0.0.1:{port}")


@contextmanager
def _running(
    command: Sequence[str], port: int, *, settings: Mapping[str, str] | None = None, path: str = "/"
) -> Iterator[Path]:
    """Run a server in a folder of its own, until the block ends; any answer over HTTP says that it is there."""
    with tempfile.TemporaryDirectory(prefix="objects-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "AZURE_", "MLFLOW_"))}
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=env | dict(settings or {}), stdout=log, stderr=log, start_new_session=True
            )
        try:
            _wait(process, f"http://127.0.0.1:{port}{path}", folder / "log")
            yield folder
        finally:
            # It began its process group, so the id is its own.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        with suppress(requests.ConnectionError, requests.Timeout):
            requests.get(url, timeout=ASK_S)
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
