"""Integration: everything that knows MLflow.

Models, training states and artifacts come in, with runs and URIs of MLflow; they go out again. What users call raises
our errors as `MlflowException` as well (`_errors`). The room imports the rooms below it; below it nothing knows MLflow.

| room | holds |
|---|---|
| `checkpoints` | states of a run, by step |
| `models` | the flavor |
| `artifacts` | the artifact repository of ``tensorcas:`` locations |
| `directory` | names of runs and experiments, for what people type |
| `forgotten` | what MLflow's deletions leave behind |
| `server_app` | pages inside an MLflow server, and maintenance on a schedule |
| `server_store` | a store in the artifact root of a stock MLflow server |
| `_figures`, `_background` | metrics and tags for MLflow; threads of saves and of reports |
| `_home`, `_artifact_uri` | the store of an artifact root; what an artifact URI names |
| `_policy` | MLflow's rule for code that comes with a model |

`checkpoints` may import the others. `models`, `artifacts` and `forgotten` do not import each other. `server_store`
imports none of them.
"""
