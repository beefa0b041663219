"""The pages in docs/ say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import mlflow
import pytest
import torch

import tensorcas_mlflow
from tensorcas_mlflow import errors

ROOT = Path(__file__).parents[2]


def test_environment_page_lists_the_variables_that_the_package_reads() -> None:
    sources = [ROOT / "tensorcas_mlflow/base/config.py", ROOT / "tensorcas_mlflow/native/__init__.py"]
    read = {name for source in sources for name in re.findall(r'"(TENSORCAS_[A-Z_]+)"', source.read_text("utf-8"))}
    page = (ROOT / "docs/environment.md").read_text("utf-8")

    assert set(re.findall(r"^\| `(TENSORCAS_[A-Z_]+)`", page, flags=re.MULTILINE)) == read


def test_every_page_is_on_the_site_and_in_the_list_for_language_models() -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    on_site = re.findall(r"^[a-z][\w/-]+$", (ROOT / "docs/index.md").read_text("utf-8"), flags=re.MULTILINE)
    listed = re.findall(r"\(_sources/(.+)\.md\.txt\)$", (ROOT / "docs/llms.txt").read_text("utf-8"), flags=re.MULTILINE)

    assert sorted(on_site) == sorted(pages - {"index"})
    assert sorted(listed) == sorted(pages - {"index"})


@pytest.mark.parametrize(
    ("page", "most_words"),
    [
        ("docs/format.md", 8_000),
        ("docs/design/codecs.md", 2_600),
        ("docs/command-line.md", 4_100),
        ("CHANGELOG.md", 600),
    ],
)
def test_page_is_not_longer_than_its_bound(page: str, most_words: int) -> None:
    assert len((ROOT / page).read_text("utf-8").split()) <= most_words


def test_changes_say_what_holds_and_not_what_held_before() -> None:
    for page in (ROOT / "CHANGELOG.md", *sorted((ROOT / "changes").glob("*.md"))):
        text = page.read_text("utf-8")
        assert "(before" not in text
        assert page.name in ("CHANGELOG.md", "README.md") or text.startswith("- "), page


def test_decisions_are_numbered_and_short() -> None:
    page = (ROOT / "docs/design/decisions.md").read_text("utf-8")
    decisions = re.split(r"^### ", page.partition("\n## Dependencies")[0], flags=re.MULTILINE)[1:]
    parts = ("*Context.*", "*Choice.*", "*Consequence.*", "*Supersedes*")

    assert [int(each.partition(".")[0]) for each in decisions] == list(range(1, len(decisions) + 1))
    assert [each[:60] for each in decisions if re.findall(r"^\*\w+\.?\*", each, re.MULTILINE) != list(parts)] == []
    assert [each[:60] for each in decisions if len(each.split()) > 250] == []


def test_troubleshooting_page_has_a_section_for_every_error() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    sections = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")}

    assert len(set(sections)) == len(sections)
    assert set(sections) == classes - {"TensorCasError", "NotFoundError", "FormatError"}


def test_reference_page_has_every_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text("utf-8")
    names = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, flags=re.MULTILINE)

    assert sorted(names) == sorted({*tensorcas_mlflow.__all__} - {"__version__", "errors"})
    assert ".. automodule:: tensorcas_mlflow.errors" in page


def test_quickstart_page_runs_as_printed(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/quickstart.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(block, names)

    torch.manual_seed(0)
    expected = torch.nn.Linear(4, 2)
    model = names["model"]
    assert isinstance(model, torch.nn.Linear)
    assert torch.equal(model.bias, expected.bias + 1 + 1)
    assert capsys.readouterr().out.strip().endswith("[0, 1, 2]")
    assert mlflow.active_run() is None
