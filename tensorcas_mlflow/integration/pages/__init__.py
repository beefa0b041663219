"""Pages for MLflow's UI: one self-contained HTML document each.

`_facts` reads manifests, `_run` asks MLflow for a run, `_html` has the frame of all pages, `_tensors` the table of
tensors that all pages share, `_history` draws the page of a series. A page loads nothing from anywhere, and every text
of a user in it is escaped. Its script shows the page's own data, as text only.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.pages._facts import Changes as Changes
    from tensorcas_mlflow.integration.pages._facts import SeriesFacts as SeriesFacts
    from tensorcas_mlflow.integration.pages._facts import StepFacts as StepFacts
    from tensorcas_mlflow.integration.pages._facts import Tensors as Tensors
    from tensorcas_mlflow.integration.pages._facts import parts_by_steps as parts_by_steps
    from tensorcas_mlflow.integration.pages._history import HISTORY_PAGE as HISTORY_PAGE
    from tensorcas_mlflow.integration.pages._history import MOST_FACTS_CHARS as MOST_FACTS_CHARS
    from tensorcas_mlflow.integration.pages._history import history_page as history_page
    from tensorcas_mlflow.integration.pages._history import time_text as time_text
    from tensorcas_mlflow.integration.pages._html import SCRIPT as SCRIPT
    from tensorcas_mlflow.integration.pages._html import SEARCH as SEARCH
    from tensorcas_mlflow.integration.pages._html import STYLE as STYLE
    from tensorcas_mlflow.integration.pages._html import Markup as Markup
    from tensorcas_mlflow.integration.pages._html import document as document
    from tensorcas_mlflow.integration.pages._html import row as row
    from tensorcas_mlflow.integration.pages._html import table as table
    from tensorcas_mlflow.integration.pages._html import text as text
    from tensorcas_mlflow.integration.pages._html import totals as totals
    from tensorcas_mlflow.integration.pages._html import visible as visible
    from tensorcas_mlflow.integration.pages._run import RunFacts as RunFacts
    from tensorcas_mlflow.integration.pages._run import run_facts as run_facts
    from tensorcas_mlflow.integration.pages._run import run_facts_here as run_facts_here
    from tensorcas_mlflow.integration.pages._tensors import BLOCKED_LINKS as BLOCKED_LINKS
    from tensorcas_mlflow.integration.pages._tensors import Value as Value
    from tensorcas_mlflow.integration.pages._tensors import packed_facts as packed_facts
    from tensorcas_mlflow.integration.pages._tensors import script as script
    from tensorcas_mlflow.integration.pages._tensors import shape_text as shape_text
    from tensorcas_mlflow.integration.pages._tensors import tensor_table as tensor_table

_NAMES = {
    "_facts": "Changes SeriesFacts StepFacts Tensors parts_by_steps",
    "_history": "HISTORY_PAGE MOST_FACTS_CHARS history_page time_text",
    "_html": "SCRIPT SEARCH STYLE Markup document row table text totals visible",
    "_run": "RunFacts run_facts run_facts_here",
    "_tensors": "BLOCKED_LINKS Value packed_facts script shape_text tensor_table",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
