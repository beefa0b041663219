"""Settings from the environment. No other module reads `os.environ`, but for `native`, which lies below this one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensorcas_mlflow.base.text import seconds_in, size_in

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
    """Return the root of the store for logging and loading, independent of the artifact location; None if unset.

    Raises:
        ValueError: It is a relative path; it would name another place in each working directory.
    """
    named = os.environ.get("TENSORCAS_STORE")
    if named and not os.path.isabs(named) and not _SCHEME.match(named):
        raise ValueError(
            f"TENSORCAS_STORE is the relative path {named!r}, which names another place in each working directory: "
            "set it to an absolute path, or a URI like tensorcas-s3://bucket/path"
        )
    return named or None


def tracking_uri() -> str | None:
    """Return MLflow's tracking store, MLFLOW_TRACKING_URI; None if unset."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def registry_uri() -> str | None:
    """Return MLflow's model registry, MLFLOW_REGISTRY_URI; None if unset."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or None


def server_roots() -> tuple[str, ...]:
    """Return the artifact roots this process's MLflow server was started with; empty outside of a server."""
    names = ("_MLFLOW_SERVER_ARTIFACT_DESTINATION", "_MLFLOW_SERVER_ARTIFACT_ROOT")
    return tuple(root for name in names if (root := os.environ.get(name)))


def in_mlflow_server() -> bool:
    """Tell whether this process is a worker of an MLflow server; a worker must not create stores for a client."""
    return bool(server_roots())


def server_stores() -> tuple[str, str] | None:
    """Return the tracking store and the model registry of this process's MLflow server; None outside of a server."""
    tracking = os.environ.get("_MLFLOW_SERVER_FILE_STORE")
    return (tracking, os.environ.get("_MLFLOW_SERVER_REGISTRY_STORE") or tracking) if tracking else None


def server_prefix() -> str:
    """Return the path below which this process's MLflow server serves its UI; "" for none."""
    return os.environ.get("_MLFLOW_STATIC_PREFIX", "").rstrip("/")


def given(*names: str) -> str | None:
    """Return the value of the first variable that is set and not empty; None if none is.

    The settings of object stores use it: their names are those of the stores' own tools and of MLflow.
    """
    return next((value for name in names if (value := os.environ.get(name))), None)


def secrets() -> tuple[str, ...]:
    """Return the secrets in the settings of object stores, to keep them out of messages; short values are none."""
    return tuple(value for name in _SECRETS if len(value := os.environ.get(name, "")) >= _LEAST_SECRET)


def policy() -> str:
    """Return the default encoding policy of saves: TENSORCAS_POLICY, by default ``balanced``."""
    return os.environ.get("TENSORCAS_POLICY") or "balanced"


def n_threads() -> int:
    """Return the number of threads for hashing, encoding and reading: TENSORCAS_THREADS, else one a core, at most 8.

    Raises:
        ValueError: TENSORCAS_THREADS is not a positive whole number.
    """
    value = os.environ.get("TENSORCAS_THREADS")
    if value is None:
        return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"TENSORCAS_THREADS must be a positive whole number, not {value!r}")
    return int(value)


def set_threads(n: int) -> None:
    """Set the number of threads of this process, and of processes that it starts: TENSORCAS_THREADS."""
    os.environ["TENSORCAS_THREADS"] = str(n)


def reading_way() -> str | None:
    """Return the forced way to read packs: TENSORCAS_READ; None if it is unset or ``auto``."""
    value = os.environ.get("TENSORCAS_READ") or "auto"
    return None if value == "auto" else value


def cache_folder() -> Path | None:
    """Return the folder of the chunk cache: TENSORCAS_CACHE, else `tensorcas` in XDG_CACHE_HOME or in ``~/.cache``.

    Returns:
        An absolute path; None if TENSORCAS_CACHE is ``off``, or if no variable is set and the user has no home.
    """
    named = os.environ.get("TENSORCAS_CACHE")
    if named == "off":
        return None
    try:
        if named:
            return Path(named).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification tells programs to ignore a relative path.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tensorcas"
    except RuntimeError:
        return None


def cache_bytes() -> int | None:
    """Return the bound of the chunk cache on disk: TENSORCAS_CACHE_BYTES; None if unset.

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
    """Tell whether MLflow gets storage figures of checkpoints as metrics: TENSORCAS_LOG_METRICS, by default yes.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("TENSORCAS_LOG_METRICS", default=True)


def tries_fill() -> bool:
    """Tell whether a save refuses a state that could not fill a live one: TENSORCAS_TRY_FILL, by default yes.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("TENSORCAS_TRY_FILL", default=True)


def writes_pages() -> bool:
    """Tell whether a page shows the history of each series in MLflow's UI: TENSORCAS_PAGES, by default yes.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("TENSORCAS_PAGES", default=True)


def database() -> bool:
    """Tell whether new stores on a local disk have a database: TENSORCAS_DATABASE, by default yes.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("TENSORCAS_DATABASE", default=True)


ACTIONS = ("verify", "collect", "optimize")
"""Maintenance that an MLflow server can run on a schedule."""


def maintenance() -> dict[str, float]:
    """Return the schedule of maintenance in an MLflow server: TENSORCAS_MAINTENANCE, by default none.

    Returns:
        Seconds from the begin of one run to the begin of the next, by action; see `ACTIONS`.

    Raises:
        ValueError: It is no list such as ``verify=7d, collect=1d``.
    """
    value = os.environ.get("TENSORCAS_MAINTENANCE", "")
    found: dict[str, float] = {}
    for item in filter(None, re.split(r"[,\s]+", value)):
        action, _, period = item.partition("=")
        seconds = seconds_in(period)
        if action not in ACTIONS or action in found or seconds is None or seconds < 1:
            raise ValueError(
                f"TENSORCAS_MAINTENANCE must be a list such as 'verify=7d, collect=1d, optimize=30d', not {value!r}"
            )
        found[action] = seconds
    return found


def links() -> bool:
    """Tell whether an MLflow server adds links to its pages to descriptions: TENSORCAS_LINKS, by default no.

    Raises:
        ValueError: It is neither true nor false.
    """
    return _flag("TENSORCAS_LINKS", default=False)


def pickle_forbidden_by() -> str | None:
    """Return the switch of MLflow that forbids to unpickle models; None if both of them allow it, as by default.

    MLflow 3.18 deprecates MLFLOW_ALLOW_PICKLE_DESERIALIZATION, and obeys both. The integration asks MLflow itself.

    Raises:
        ValueError: A switch is neither true nor false, as MLflow spells them.
    """
    names = ("MLFLOW_ALLOW_MODEL_CODE_EXECUTION", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION")
    allowed = {name: _flag(name, default=True, words=("true", "false", "1", "0")) for name in names}
    return next((name for name in names if not allowed[name]), None)


def has_colors() -> bool:
    """Tell whether a terminal may be sent colors: unless NO_COLOR is set to anything but the empty text."""
    return not os.environ.get("NO_COLOR")


def moves_cursor() -> bool:
    """Tell whether a terminal can do more than print characters, by TERM."""
    return os.environ.get("TERM") not in ("dumb", "unknown")


_WORDS = ("true", "false", "on", "off", "1", "0")


def _flag(name: str, *, default: bool, words: tuple[str, ...] = _WORDS) -> bool:
    value = os.environ.get(name, str(default)).lower()
    if value not in words:
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value in ("true", "on", "1")
