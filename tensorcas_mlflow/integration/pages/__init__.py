"""Pages for MLflow's UI: one self-contained HTML document each, made without MLflow's server.

`_facts` reads manifests, `_html` has the frame of all pages, `_history` draws the page of a series. A page loads
nothing from anywhere, every text of a user in it is escaped, and its script only hides rows that a search leaves out.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.pages._facts import SeriesFacts as SeriesFacts
    from tensorcas_mlflow.integration.pages._facts import StepFacts as StepFacts
    from tensorcas_mlflow.integration.pages._facts import parts_by_steps as parts_by_steps
    from tensorcas_mlflow.integration.pages._history import HISTORY_PAGE as HISTORY_PAGE
    from tensorcas_mlflow.integration.pages._history import history_page as history_page
    from tensorcas_mlflow.integration.pages._html import SEARCH as SEARCH
    from tensorcas_mlflow.integration.pages._html import document as document
    from tensorcas_mlflow.integration.pages._html import row as row
    from tensorcas_mlflow.integration.pages._html import table as table
    from tensorcas_mlflow.integration.pages._html import text as text
    from tensorcas_mlflow.integration.pages._html import totals as totals

_NAMES = {
    "_facts": "SeriesFacts StepFacts parts_by_steps",
    "_history": "HISTORY_PAGE history_page",
    "_html": "SEARCH document row table text totals",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
