"""What the sender of a request may see, by MLflow's own answers.

Behind basic-auth, each question goes to the server's own API with the sender's headers: MLflow decides, by whatever
rules it has. Without it, everybody sees everything, as in MLflow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flask import Flask, current_app, request

from tensorcas_mlflow.integration.server_app._tracking import Named

_PAGE = 1000
_MOST_PAGES = 200
_KEPT_HEADERS = ("authorization", "cookie", "host", "x-mlflow-workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment that the sender may read."""

    id: str
    name: str
    location: str
    is_deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What one sender may see."""

    experiments: Mapping[str, Experiment]
    """The readable experiments, by id."""
    is_admin: bool
    """True for an administrator, and for everybody without basic-auth: then nothing is hidden."""

    def sees(self, *owners: Named | None) -> bool:
        """Tell whether all known owners of something are readable, and there is one."""
        if self.is_admin:
            return True
        known = [owner for owner in owners if owner is not None]
        return bool(known) and all(owner.experiment_id in self.experiments for owner in known)


class DeniedError(Exception):
    """The sender is unknown to MLflow, or MLflow refused to answer."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def access_of_sender(*, has_auth: bool) -> Access:
    """Ask MLflow what the sender of this request may read.

    Raises:
        DeniedError: The sender is not known.
    """
    is_admin = True
    if has_auth:
        user = _ask("GET", "mlflow/users/current")
        is_admin = user.get("user", {}).get("is_admin") is True
    found: dict[str, Experiment] = {}
    token: str | None = None
    for _ in range(_MOST_PAGES):
        asked = {"max_results": _PAGE, "view_type": "ALL"} | ({"page_token": token} if token else {})
        answer = _ask("POST", "mlflow/experiments/search", json=asked)
        for each in answer.get("experiments", []):
            found[str(each["experiment_id"])] = Experiment(
                id=str(each["experiment_id"]),
                name=str(each.get("name", "")),
                location=str(each.get("artifact_location", "")),
                is_deleted=each.get("lifecycle_stage") == "deleted",
            )
        token = answer.get("next_page_token")
        if not token:
            break
    return Access(experiments=found, is_admin=is_admin)


def readable_runs(access: Access, runs: Iterable[Named]) -> set[str]:
    """Return the ids of some runs that MLflow shows to the sender: the last word on what a page names."""
    wanted = {run.id: run.experiment_id for run in runs if access.sees(run)}
    if access.is_admin or not wanted:
        return set(wanted)
    named = ", ".join(f"'{run_id}'" for run_id in sorted(wanted))
    asked = {
        "experiment_ids": sorted(set(wanted.values())),
        "filter": f"attributes.run_id IN ({named})",
        "run_view_type": "ALL",
        "max_results": len(wanted),
    }
    answer = _ask("POST", "mlflow/runs/search", json=asked)
    return {str(run["info"]["run_id"]) for run in answer.get("runs", [])} & wanted.keys()


def readable_models(access: Access, models: Collection[Named]) -> set[str]:
    """Return the ids of some logged models that MLflow shows to the sender; its rules are the same in an experiment."""
    seen = [model for model in models if access.sees(model)]
    if access.is_admin or not seen:
        return {model.id for model in seen}
    probes = {model.experiment_id: model.id for model in seen}
    shown = {
        experiment_id
        for experiment_id, model_id in probes.items()
        if _get_or_none(f"mlflow/logged-models/{model_id}") is not None
    }
    return {model.id for model in seen if model.experiment_id in shown}


def model_versions(token: str | None, *, most: int) -> tuple[list[Mapping[str, Any]], str | None]:
    """Return a page of the registry's model versions that the sender may read, and the token of the next page."""
    asked = {"max_results": str(most)} | ({"page_token": token} if token else {})
    answer = _ask("GET", "mlflow/model-versions/search", query=asked)
    return answer.get("model_versions", []), answer.get("next_page_token") or None


def model_aliases(names: Collection[str]) -> Mapping[tuple[str, str], list[str]]:
    """Return the aliases of some registered models, by name and version. A list of versions does not have them."""
    found: dict[tuple[str, str], list[str]] = {}
    missing, token = set(names), None
    while missing:
        # One question for each model would check a password for each.
        asked = {"max_results": "1000"} | ({"page_token": token} if token else {})
        answer = _ask("GET", "mlflow/registered-models/search", query=asked)
        for model in answer.get("registered_models", []):
            missing.discard(str(model.get("name")))
            for each in model.get("aliases", []):
                key = str(model.get("name")), str(each.get("version"))
                found.setdefault(key, []).append(str(each.get("alias")))
        token = answer.get("next_page_token")
        if not token:
            break
    return found


def model_version(name: str, version: str) -> Mapping[str, Any] | None:
    """Return a model version; None if there is none, or the sender may not read it."""
    answer = _get_or_none("mlflow/model-versions/get", {"name": name, "version": version})
    return None if answer is None else answer.get("model_version")


def _get_or_none(path: str, query: Mapping[str, str] | None = None) -> Mapping[str, Any] | None:
    try:
        return _ask("GET", path, query=query)
    except DeniedError as denied:
        if denied.status in (400, 403, 404):
            return None
        raise


def _ask(
    method: str, path: str, *, json: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
) -> Mapping[str, Any]:
    """Call MLflow's API in this process, as the sender of the request."""
    # Not `current_app` itself: it is a proxy bound to this request.
    app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
    prefix = app.config["TENSORCAS_PREFIX"]
    headers = {name: value for name, value in request.headers.items() if name.lower() in _KEPT_HEADERS}
    answer = app.test_client(use_cookies=False).open(
        f"{prefix}/api/2.0/{path}", method=method, json=json, query_string=query, headers=headers
    )
    if answer.status_code != 200:
        raise DeniedError(answer.status_code)
    found = answer.get_json(silent=True)
    return found if isinstance(found, dict) else {}
