"""A PostgreSQL server of the tests' own, made from nothing and gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "tracking"
START_S = 60


@contextmanager
def postgresql() -> Iterator[str]:
    """Run a PostgreSQL server on loopback for as long as the block lasts, and give the URI of an empty database in it.

    Raises:
        FileNotFoundError: PostgreSQL's programs are not installed.
    """
    user = _unprivileged_user()
    # Not below pytest's folder, which only its own user may enter.
    with tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        if user is not None:
            shutil.chown(folder, user)
        port = _init(folder, user)
        server = _start(folder, user, port)
        try:
            _wait(server, folder, port)
            yield f"postgresql+psycopg2://mlflow:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(3)  # SIGQUIT: at once, without a checkpoint; nobody wants the data
            server.wait(timeout=30)


def program(name: str) -> str:
    """Find one of PostgreSQL's programs, which Debian keeps out of the PATH, and of the newest release."""
    places = [found] if (found := shutil.which(name)) else []
    places += sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))
    if not places:
        raise FileNotFoundError(f"PostgreSQL's {name} is not installed, and tests need it: run `make postgresql`")
    return os.path.realpath(places[-1])


def _unprivileged_user() -> str | None:
    # PostgreSQL refuses to run as root.
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _init(folder: Path, user: str | None) -> int:
    secret = folder / "password"
    secret.write_text(PASSWORD)
    if user is not None:
        shutil.chown(secret, user)
    command = [program("initdb"), "--pgdata", f"{folder}/data", "--username", "mlflow", "--pwfile", str(secret)]
    command += ["--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
    done = subprocess.run(command, cwd=folder, user=user, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, user: str | None, port: int) -> subprocess.Popen[bytes]:
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
    command = [program("postgres"), "-D", f"{folder}/data"]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, user=user, stdout=log, stderr=log)


def _wait(server: subprocess.Popen[bytes], folder: Path, port: int) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and server.poll() is None:
        # The port is open before the database takes questions, and then it says so in its log.
        if b"ready to accept connections" in (folder / "log").read_bytes():
            return
        time.sleep(0.05)
    raise RuntimeError(f"PostgreSQL did not start on port {port}:\n{(folder / 'log').read_text()}")
