"""Real object stores on loopback: started when a block begins, gone when it ends."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import requests

from tests.deploy.servers import free_port

START_S = 60
ASK_S = 5
AZURE_VERSION = "2021-08-06"
ACCOUNT = "tensorcas"

INSTALLED = Path(__file__).parents[3] / ".venv" / "servers"
"""Folder in which ``make object-servers`` installs the servers that are no dependencies of the tests."""


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
        """Environment variables that lead MLflow, boto3 and obstore to the server."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureServer:
    """A server that speaks as Azure's blob service does, and who may use it."""

    endpoint: str
    """With the account as its path."""
    account: str = ACCOUNT
    key: str = base64.b64encode(b"loopback-only").decode()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that lead MLflow and obstore to the server."""
        connection = f"AccountName={self.account};AccountKey={self.key};BlobEndpoint={self.endpoint};"
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{connection}",
            "AZURE_ALLOW_HTTP": "true",
        }

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of obstore's ``AzureStore``."""
        return {
            "account_name": self.account,
            "account_key": self.key,
            "endpoint": self.endpoint,
            "client_options": {"allow_http": True},
        }

    def make_container(self, name: str) -> str:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_VERSION}
        told = "".join(f"{header}:{value}\n" for header, value in headers.items())
        # An account in the path is in the name of the resource twice.
        signed = f"PUT{12 * chr(10)}{told}/{self.account}/{self.account}/{name}\nrestype:container"
        digest = hmac.digest(base64.b64decode(self.key), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{name}?restype=container"
        requests.put(url, headers=headers, timeout=ASK_S).raise_for_status()
        return name


@contextmanager
def moto() -> Iterator[S3Server]:
    """Run moto's server, with its data in memory."""
    port = free_port()
    command = [sys.executable, "-m", "tests.backends.objects.moto_server", str(port)]
    # The server is a module of the tests', found where this process finds them.
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    with _running(command, port, PYTHONPATH=path):
        yield S3Server(endpoint=f"http://127.0.0.1:{port}")


@contextmanager
def localstack() -> Iterator[S3Server]:
    """Run LocalStack's S3, which is another implementation than moto's.

    Raises:
        FileNotFoundError: It is not installed.
    """
    port = free_port()
    command = [_program("localstack", "bin/python"), str(Path(__file__).with_name("localstack_server.py")), str(port)]
    with _running(
        command,
        port,
        SERVICES="s3",
        STRICT_SERVICE_LOADING="1",
        DISABLE_EVENTS="1",  # or it reports its use to its makers
        FILESYSTEM_ROOT="root",
        CONFIG_DIR="config",
        # In a container it takes the machine for its own, and writes below /etc.
        OVERRIDE_IN_DOCKER="0",
        DNS_ADDRESS="0",
        GATEWAY_LISTEN=f"127.0.0.1:{port}",
    ):
        yield S3Server(endpoint=f"http://127.0.0.1:{port}")


@contextmanager
def azurite() -> Iterator[AzureServer]:
    """Run Azurite's blob service, with its data in memory.

    Raises:
        FileNotFoundError: It is not installed.
    """
    port = free_port()
    node = shutil.which("node")
    command = [node or "node", _program("azurite", "node_modules/azurite/dist/src/blob/main.js")]
    command += ["--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry", "--silent"]
    command += ["--skipApiVersionCheck"]  # obstore may know a newer one than Azurite does
    server = AzureServer(endpoint=f"http://127.0.0.1:{port}/{ACCOUNT}")
    with _running(command, port, AZURITE_ACCOUNTS=f"{server.account}:{server.key}"):
        yield server


def _program(server: str, path: str) -> str:
    program = INSTALLED / server / path
    if not program.exists():
        raise FileNotFoundError(f"{server} is not installed, and tests need it: run `make object-servers`")
    return str(program)


@contextmanager
def _running(command: Sequence[str], port: int, **settings: str) -> Iterator[None]:
    """Run a server in a folder of its own, until the block ends; any answer over HTTP says that it is there."""
    with tempfile.TemporaryDirectory(prefix="objects-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": scratch, "TMPDIR": scratch, **settings}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(process, f"http://127.0.0.1:{port}/", folder / "log")
            yield
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
