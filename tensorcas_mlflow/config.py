"""What the environment says. Nothing else in this package reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensorcas_mlflow._texts import size_in

_SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_CLIENT_SECRET",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
_LEAST_SECRET = 8
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def store_uri() -> str | None:
    """Root of the store that logging and loading use, whatever the artifact location; None where none is named.

    Raises:
        ValueError: It is a relative path, which names another place in each working directory.
    """
    named = os.environ.get("TENSORCAS_STORE")
    if named and not os.path.isabs(named) and not _SCHEME.match(named):
        raise ValueError(
            f"TENSORCAS_STORE is the relative path {named!r}, which names another place in each working directory: "
            "name an absolute path, or a URI like tensorcas-s3://bucket/path"
        )
    return named or None


def tracking_uri() -> str | None:
    """MLflow's tracking store: MLFLOW_TRACKING_URI; None where none is named."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def registry_uri() -> str | None:
    """MLflow's model registry: MLFLOW_REGISTRY_URI; None where none is named."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or None


def server_roots() -> tuple[str, ...]:
    """Artifact roots of the MLflow server this process serves, as it was started with; empty outside of one."""
    names = ("_MLFLOW_SERVER_ARTIFACT_DESTINATION", "_MLFLOW_SERVER_ARTIFACT_ROOT")
    return tuple(root for name in names if (root := os.environ.get(name)))


def in_mlflow_server() -> bool:
    """Tell whether this process is a worker of an MLflow server, which must not make stores at a client's word."""
    return bool(server_roots())


def given(*names: str) -> str | None:
    """What the first of some variables that is set, and not empty, says; None if none is.

    For the settings of object stores, which are those of their own tools and of MLflow.
    """
    return next((value for name in names if (value := os.environ.get(name))), None)


def secrets() -> tuple[str, ...]:
    """What the settings of object stores hold that no message may say; what is very short is no secret."""
    return tuple(value for name in _SECRETS if len(value := os.environ.get(name, "")) >= _LEAST_SECRET)


def policy() -> str:
    """What a save spends its time on where its caller does not say it: TENSORCAS_POLICY, by default ``balanced``."""
    return os.environ.get("TENSORCAS_POLICY") or "balanced"


def n_threads() -> int:
    """Threads for hashing, encoding and reading: TENSORCAS_THREADS, else one a core, at most 8.

    Raises:
        ValueError: TENSORCAS_THREADS is not a positive whole number.
    """
    value = os.environ.get("TENSORCAS_THREADS")
    if value is None:
        return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"TENSORCAS_THREADS must be a positive whole number, not {value!r}")
    return int(value)


def reading_way() -> str | None:
    """How packs are to be read, whatever suits them: TENSORCAS_READ; None where nothing or ``auto`` is said."""
    value = os.environ.get("TENSORCAS_READ") or "auto"
    return None if value == "auto" else value


def cache_folder() -> Path | None:
    """Folder of the chunk cache: TENSORCAS_CACHE, else `tensorcas` in XDG_CACHE_HOME or in ``~/.cache``.

    Returns:
        An absolute path; None if TENSORCAS_CACHE is ``off``, or if nothing is named and the user has no home.
    """
    named = os.environ.get("TENSORCAS_CACHE")
    if named == "off":
        return None
    try:
        if named:
            return Path(named).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # Its specification says that a relative one is to be passed over.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tensorcas"
    except RuntimeError:
        return None


def cache_bytes() -> int | None:
    """What the chunk cache may take on the disk: TENSORCAS_CACHE_BYTES; None where nothing is said.

    Raises:
        ValueError: It is no size, in bytes or such as ``10GB``.
    """
    value = os.environ.get("TENSORCAS_CACHE_BYTES")
    if not value:
        return None
    n_bytes = size_in(value)
    if n_bytes < 1:
        raise ValueError(f"TENSORCAS_CACHE_BYTES must be a size in bytes, or such as 10GB or 512MiB, not {value!r}")
    return n_bytes


def logs_metrics() -> bool:
    """Whether storage figures of checkpoints are logged as metrics: TENSORCAS_LOG_METRICS, by default yes.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("TENSORCAS_LOG_METRICS", default=True)


def allows_pickle() -> bool:
    """Whether a model may be unpickled: MLflow's own switch, MLFLOW_ALLOW_PICKLE_DESERIALIZATION, by default yes.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", default=True)


def _flag(name: str, *, default: bool) -> bool:
    value = os.environ.get(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value in ("true", "1")
