"""Opening the backend of a root, with the credentials MLflow's users already have."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.backends._contract import Backend
from tensorcas_mlflow.backends._folder import FolderBackend
from tensorcas_mlflow.backends._root import AZ_SCHEME, GS_SCHEME, S3_SCHEME, STORE_FOLDER, Root
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore.store import ObjectStore

    from tensorcas_mlflow.backends._buckets import Bucket

    Views = tuple[ObjectStore, ObjectStore]

_CONNECT_S, _SILENCE_S, _REQUEST_S = 10, 30, 600
_BACKOFF = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=8), "base": 2}
_RETRIES = {"max_retries": 30, "retry_timeout": timedelta(seconds=60), "backoff": _BACKOFF}
"""Bounded by time: nothing else retries the parts of an upload."""
_NO_RETRIES = {"max_retries": 0}
_CREDENTIALS_LIFE = timedelta(minutes=5)
"""Lifetime of credentials before the next request to boto3. boto3 renews its own well before they expire."""

_ENCRYPTION = {"ServerSideEncryption": "server_side_encryption", "SSEKMSKeyId": "sse_kms_key_id"}
"""Options of MLflow's MLFLOW_S3_UPLOAD_EXTRA_ARGS with an equivalent here."""


_VARIABLES = (
    "MLFLOW_S3_ENDPOINT_URL",
    "MLFLOW_S3_IGNORE_TLS",
    "MLFLOW_S3_UPLOAD_EXTRA_ARGS",
    "MLFLOW_S3_EXPECTED_BUCKET_OWNER",
    "MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE",
    "MLFLOW_S3_ADDRESSING_STYLE",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AWS_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "HOME",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
)
"""Identity of a connection to a container."""

_views: dict[tuple[object, ...], Views] = {}
"""Views of containers, each shared by all folders in it, with its connections and credentials."""
_MAX_VIEWS = 64
"""Bound of the cached views: a server opens any bucket its clients name."""
_views_lock = Lock()


def open_bucket(root: Root, folder: str) -> Bucket:
    """Open a folder below a remote root; send nothing.

    Raises:
        ValueError: A setting is wrong.
        RefusedError: obstore is not installed.
    """
    from tensorcas_mlflow.backends._buckets import Bucket, without_credentials

    try:
        import obstore.store
    except ImportError as error:
        raise RefusedError(
            "open", root.uri, "object stores need obstore: pip install 'tensorcas-mlflow[remote]'"
        ) from error
    make: dict[str, Callable[..., Any]] = {
        S3_SCHEME: obstore.store.S3Store,
        GS_SCHEME: obstore.store.GCSStore,
        AZ_SCHEME: obstore.store.AzureStore,
    }
    name = root.container.partition("@")[0]
    last: Views | None = None

    def connect() -> Views:
        nonlocal last
        about = (root.scheme, root.container, _CONNECT_S, _SILENCE_S, _REQUEST_S, *map(config.given, _VARIABLES))
        with _views_lock:
            views = _views.get(about)
            # A caller connects again because its last credentials have expired.
            if views is None or views is last:
                try:
                    settings = {S3_SCHEME: _s3, GS_SCHEME: _gcs, AZ_SCHEME: _azure}[root.scheme](root)
                    reader, writer = (
                        make[root.scheme](name, retry_config=retries, **settings) for retries in (_RETRIES, _NO_RETRIES)
                    )
                except Exception as error:
                    # obstore or boto3 reject the settings; the rest of the message is for obstore's developers.
                    error.args = (without_credentials(str(error)),)
                    reason = error.args[0].partition("\n\nDebug source")[0]
                    raise ValueError(f"{root.uri!r} cannot be opened: {reason}") from error
                while len(_views) >= _MAX_VIEWS:
                    del _views[next(iter(_views))]  # its users keep it
                views = _views[about] = reader, writer
            last = views
            return views

    prefix = "/".join(filter(None, (root.key, folder)))
    return Bucket(connect, uri=root.uri, prefix=prefix, has_versions=root.scheme == GS_SCHEME)


def _client(endpoint: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "read_timeout": timedelta(seconds=_SILENCE_S),
        "timeout": timedelta(seconds=_REQUEST_S),
    }
    if endpoint is not None and endpoint.startswith("http:"):
        options["allow_http"] = True
    return options


def _s3(root: Root) -> dict[str, Any]:
    endpoint = config.given("MLFLOW_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    client = _client(endpoint)
    if (config.given("MLFLOW_S3_IGNORE_TLS") or "").lower() in ("true", "1"):
        client["allow_invalid_certificates"] = True
    owner = config.given("MLFLOW_S3_EXPECTED_BUCKET_OWNER")
    if owner is not None:
        # S3 refuses the header unless it is signed; obstore signs it.
        client["default_headers"] = {"x-amz-expected-bucket-owner": owner}
    bundle = config.given("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
    if bundle is not None:
        with open(bundle, "rb") as file:
            client["root_certificate"] = file.read()
    # Every S3-compatible store supports single deletions, only some support lists of them.
    settings: dict[str, Any] = {"client_options": client, "disable_bulk_delete": True}
    if endpoint is not None:
        settings["endpoint"] = endpoint.rstrip("/")
    if config.given("MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE", "MLFLOW_S3_ADDRESSING_STYLE") == "virtual":
        settings["virtual_hosted_style_request"] = True
        if endpoint is not None:
            scheme, _, host = endpoint.rstrip("/").partition("://")
            settings["endpoint"] = f"{scheme}://{root.container}.{host}"
    settings |= _upload_settings(config.given("MLFLOW_S3_UPLOAD_EXTRA_ARGS"))
    region = config.given("AWS_REGION", "AWS_DEFAULT_REGION")
    if config.given("AWS_ACCESS_KEY_ID") is None:
        # boto3 knows profiles, SSO and assumed roles; without boto3, obstore looks for the machine's own role.
        provider = _boto3_credentials()
        if provider is not None:
            settings["credential_provider"] = provider
            region = region or provider.region
    if region is not None:
        settings["region"] = region
    return settings


def _upload_settings(extra: str | None) -> dict[str, str]:
    if extra is None:
        return {}
    try:
        args = json.loads(extra)
        unknown = sorted(args.keys() - _ENCRYPTION.keys())
    except (ValueError, AttributeError) as error:
        # Leave its value out: it may be a key.
        raise ValueError("MLFLOW_S3_UPLOAD_EXTRA_ARGS must be a JSON object") from error
    if unknown:
        raise ValueError(
            f"MLFLOW_S3_UPLOAD_EXTRA_ARGS has {unknown[0]!r}, which cannot be kept here: set it for the whole bucket"
        )
    return {_ENCRYPTION[name]: str(value) for name, value in args.items()}


class _Boto3Credentials:
    """Provider of boto3's credentials in obstore's form, asked again and again."""

    def __init__(self, session: Any, credentials: Any) -> None:
        self._credentials = credentials
        self.region: str | None = session.region_name
        self.config: dict[str, str] = {}

    def __call__(self) -> dict[str, Any]:
        now = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFE,
        }


def _boto3_credentials() -> _Boto3Credentials | None:
    try:
        import boto3
    except ImportError:
        return None
    session = boto3.Session()
    credentials = session.get_credentials()
    return None if credentials is None else _Boto3Credentials(session, credentials)


def _gcs(root: Root) -> dict[str, Any]:
    endpoint = config.given("STORAGE_EMULATOR_HOST")
    settings: dict[str, Any] = {"client_options": _client(endpoint)}
    if endpoint is not None:
        settings |= {"base_url": endpoint, "skip_signature": True}
    return settings


def _azure(root: Root) -> dict[str, Any]:
    account = root.container.partition("@")[2].partition(".")[0] or None
    said = _connection_string(config.given("AZURE_STORAGE_CONNECTION_STRING"))
    endpoint = said.get("BlobEndpoint")
    settings: dict[str, Any] = {"client_options": _client(endpoint)}
    facts = {
        "account_name": account or said.get("AccountName") or config.given("AZURE_STORAGE_ACCOUNT_NAME"),
        "account_key": said.get("AccountKey")
        or config.given("AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
        "sas_key": said.get("SharedAccessSignature") or config.given("AZURE_STORAGE_SAS_TOKEN"),
        "endpoint": endpoint,
    }
    return settings | {name: value for name, value in facts.items() if value is not None}


def _connection_string(text: str | None) -> dict[str, str]:
    pairs = (part.partition("=") for part in (text or "").split(";") if part)
    return {name: value for name, _, value in pairs}


def open_backend(root: Root) -> Backend:
    """Open the storage of the store at an artifact root; touch nothing.

    Raises:
        ValueError: A setting of an object store is wrong.
        RefusedError: obstore, needed for object stores, is not installed.
    """
    if root.is_local:
        return FolderBackend(root.folder / STORE_FOLDER, uri=root.uri)
    from tensorcas_mlflow.backends._objects import ObjectBackend  # a local store needs none of it

    return ObjectBackend(open_bucket(root, STORE_FOLDER), uri=root.uri)
