"""Every estimator of scikit-learn is stored in one process and comes back in another, bit for bit."""

from __future__ import annotations

import pytest

from tests.flavors.sklearn.models import Seen, differing, names, see

pytestmark = pytest.mark.long

NAMES = names()

UNFITTABLE: dict[str, str] = {}
"""Estimators that cannot be fitted here at all, and why."""

ONLY_LABELS = {
    # They answer no question about new data; what they fitted is compared as attributes.
    "AgglomerativeClustering-0",
    "ClassicalMDS-0",
    "DBSCAN-0",
    "HDBSCAN-0",
    "MDS-0",
    "OPTICS-0",
    "SpectralBiclustering-0",
    "SpectralClustering-0",
    "SpectralCoclustering-0",
    "SpectralEmbedding-0",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """Return what two processes saw: the one that fitted and saved all estimators, and the one that restored them."""
    return see("models", tmp_path_factory.mktemp("sklearn"))


def test_every_estimator_that_can_be_fitted_is_fitted(seen: tuple[Seen, Seen]) -> None:
    saved, _ = seen

    assert {name: facts["error"] for name, facts in saved.items() if "error" in facts}.keys() == UNFITTABLE.keys()


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(UNFITTABLE)))
def test_every_attribute_comes_back_in_a_fresh_process(seen: tuple[Seen, Seen], name: str) -> None:
    saved, loaded = seen

    assert differing(saved[name]["facts"], loaded[name]["facts"]) == []


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(UNFITTABLE)))
def test_every_answer_is_the_same_in_a_fresh_process(seen: tuple[Seen, Seen], name: str) -> None:
    saved, loaded = seen
    told = [key for key in saved[name]["answers"] if "error" not in key and not key.startswith("data")]

    assert differing(saved[name]["answers"], loaded[name]["answers"]) == []
    assert bool(told) == (name not in ONLY_LABELS)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(UNFITTABLE)))
def test_a_model_fitted_to_other_data_answers_like_the_stored_one_once_filled(
    seen: tuple[Seen, Seen], name: str
) -> None:
    saved, loaded = seen

    assert loaded[name].get("refused") is None
    assert differing(saved[name]["answers"], loaded[name]["filled"]) == []


def test_most_models_fitted_to_other_data_answer_differently_before_filling(seen: tuple[Seen, Seen]) -> None:
    saved, loaded = seen

    assert sum(loaded[name]["other"] != saved[name]["answers"] for name in loaded) > 0.7 * len(loaded)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(UNFITTABLE)))
def test_saving_does_not_change_a_model(seen: tuple[Seen, Seen], name: str) -> None:
    saved, _ = seen

    assert differing(saved[name]["facts"], saved[name]["saved"]) == []
