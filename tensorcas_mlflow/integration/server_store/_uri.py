"""URIs of carriers."""

from __future__ import annotations

from urllib.parse import urlsplit

SCHEME = "mlflow-artifacts"


def is_carrier_uri(uri: str) -> bool:
    """Tell whether an artifact URI goes through an MLflow server, and so can hold only a carried store."""
    return urlsplit(uri).scheme == SCHEME
