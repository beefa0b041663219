"""What went wrong at an object store: whether it may pass, and what it is to our callers."""

from __future__ import annotations

import re

from tensorcas_mlflow import config
from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.errors import BackendError, ForbiddenError, RefusedError

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired|ExpiredAuthenticationToken")
_SAID = re.compile(r"<(Code|Message)>([^<]*)")
_OVERLOADED = frozenset({408, 409, 429})
"""Answers below 500 that say: later."""
_UNEXPLAINED = frozenset({400, 403})
"""Answers to expired credentials whose body says so; one to HEAD has no body."""


def status_of(error: Exception) -> int | None:
    """The status of the answer that an error is about; None if there was none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def says_later(error: Exception) -> bool:
    """Whether an object is being written by others at this moment, who may yet fail."""
    # Azure says with the same status that there is an object.
    return status_of(error) == 409 and "BlobAlreadyExists" not in str(error)


def may_have_expired(error: Exception) -> bool:
    """Whether credentials have expired, or may have: not every answer has room to say so."""
    text, status = str(error), status_of(error)
    return bool(_EXPIRED.search(text)) or status == 401 or (status in _UNEXPLAINED and "performing HEAD" in text)


def may_pass(error: Exception) -> bool:
    """Whether the same request may come through a little later."""
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
    """Turn an error of obstore into ours.

    Args:
        action: What was to be done.
        path: To which object.
        uri: In which place.
        error: The last one there was.
        n_attempts: How often it was tried.
    """
    import obstore

    # It is told as the cause of ours, in every traceback.
    error.args = tuple(without_credentials(fact) if isinstance(fact, str) else fact for fact in error.args)
    reason = f"{_said(error)} (in {uri})"
    if n_attempts > 1:
        reason = f"after {n_attempts} attempts: {reason}"
    # Of what a listing is answered, obstore makes no more than a general error.
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
    """Leave out of what obstore or a server says what the environment keeps secret, and logins and signatures."""
    for secret in config.secrets():
        text = text.replace(secret, "…")
    return without_secrets(text)


def _said(error: Exception) -> str:
    """The sentence of an error; of an answer in XML, which may have many lines, what it says."""
    text = without_credentials(str(error))
    said = text.partition("\n")[0].partition("<?xml")[0][:500].rstrip(" \ufeff")
    if "<?xml" not in text.partition("Debug source")[0]:
        return said
    return " ".join([said, *(value for _, value in _SAID.findall(text.partition("Debug source")[0])[:2])])
