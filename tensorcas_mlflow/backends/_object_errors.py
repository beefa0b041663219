"""Errors of object stores: whether they are transient, and their translation to ours."""

from __future__ import annotations

import re

from tensorcas_mlflow import config
from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.errors import BackendError, ForbiddenError, RefusedError

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired|ExpiredAuthenticationToken")
_SAID = re.compile(r"<(Code|Message)>([^<]*)")
_OVERLOADED = frozenset({408, 409, 429})
"""Statuses below 500 with the meaning: later."""
_UNEXPLAINED = frozenset({400, 403})
"""Statuses for expired credentials; the body gives the reason, except for HEAD."""


def status_of(error: Exception) -> int | None:
    """Return the status of the answer behind an error; None if there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def says_later(error: Exception) -> bool:
    """Tell whether another client is writing the object at this moment, and may yet fail."""
    # Azure uses the same status for an existing object.
    return status_of(error) == 409 and "BlobAlreadyExists" not in str(error)


def may_have_expired(error: Exception) -> bool:
    """Tell whether credentials have expired, or may have: not every answer has room for the reason."""
    text, status = str(error), status_of(error)
    return bool(_EXPIRED.search(text)) or status == 401 or (status in _UNEXPLAINED and "performing HEAD" in text)


def may_pass(error: Exception) -> bool:
    """Tell whether the same request may succeed a little later."""
    import obstore

    lasting = (
        obstore.exceptions.InvalidPathError,
        obstore.exceptions.PermissionDeniedError,
        obstore.exceptions.UnauthenticatedError,
        FileNotFoundError,
    )
    if isinstance(error, (*lasting, ValueError, TypeError, NotImplementedError)):
        return False
    status = status_of(error)
    return status is None or status >= 500 or status in _OVERLOADED


def translated(action: str, path: str, uri: str, error: Exception, *, n_attempts: int = 1) -> BackendError:
    """Translate an error of obstore to ours.

    Args:
        action: The attempted action.
        path: Path of the object.
        uri: URI of the place.
        error: The last error.
        n_attempts: Number of attempts.
    """
    import obstore

    # It appears as the cause of ours in every traceback.
    error.args = tuple(without_credentials(fact) if isinstance(fact, str) else fact for fact in error.args)
    reason = f"{_said(error)} (in {uri})"
    if n_attempts > 1:
        reason = f"after {n_attempts} attempts: {reason}"
    # For a failed listing obstore raises only a general error.
    status = status_of(error)
    denied = obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError
    if _EXPIRED.search(str(error)):
        return ForbiddenError(action, path, f"the credentials have expired: renew them and try again; {reason}")
    if may_have_expired(error):
        return ForbiddenError(action, path, f"the credentials do not allow it or have expired; {reason}")
    if isinstance(error, denied) or status == 403:
        return ForbiddenError(action, path, reason)
    if isinstance(error, FileNotFoundError) or status == 404:
        return RefusedError(action, path, f"there is no such bucket or container; {reason}")
    return (BackendError if may_pass(error) else RefusedError)(action, path, reason)


def without_credentials(text: str) -> str:
    """Remove the environment's secrets, logins and signatures from a message of obstore or a server."""
    for secret in config.secrets():
        text = text.replace(secret, "…")
    return without_secrets(text)


def _said(error: Exception) -> str:
    """Return the sentence of an error; from an XML answer, perhaps of many lines, its facts."""
    text = without_credentials(str(error))
    said = text.partition("\n")[0].partition("<?xml")[0][:500].rstrip(" \ufeff")
    if "<?xml" not in text.partition("Debug source")[0]:
        return said
    return " ".join([said, *(value for _, value in _SAID.findall(text.partition("Debug source")[0])[:2])])
