"""Entry points of MLflow: the artifact repository, and the module ``mlflow.tensorcas``.

MLflow imports this module at the end of its own import, so every user of MLflow pays for it, and an error here breaks
their ``import mlflow``. It imports next to nothing, and raises nothing but `ImportError`.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

import tensorcas_mlflow

if TYPE_CHECKING:
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

FACADE = "mlflow.tensorcas"

_DOC = """Models as deduplicated tensors in a content-addressed store.

    info = mlflow.tensorcas.log_model(model, name="model", step=epoch)
    model = mlflow.tensorcas.load_model(info.model_uri)

    mlflow.tensorcas.log_checkpoint({"model": model, "optimizer": optimizer}, step=step)
    mlflow.tensorcas.load_checkpoint(into={"model": model, "optimizer": optimizer})

A tensor already held by any step, run or experiment of the same store is not stored again. ``docs/api.md`` lists the
names and the rules; ``import tensorcas_mlflow as tensorcas`` gives the same objects.
"""


def _make_facade() -> types.ModuleType:
    """Make ``mlflow.tensorcas``: the public names of this package, each imported on first use.

    The facade is a plain module, pickled by name. A package under a second name would import its submodules twice.
    """
    facade = types.ModuleType(FACADE, _DOC)

    names = sorted(name for name in tensorcas_mlflow.__all__ if not name.startswith("_"))

    def look_up(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {FACADE!r} has no attribute {name!r}")
        try:
            value = getattr(tensorcas_mlflow, name)
        except ImportError:
            raise
        except Exception as error:
            raise ImportError(f"{FACADE} cannot be used: {error}") from error
        setattr(facade, name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(facade), *names})

    vars(facade).update(
        __spec__=ModuleSpec(FACADE, None),
        __package__="mlflow",
        __all__=names,
        __getattr__=look_up,
        __dir__=list_names,
    )
    return facade


def _artifact_repository(
    artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
) -> ArtifactRepository:
    """Make the repository of a ``tensorcas:`` URI, as MLflow's registry asks for it."""
    try:
        from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(f"tensorcas: artifacts cannot be used: {error}") from error
    return TensorCasArtifactRepository(artifact_uri, tracking_uri, registry_uri)


def _install_facade() -> None:
    """Install ``mlflow.tensorcas`` for imports and attribute look-ups, if there is an ``mlflow``."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None:
        vars(mlflow)["tensorcas"] = sys.modules.setdefault(FACADE, _make_facade())


def __getattr__(name: str) -> Any:
    # MLflow's look-up of the entry point installs the facade. The body of this module may run before mlflow exists.
    if name != "artifact_repository":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _install_facade()
    return _artifact_repository
