"""Pipelines, searches, ensembles, tables, sparse matrices and users' estimators come back bit for bit."""

from __future__ import annotations

import pytest

from tests.flavors.sklearn.composed import MODELS
from tests.flavors.sklearn.models import Seen, differing, see

pytestmark = pytest.mark.long

REFUSED = {
    "calibrated": "another fit finds another number of steps",
    "sparse support vectors": "another fit finds other support vectors, and so other places in the sparse matrix",
}
"""Models that a second fit to such data has other shapes of, and why."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """Return what two processes saw: the one that fitted and saved all models, and the one that restored them."""
    return see("composed", tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("name", MODELS)
def test_every_attribute_comes_back_in_a_fresh_process(seen: tuple[Seen, Seen], name: str) -> None:
    saved, loaded = seen

    assert "error" not in saved[name]
    assert differing(saved[name]["facts"], loaded[name]["facts"]) == []


@pytest.mark.parametrize("name", MODELS)
def test_every_answer_is_the_same_in_a_fresh_process(seen: tuple[Seen, Seen], name: str) -> None:
    saved, loaded = seen

    assert any("error" not in key and not key.startswith("data") for key in saved[name]["answers"])
    assert differing(saved[name]["answers"], loaded[name]["answers"]) == []


@pytest.mark.parametrize("name", MODELS)
def test_a_model_fitted_to_other_data_answers_like_the_stored_one_once_filled(
    seen: tuple[Seen, Seen], name: str
) -> None:
    saved, loaded = seen

    expected = loaded[name]["other"] if name in REFUSED else saved[name]["answers"]

    assert ("refused" in loaded[name]) == (name in REFUSED)
    assert differing(expected, loaded[name]["filled"]) == []
