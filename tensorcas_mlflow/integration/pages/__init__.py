"""Pages: the renderer of all of them, and those that are files, one self-contained HTML document each.

`_render` fills the templates, in which every text is escaped; the pages inside a server have theirs here, too. `_facts`
reads manifests, `_earlier` finds what was there before, `_run` asks MLflow for a run; `_history` is the page of a
series, `_checkpoint` that of a checkpoint, and `_tensors` the data that both give their script. A page that is a file
loads nothing from anywhere. Its script shows the page's own data, as text only.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.pages._checkpoint import PAGE_ENDING as PAGE_ENDING
    from tensorcas_mlflow.integration.pages._checkpoint import page_bytes as page_bytes
    from tensorcas_mlflow.integration.pages._checkpoint import render_page as render_page
    from tensorcas_mlflow.integration.pages._checkpoint import run_of as run_of
    from tensorcas_mlflow.integration.pages._earlier import PAYLOAD_ENDING as PAYLOAD_ENDING
    from tensorcas_mlflow.integration.pages._earlier import order as order
    from tensorcas_mlflow.integration.pages._earlier import series_of as series_of
    from tensorcas_mlflow.integration.pages._earlier import step_of as step_of
    from tensorcas_mlflow.integration.pages._facts import SeriesFacts as SeriesFacts
    from tensorcas_mlflow.integration.pages._facts import StepFacts as StepFacts
    from tensorcas_mlflow.integration.pages._facts import parts_by_steps as parts_by_steps
    from tensorcas_mlflow.integration.pages._history import HISTORY_PAGE as HISTORY_PAGE
    from tensorcas_mlflow.integration.pages._history import history_bytes as history_bytes
    from tensorcas_mlflow.integration.pages._history import history_page as history_page
    from tensorcas_mlflow.integration.pages._render import render as render
    from tensorcas_mlflow.integration.pages._render import source as source
    from tensorcas_mlflow.integration.pages._run import RunFacts as RunFacts
    from tensorcas_mlflow.integration.pages._run import run_facts as run_facts

_NAMES = {
    "_checkpoint": "PAGE_ENDING page_bytes render_page run_of",
    "_earlier": "PAYLOAD_ENDING order series_of step_of",
    "_facts": "SeriesFacts StepFacts parts_by_steps",
    "_history": "HISTORY_PAGE history_bytes history_page",
    "_render": "render source",
    "_run": "RunFacts run_facts",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
