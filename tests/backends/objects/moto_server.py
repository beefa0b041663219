"""Moto's server as a process, its writes atomic: ``python -m tests.backends.objects.moto_server PORT``.

Moto looks whether a condition holds and then writes, in threads, and nothing keeps another thread's write out in
between: of two writers of one new key, both can win. S3 promises that one does. So here, one request at a time is
carried out; all of its body has come by then, and its answer goes out afterwards.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from moto import backends
from moto.s3.responses import S3Response
from moto.server import main

CARRY_OUT = (
    "_bucket_response_delete",
    "_bucket_response_get",
    "_bucket_response_post",
    "_bucket_response_put",
    "_key_response_delete",
    "_key_response_get",
    "_key_response_post",
    "_key_response_put",
)
SWITCH_S = 1e-5
"""Seconds between two switches of threads: so few that a missing lock shows."""


def one_at_a_time(method: Callable[..., Any], lock: AbstractContextManager[Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    return locked


if __name__ == "__main__":
    lock = threading.RLock()
    for name in CARRY_OUT:
        setattr(S3Response, name, one_at_a_time(getattr(S3Response, name), lock))
    # Moto would list its own folder for each request.
    moto_modules = list(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: moto_modules
    sys.setswitchinterval(SWITCH_S)
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
