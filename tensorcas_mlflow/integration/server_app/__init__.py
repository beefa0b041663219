"""Pages inside an MLflow server, and scheduled maintenance: ``mlflow server --app-name tensorcas``.

Requests come in; HTML or JSON goes out. MLflow serves everything else as always. `create_app` and `create_auth_app` are
entry points of the group ``mlflow.app``.

| module | holds |
|---|---|
| `_app` | the factories, the routes, and the headers of answers |
| `_access` | what the sender of a request may see, by MLflow's own answers |
| `_tracking` | experiments, names and versions in MLflow's databases |
| `_catalog` | the stores of this server |
| `_survey` | figures of one store and what a comparison or a lineage finds |
| `_jobs` | work in the background, and its bounded results |
| `_content` | content of each page, as values |
| `_site` | a page as HTML, links, and the two static files; templates are in `integration/pages` |
| `_schedule` | maintenance in the background, and links in descriptions |

A route makes the content of a page as values and gives them to a template, or to JSON. The room imports Flask and
MLflow's server, so only a server imports it.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.server_app._app import create_app as create_app
    from tensorcas_mlflow.integration.server_app._app import create_auth_app as create_auth_app

_NAMES = {"_app": "create_app create_auth_app"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
