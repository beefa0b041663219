"""Pages inside the server: their addresses, their policy and static files, and a page with its content in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from tensorcas_mlflow.integration.pages import render, source
from tensorcas_mlflow.integration.server_app._content import MOST_TENSORS, ROWS
from tensorcas_mlflow.maintenance import utc_text

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'self'"
)
"""Content-Security-Policy of every answer."""
STYLE = source("page.css") + source("site.css")
SCRIPT = source("search.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Addresses of pages. They begin with MLflow's static prefix."""

    prefix: str
    """Static prefix without a slash at its end; often empty."""

    def to(self, page: str = "", /, **query: str | int | None) -> str:
        """Return the address of a page of ours."""
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        return f"{self.prefix}/tensorcas/{page}" + (f"?{asked}" if asked else "")

    def mlflow(self) -> str:
        """Return the address of MLflow's own pages."""
        return f"{self.prefix}/"

    def mlflow_experiment(self, experiment_id: str) -> str:
        """Return the address of MLflow's page of an experiment."""
        return f"{self.prefix}/#/experiments/{quote(experiment_id, safe='')}"

    def mlflow_run(self, experiment_id: str, run_id: str) -> str:
        """Return the address of MLflow's page of a run."""
        return f"{self.mlflow_experiment(experiment_id)}/runs/{quote(run_id, safe='')}"


class Notice(NamedTuple):
    """The content of a page that says why there is no other."""

    title: str
    reason: str
    is_pending: bool = False


def page(view: str, content: Any, links: Links) -> str:
    """Return a page as HTML.

    Args:
        view: The name of its template; for a `Notice` the page in whose place it is.
        content: Its content, from `Sender`, or a `Notice`.
        links: Addresses.
    """
    return render(
        f"site/{'notice' if isinstance(content, Notice) else view}.html",
        view=view,
        page=content,
        links=links,
        rows=ROWS,
        most_tensors=MOST_TENSORS,
        most_bytes=_most_bytes,
        utc=utc_text,
    )


def _most_bytes(lines: Sequence[Any]) -> int:
    """Return the length of the longest bar of some lines."""
    return int(max(each.owned.exclusive_bytes + each.owned.shared_bytes for each in lines))
