"""Processes that use MLflow as a client, with or without this package installed."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from tests.deploy.servers import environment

P = ParamSpec("P")
T = TypeVar("T")

CALL_S = 120


class Client:
    """One other process, in which functions of test modules are called."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function there; what it returns comes back, and what it raises is raised here."""
        return self._pool.submit(_call, function, args, kwargs).result(CALL_S)


def _call(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        try:
            pickle.dumps(error)
        except Exception:  # noqa: BLE001 - an error may hold anything, such as an open file
            raise RuntimeError("".join(traceback.format_exception(error))) from None
        raise


@contextmanager
def client(tracking_uri: str, *, plugin: bool, **settings: str) -> Iterator[Client]:
    """Run a process whose MLflow talks to a server, for as long as the block lasts."""
    env = environment(plugin=plugin, MLFLOW_TRACKING_URI=tracking_uri, MLFLOW_HTTP_REQUEST_TIMEOUT="20", **settings)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with patch.dict(os.environ, env, clear=True):
            pool.submit(os.getpid).result(CALL_S)
        yield Client(pool)
