"""The factories of MLflow's server with our pages, the routes, and the headers of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

from flask import Blueprint, Flask, Response, jsonify, request

from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import TensorCasError, without_secrets
from tensorcas_mlflow.integration.server_app._access import DeniedError, access_of_sender
from tensorcas_mlflow.integration.server_app._catalog import own_stores
from tensorcas_mlflow.integration.server_app._content import NotThereError, Sender, Site, Sort, to_json
from tensorcas_mlflow.integration.server_app._jobs import BusyError, Jobs
from tensorcas_mlflow.integration.server_app._schedule import Scheduler
from tensorcas_mlflow.integration.server_app._site import POLICY, SCRIPT, STYLE, Links, Notice, page

_log = logging.getLogger(__name__)

_MOST_CHARS = 4000
"""Most characters of a value in an address."""
_GET = ("", "experiment", "run", "checkpoint", "diff", "models", "health", "style.css", "script.js")
_POST = ("maintenance",)
_SORTS: tuple[Sort, ...] = ("freed", "shared", "added", "name")


def create_app() -> Any:
    """Return MLflow's server with our pages: the application ``tensorcas`` of ``mlflow server --app-name``."""
    from mlflow.server import app

    add_pages(app, has_auth=False)
    if _is_uvicorn():
        # It serves the same Flask application below its own routes.
        from mlflow.server.fastapi_app import app as fastapi_app

        return fastapi_app
    return app


def create_auth_app() -> Any:
    """Return MLflow's server with basic-auth and our pages: the application ``tensorcas-basic-auth``."""
    from mlflow.server import app

    return guard(app)


def guard(app: Flask) -> Any:
    """Add our pages and MLflow's basic-auth to a Flask application of MLflow's server; return what is to be served."""
    from mlflow.server import auth

    add_pages(app, has_auth=True)
    # MLflow authenticates every request. Our pages ask it what the user may read; by this table it knows that.
    prefix = app.config["TENSORCAS_PREFIX"]
    known = getattr(auth, "BEFORE_REQUEST_VALIDATORS", {})
    known.update({(f"{prefix}/tensorcas/{name}", method): _asks_itself for name in _GET for method in ("GET", "HEAD")})
    known.update({(f"{prefix}/tensorcas/{name}", "POST"): _asks_itself for name in _POST})
    return auth.create_app(app)


def _asks_itself() -> bool:
    return True


def _is_uvicorn() -> bool:
    from mlflow.environment_variables import _MLFLOW_SGI_NAME

    return bool(_MLFLOW_SGI_NAME.get() == "uvicorn")


def add_pages(app: Flask, *, has_auth: bool) -> Scheduler | None:
    """Add our pages to a Flask application of MLflow's server, and start the scheduled maintenance.

    Args:
        app: The application, before its first request.
        has_auth: Whether MLflow's basic-auth guards it.

    Returns:
        The scheduler; None if nothing is scheduled.

    Raises:
        ValueError: A variable of the environment is wrong: the server must not start without what it asks for.
    """
    from mlflow.server.handlers import _add_static_prefix

    schedule, links = config.maintenance(), config.links()
    app.config["TENSORCAS_PREFIX"] = _add_static_prefix("")
    scheduler = Scheduler(own_stores, schedule, adds_links=links) if schedule or links else None
    site = Site(figures=Jobs(), comparisons=Jobs())
    app.register_blueprint(_blueprint(site, scheduler, has_auth=has_auth), url_prefix=_add_static_prefix("/tensorcas"))
    if scheduler is not None:
        scheduler.start()
    return scheduler


def _blueprint(site: Site, scheduler: Scheduler | None, *, has_auth: bool) -> Blueprint:  # noqa: C901  # its routes
    blueprint = Blueprint("tensorcas", __name__)

    @blueprint.before_request
    def refuse_other_bytes() -> Response | None:
        # Flask would show U+FFFD for each of them: two addresses would be one page.
        try:
            unquote_to_bytes(request.query_string).decode()
        except UnicodeDecodeError:
            return _refused("This address percent-encodes bytes that are not UTF-8.", status=400)
        return None

    @blueprint.after_request
    def protect(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"
        if "Cache-Control" not in response.headers:
            # What one user may see must not come out of a cache to another.
            response.headers["Cache-Control"] = "no-store"
        return response

    def show(view: str, content_of: Callable[[Sender], Any]) -> Response:
        try:
            content = content_of(Sender(site, access_of_sender(has_auth=has_auth)))
        except NotThereError:
            return _missing(view)
        except BusyError:
            return _notice("Busy", "Many figures are being computed. Try again in a minute.", view=view, status=503)
        except DeniedError as denied:
            return _denied(denied)
        except TensorCasError as error:
            return _notice("Problem", _reason(error), view=view, status=500)
        return _answer(view, content)

    @blueprint.get("/")
    def overview() -> Response:
        return show("overview", Sender.overview)

    @blueprint.get("/experiment")
    def experiment() -> Response:
        sort = _asked("sort")
        chosen: Sort = next((each for each in _SORTS if each == sort), "freed")
        return show("experiment", lambda sender: sender.experiment(_asked("id"), page=_page(), sort=chosen))

    @blueprint.get("/run")
    def run() -> Response:
        return show("run", lambda sender: sender.run(_asked("id"), page=_page()))

    @blueprint.get("/checkpoint")
    def checkpoint() -> Response:
        return show("checkpoint", lambda sender: sender.checkpoint(_asked("store"), _asked("key"), page=_page()))

    @blueprint.get("/diff")
    def diff() -> Response:
        a, b, values = _asked("a"), _asked("b"), _asked("values") == "1"
        return show("diff", lambda sender: sender.diff(a, b, values=values, page=_page()))

    @blueprint.get("/models")
    def models() -> Response:
        return show("models", lambda sender: sender.models(_asked("token") or None))

    @blueprint.get("/health")
    def health() -> Response:
        return show("health", lambda sender: sender.health(can_run=sender.access.is_admin and scheduler is not None))

    @blueprint.post("/maintenance")
    def maintain() -> Response:
        try:
            sender = Sender(site, access_of_sender(has_auth=has_auth))
        except DeniedError as denied:
            return _denied(denied)
        if not sender.access.is_admin:
            return _refused("Only an administrator may run maintenance.")
        if not _is_from_here():
            return _refused("This request comes from another site.")
        action = str(request.form.get("action", ""))
        if scheduler is None or action not in scheduler.schedule:
            return _refused("TENSORCAS_MAINTENANCE of this server does not name this maintenance.")
        place = next((each for each in own_stores() if each.id == request.form.get("store")), None)
        if place is None:
            return _missing("health")
        scheduler.ask(place, action)
        sender.forget(place)
        response = Response(status=303)
        response.headers["Location"] = _links().to("health")
        response.autocorrect_location_header = False
        return response

    @blueprint.get("/style.css")
    def style() -> Response:
        return _static(STYLE, "text/css")

    @blueprint.get("/script.js")
    def script() -> Response:
        return _static(SCRIPT, "text/javascript")

    return blueprint


def _answer(view: str, content: Any, *, status: int = 200) -> Response:
    """Answer with a page, or with its content as JSON."""
    if _wants_json():
        response = jsonify({"error": content.title} if isinstance(content, Notice) else to_json(content))
    else:
        response = Response(page(view, content, _links()), mimetype="text/html")
    response.status_code = status
    response.headers["Vary"] = "Accept"
    return response


def _notice(title: str, reason: str, *, view: str, status: int) -> Response:
    return _answer(view, Notice(title, reason), status=status)


def _missing(view: str) -> Response:
    reason = "There is nothing of this name here, or you may not read it."
    return _notice("Not found", reason, view=view, status=404)


def _denied(denied: DeniedError) -> Response:
    status = denied.status if denied.status in (401, 403) else 502
    return _refused("MLflow did not answer for you.", status=status)


def _refused(reason: str, *, status: int = 403) -> Response:
    return _notice("Refused", reason, view="", status=status)


def _static(content: str, kind: str) -> Response:
    response = Response(content, mimetype=kind)
    response.headers["Cache-Control"] = "private, max-age=3600"
    return response


def _links() -> Links:
    from mlflow.server.handlers import _add_static_prefix

    return Links(prefix=_add_static_prefix(""))


def _asked(name: str) -> str:
    return request.args.get(name, "")[:_MOST_CHARS]


def _page() -> int:
    value = _asked("page")
    return max(1, int(value)) if value.isascii() and value.isdigit() and len(value) < 10 else 1


def _wants_json() -> bool:
    if _asked("format") == "json":
        return True
    best = request.accept_mimetypes.best_match(["text/html", "application/json"], default="text/html")
    return best == "application/json"


def _is_from_here() -> bool:
    """Tell whether a request comes from one of our pages, or from no browser at all."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("Host")


def _reason(error: TensorCasError) -> str:
    _log.warning("a page failed: %s", without_secrets(str(error)))
    return "The store cannot be read. The server's log has the reason; `tensorcas verify` lists all damage."
