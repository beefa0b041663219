"""Calls of clients of a server in S3, and helpers for their tests; importable without the package."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.backends.objects.servers import S3Server
from tests.deploy.calls import log_folder
from tests.deploy.servers import Server, environment

PREFIX = "team/mlflow"
"""Prefix of a server's artifacts in its bucket."""
COMMAND_S = 120


def objects_in(s3: S3Server, bucket: str, prefix: str = "") -> dict[str, int]:
    """Sizes of all objects of a bucket below a prefix, by name, as boto3 sees them."""
    pages = s3.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", ())}


def mlflow_command(server: Server, *words: str, **settings: str) -> None:
    """Run a command of MLflow's where our package is not installed."""
    env = environment(plugin=False, MLFLOW_TRACKING_URI=server.uri, **settings)
    _run([sys.executable, "-m", "mlflow", *words], env)


def tensorcas_command(s3: S3Server, *words: str) -> str:
    """Run our command for somebody who may use the bucket; what it prints."""
    program = "import sys; from tensorcas_mlflow.cli import main; sys.exit(main(sys.argv[1:]))"
    return _run([sys.executable, "-c", program, *words], environment(plugin=True, **s3.environment))


def _run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def log_folders(folders: list[str], n_runs: int) -> list[str]:
    """Log folders in turn to so many new runs, all at once; the runs."""
    with ThreadPoolExecutor(n_runs) as pool:
        return list(pool.map(lambda n: log_folder(folders[n % len(folders)]), range(n_runs)))
