"""A process that has imported torch and MLflow once, and forks for each program that a test runs.

A program finds the libraries imported, and of this project the plugin that MLflow looks up when it is imported, in an
interpreter that has done nothing else. What a test says about imports, about hash seeds or about the start of an
interpreter needs an interpreter of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LIBRARIES = (
    "torch",
    "torch._dynamo",
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "pandas",
    "pyarrow",
    "rich.table",
    "sklearn.linear_model",
)
PLACE = "TENSORCAS_TEST_ZYGOTE"
"""Environment variable with the path of the socket, for the processes of pytest-xdist."""
MOST_BYTES = 1 << 20
"""Of a request."""


class Program:
    """A program under way."""

    def __init__(
        self,
        code: str,
        *words: object,
        stdio: tuple[IO[Any] | int, IO[Any] | int, IO[Any] | int],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        """Start one.

        Args:
            code: Its text, as for ``python -c``.
            words: Its arguments.
            stdio: Standard input, output and errors, as files or descriptors.
            env: The environment; None is that of this process.
            cwd: The working directory; None is that of this process.
        """
        request = {
            "code": code,
            "words": list(map(str, words)),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        self._answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers.connect(os.environ[PLACE])
        descriptors = [file if isinstance(file, int) else file.fileno() for file in stdio]
        socket.send_fds(self._answers, [json.dumps(request).encode()], descriptors)
        self.pid = int(self._answers.recv(64))

    def wait(self, timeout: float) -> int:
        """Return the exit status, or minus the number of the signal that ended the program.

        Raises:
            subprocess.TimeoutExpired: It had not ended after so many seconds, and was killed.
        """
        with self._answers:
            self._answers.settimeout(timeout)  # unlike select, for any number of open files
            try:
                return int(self._answers.recv(64))
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired("a forked program", timeout) from None


def run_program(
    code: str,
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 60,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run([sys.executable, "-c", code, *words], text=True)`` does."""
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        status = Program(code, *words, stdio=(nothing, out, errors), env=env, cwd=cwd).wait(timeout)
        for file in (out, errors):
            file.seek(0)
        done = subprocess.CompletedProcess([code, *map(str, words)], status, out.read(), errors.read())
    if check and status:
        raise AssertionError(f"a program ended with {status}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def start(folder: Path) -> Callable[[], object]:
    """Start the process for this one and all that it starts; return what ends it. It also ends with this process."""
    os.environ[PLACE] = str(folder / "zygote")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[PLACE])
    listener.listen(64)
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", str(listener.fileno())],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    return process.communicate


def serve(listener: socket.socket) -> str:
    """Fork for each request; return its program in the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the keepers
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        for name in LIBRARIES:
            importlib.import_module(name)
        gc.freeze()
        answers, _ = listener.accept()
        with answers:
            message, descriptors, _, _ = socket.recv_fds(answers, MOST_BYTES, 3)
            if not os.fork():
                listener.close()
                return _keep(answers, message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _keep(answers: socket.socket, message: bytes, descriptors: list[int]) -> str:
    """Fork, and return in the child what it is to run; this process answers with its number and its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if not program:
        answers.close()
        return _become(json.loads(message), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    answers.send(b"%d" % program)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):  # nobody waits for it any more
        answers.send(b"%d" % status)
    os._exit(0)


def _become(request: Mapping[str, Any], descriptors: list[int]) -> str:
    """Make this process like one that ``python -c`` has just started."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = ""
    sys.argv[:] = ["-c", *request["words"]]
    return str(request["code"])


if __name__ == "__main__":
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)
