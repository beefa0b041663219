"""HTML of pages, made from values without a server."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcas_mlflow.integration.server_app._content import (
    ChangeLine,
    CheckpointPage,
    DiffPage,
    ExperimentLine,
    ExperimentPage,
    HealthPage,
    ModelsPage,
    OverviewPage,
    RelationLine,
    RoundLine,
    RunLine,
    RunPage,
    StepLine,
    StoreHealth,
    StoreLine,
    TensorLine,
    VersionLine,
    to_json,
)
from tensorcas_mlflow.integration.server_app._site import Links, Notice, page
from tensorcas_mlflow.integration.server_app._tracking import Named
from tensorcas_mlflow.maintenance import OwnedBytes
from tests.integration.server_app.test_pages import check_is_safe

LINKS = Links(prefix="/team")
OWNED = OwnedBytes(3, 5_000_000, 2_000, 1)
NAMES = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "\u202egnp.exe",
    "a\u0000b\nc",
    "ü" * 10_000,
    "javascript:alert(1)",
    "&lt;b&gt;",
]
STORE = StoreLine("abc", None, 3, None, 0, 1_790_000_000.0, None)


def html(view: str, content: Any) -> str:
    return page(view, content, LINKS)


def step(name: str, number: int | None = 1) -> StepLine:
    return StepLine(
        "abc", f"refs/runs/{name[:50]}/@1", name, "checkpoint", name, number, "2026-01-02T03:04:05.6", OWNED
    )


def contents(name: str) -> list[str]:
    """Every page, with one name everywhere."""
    line = step(name)
    said = RoundLine(name, 1.0, 2.0, "failed", name)
    run = RunLine(name, name, True, OWNED)
    health = StoreHealth(STORE, 9, 1, 9, 8, 7, 1, 1, 1, [(name, 0, 1, 2, 3)], said, said, [said])
    experiment = ExperimentLine(name, name, False, 1, OWNED)
    change = ChangeLine(name, "changed", 8, float("inf"), None, 0.5)
    owner = Named(name, name, name, False)
    tensors = [TensorLine(name, name, (2, 3), 24)]
    relatives = [RelationLine(name, True, name, 0.5, 1, 0, 2, "abc", name)]
    diff = DiffPage(name[:300], name[:300], line, line, True, {"changed": (1, 2)}, (name,), [change], 1, 1, name)
    checkpoint = CheckpointPage(line, owner, owner, name, {name: 1.0}, 1, 24, tensors, line, relatives, None, False)
    return [
        html("overview", OverviewPage([STORE._replace(uri=name, error=name)], [experiment], OWNED, False)),
        html("experiment", ExperimentPage(name, name, OWNED, [run], 1, [], 0, 1, "freed", 1, False)),
        html("run", RunPage(name, name, name, name, OWNED, [line, line], 2, 1, False)),
        html("checkpoint", checkpoint),
        html("diff", diff),
        html("models", ModelsPage([VersionLine(name, "1", (name,), name, "abc", name, OWNED)], name, False)),
        html("health", HealthPage([health], [STORE._replace(error=name)], {"verify": 60.0}, True, False)),
        html("run", Notice(name, name)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_any_name_is_text_and_short(name: str) -> None:
    for shown in contents(name):
        check_is_safe(shown)
        assert "<img src=x" not in shown
        assert "onmouseover='" not in shown
        assert "\0" not in shown
        assert "ü" * 301 not in shown


def test_page_can_be_read_without_sight_or_mouse() -> None:
    for shown in contents("name"):
        assert '<html lang="en">' in shown
        assert 'href="#content"' in shown
        assert shown.count("<h1>") == 1
        for part in shown.split("<table>")[1:]:
            assert part.startswith("<caption>")
            assert 'scope="col"' in part
        assert shown.count("<input id=") == shown.count('<label for="')


def test_page_asks_again_only_while_figures_are_computed() -> None:
    pending = OverviewPage([STORE], [], None, True)

    assert 'http-equiv="refresh"' in html("overview", pending)
    assert 'http-equiv="refresh"' not in html("overview", pending._replace(is_pending=False))


def test_page_says_nothing_of_an_experiment_or_run_before_its_figures_are_known() -> None:
    nothing = OwnedBytes(0, 0, 0, 0)
    pages = [
        html("experiment", ExperimentPage("1", "one", nothing, [], 0, [], 0, 1, "freed", 1, True)),
        html("run", RunPage("a", "ant", "1", "one", nothing, [], 0, 1, True)),
    ]

    for shown in pages:
        assert "0 B" not in shown
        assert "nothing" not in shown
        assert "No run" not in shown


def test_lists_lead_to_their_next_and_previous_pages() -> None:
    runs = [RunLine(str(number), str(number), False, OWNED) for number in range(100)]

    shown = html("experiment", ExperimentPage("1", "one", OWNED, runs, 250, [], 0, 2, "shared", 1, False))

    assert "runs 101 to 200 of 250" in shown
    assert "/team/tensorcas/experiment?id=1&amp;sort=shared&amp;page=3" in shown
    assert "/team/tensorcas/experiment?id=1&amp;sort=shared&amp;page=1" in shown


def test_equal_checkpoints_are_said_to_be_equal() -> None:
    counts = {"changed": (0, 0), "added": (0, 0), "removed": (0, 0), "equal": (2, 8)}
    content = DiffPage("a", "b", step("x"), step("y"), False, counts)

    assert "equal, bit for bit" in html("diff", content)
    assert "equal, bit for bit" not in html("diff", content._replace(other=("metadata",)))


def test_content_becomes_json_without_numbers_that_json_lacks() -> None:
    change: Any = ChangeLine("w", "changed", 8, float("inf"), float("nan"), 0.5)

    assert to_json([change]) == [
        {
            "name": "w", "change": "changed", "n_bytes": 8, "relative_norm": "inf", "max_absolute": "nan",
            "share_equal": 0.5,
        }
    ]  # fmt: skip
