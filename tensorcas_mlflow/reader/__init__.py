"""Reader: any part of one checkpoint; import and export.

A ref, a manifest or a path comes in. Arrays, summaries and differences go out, or files of other formats, or a
checkpoint of such a file. The room imports the store and everything below it. It knows no MLflow and takes no
inventory, so it does not import `maintenance`.

| module | holds |
|---|---|
| `_reader` | `CheckpointReader`, a mapping of names to arrays |
| `_open` | readers of refs, manifests and paths |
| `_contents`, `_listed` | sources of a reader's tensors |
| `_slices` | byte ranges that an index needs, and their chunks |
| `_outline`, `_summary` | layers and experts, and the tree of a checkpoint |
| `_diff` | differences of two checkpoints |
| `_lineage` | relatives of a model in its store |
| `_exchange` | import and export |
| `_rebuild` | models from tensors, under MLflow's rule for pickles |
| `_frameworks` | the frameworks of tensors, besides numpy |
| `_safe_open` | the methods of `safetensors.safe_open` |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.reader._diff import CheckpointDiff, ValueChange, diff, measure_some
    from tensorcas_mlflow.reader._exchange import PreparedImport, import_checkpoint, plan_export, prepare_import
    from tensorcas_mlflow.reader._lineage import Lineage, Relation, lineage
    from tensorcas_mlflow.reader._open import open_listed, open_manifest, open_path, open_ref
    from tensorcas_mlflow.reader._outline import Naming
    from tensorcas_mlflow.reader._reader import CheckpointReader
    from tensorcas_mlflow.reader._rebuild import ReadArrays, StoreReads, check_call, given, rebuild, refuse_pickle
    from tensorcas_mlflow.reader._safe_open import SafeOpen
    from tensorcas_mlflow.reader._summary import Summary, SummaryNode

_NAMES = {
    "_diff": "CheckpointDiff ValueChange diff measure_some",
    "_exchange": "PreparedImport import_checkpoint plan_export prepare_import",
    "_lineage": "Lineage Relation lineage",
    "_open": "open_listed open_manifest open_path open_ref",
    "_outline": "Naming",
    "_reader": "CheckpointReader",
    "_rebuild": "ReadArrays StoreReads check_call given rebuild refuse_pickle",
    "_safe_open": "SafeOpen",
    "_summary": "Summary SummaryNode",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
