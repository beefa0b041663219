"""Who asks an MLflow server for a listing: its UI, or a client that is about to download a folder."""

from __future__ import annotations

import sys

_CLIENTS = "/api/2.0/mlflow-artifacts/artifacts"


def is_for_client() -> bool:
    """Tell whether this thread answers a client's request for a listing of proxied artifacts.

    A client downloads a folder by listing it and asking for each file. The UI lists by other requests.
    """
    flask = sys.modules.get("flask")
    if flask is None or not flask.has_request_context():
        return False
    return bool(flask.request.path.rstrip("/").endswith(_CLIENTS)) and "/ajax-api/" not in flask.request.path
