"""Names are shown as text, in pages and at the terminal, whatever they are made of."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.integration.pages import RunFacts, SeriesFacts, history_page, render_page, source
from tensorcas_mlflow.integration.pages._render import script_hash
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import Store

ATTRIBUTES = {
    "html": {"lang"},
    "meta": {"charset", "http-equiv", "content", "name"},
    "label": {"for"},
    **{tag: {"class"} for tag in ("td", "ul")},
    "th": {"scope", "class"},
    "p": {"class", "id", "hidden", "data-view"},
    "span": {"id", "aria-live"},
    "table": {"id"},
    "div": {"class", "style", "title", "data-view", "hidden"},
    "i": {"style"},
    "input": {"id", "type", "autocomplete", "spellcheck"},
    "button": {"id", "type", "hidden", "data-sort", "data-at"},
    "select": {"id", "aria-label", "data-shows", "hidden"},
    "option": {"value"},
    "data": {"id", "value"},
    "a": {"target", "rel", "data-prefix", "data-to", "href"},
    "img": {"style", "alt", "src"},
    "svg": {"viewbox", "role", "aria-label"},
    "text": {"x", "y", "text-anchor"},
    "polyline": {"points", "fill", "stroke", "stroke-width"},
}
PLAIN = {"head", "title", "style", "body", "h1", "h2", "li", "thead", "tbody", "tr", "noscript", "script", "bdi"}
"""Elements of a page that have attributes, and those that have none."""
WITHOUT_END = {"meta", "input", "img"}
CLASSES = {
    "name",
    "spec",
    "size",
    "amount",
    "totals",
    "wide",
    "map",
    "label",
    "picture",
    "picture fine",
    "cursor",
    "key",
    "charts",
    "axis",
    "size optional",
    "time",
    "steps",
}
SCRIPT = source("tensors.js")
POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script_hash(SCRIPT)}'"

PIECES = [
    *("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onload="x', "' x='", "</title></style>"),
    *("</td></tr></table>", "&lt;b&gt;", "&#60;i&#62;", "<!--", "-->", "]]>", "<base href=//x>", "javascript:"),
    *("<meta http-equiv=refresh>", "\x1b[2J\x1b]0;title\x07", "\u202e", "\u2066", "\u200b", "\u2028", "\x85", "\x00"),
    *("\n", "\r", "\t", "\ufeff"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), min_size=1, max_size=4).map("".join)


class Strict(HTMLParser):
    """Reads a page, and refuses what no page of ours has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.policies: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        assert tag in PLAIN or tag in ATTRIBUTES
        assert said.keys() <= ATTRIBUTES.get(tag, set())
        assert said.get("class", "name") in CLASSES
        if said.get("http-equiv"):
            assert said["http-equiv"] == "Content-Security-Policy"
            self.policies.append(said["content"] or "")
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_data(self, data: str) -> None:
        assert self.open[-1:] != ["script"] or data == SCRIPT

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)


def named(text: str) -> str:
    """The nearest name that a tensor can have."""
    return re.sub("[\0\r\n]", "", text).encode("utf-8", "ignore").decode() or "x"


def checkpoint(store: Store, text: str) -> Ref:
    """Save one that is called so in every place."""
    tensors = {named(text): np.arange(3.0), f"a{named(text)}": np.zeros(2, [("f", "i1")])}
    with store.write_checkpoint(tensors, flavor=text[:200].encode("utf-8", "ignore").decode() or "x") as save:
        target = RefTarget(
            uri=f"file:///{text}",
            run_id=text,
            step=1,
            name=text,
            model_id=text,
            metrics={text: float("nan"), "x": 1e300},
        )
        return save.commit(target)


@settings(max_examples=25, derandomize=True, database=None)
@given(texts)
def test_hostile_name_is_only_text_in_a_page(text: str) -> None:
    store = Store.init_backend(MemoryBackend())
    ref = checkpoint(store, text)
    facts = SeriesFacts()
    facts.add(1, text, store.manifest(ref))
    facts.add(2, text, store.manifest(ref))
    run = RunFacts(run_id=text, name=text, experiment_id=text, metrics={text: [(1, 2.0)]}, ui="http://host/ml")
    for page in (render_page(store, ref).decode(), history_page(text, run, facts, dropped={1}, rule=text).decode()):
        assert Strict(page).policies == [POLICY]
        assert page.lower().count("<script") == 1
        assert "innerHTML" not in page
        assert all(char.isprintable() for char in page.replace("\n", ""))


@pytest.mark.long
@settings(max_examples=1500, derandomize=True, database=None)
@given(texts)
def test_hostile_names_are_only_text_in_every_page(text: str) -> None:
    store = Store.init_backend(MemoryBackend())

    assert Strict(render_page(store, checkpoint(store, text)).decode()).policies == [POLICY]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which everything is called as somebody who means harm would call it."""
    folder = tmp_path_factory.mktemp("named")
    store = Store.init(folder)
    checkpoint(store, "".join(piece for piece in PIECES if piece != "\0"))
    checkpoint(store, "\n".join(["run r", "  steps 1, 2, 3"]))
    return folder


@pytest.mark.parametrize(
    "command", ["list", "stats", "verify", "gc --dry-run", "show --step 1 --run", "delete --yes --step 9 --run"]
)
def test_a_name_moves_no_cursor_and_begins_no_line(
    command: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [Store.open(root).checkpoints()[0].run_id or ""] if command.endswith("--run") else []
    main(["--root", str(root), *command.split(), *run])
    printed = capsys.readouterr()

    assert printed.out + printed.err
    assert all(char.isprintable() for char in (printed.out + printed.err).replace("\n", ""))
    assert "\n  steps 1, 2, 3" not in printed.out


@pytest.mark.parametrize("command", ["list", "stats", "verify"])
def test_hostile_names_in_json_are_texts(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(root), *command.split(), "--json"]) == 0
    printed = capsys.readouterr().out

    assert isinstance(json.loads(printed), dict)
    assert printed.isascii()
    assert all(char.isprintable() for char in printed.replace("\n", ""))


WORDS: list[list[str]] = [
    ["show", "--run", "\0", "--step", "1"],
    ["--root", "/\0", "list"],
    ["--root", "/dev/null/x", "list"],
    ["--root", "/" + "x" * 5000, "list"],
    ["--root", "tensorcas:///a%00b", "list"],
    ["--root", "tensorcas-s3://", "list"],
    ["--root", "tensorcas-s3://b/%2e%2e/x", "list"],
    ["--root", "http://[::1", "list"],
    ["--root", "file://host/x", "list"],
    ["--root", "/\udcff\n\x1b[2J", "list"],
    ["gc", "--abandon", "../../x", "--yes"],
    ["gc", "--abandon", "refs/../x", "--yes"],
    ["copy", ".", "\0"],
    ["init", "--chunk-bytes", "4097"],
]


@pytest.mark.parametrize("words", WORDS, ids=repr)
def test_hostile_words_make_an_error_of_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.init(tmp_path)
    monkeypatch.chdir(tmp_path)
    status = main(words)
    error = capsys.readouterr().err

    assert status == 1
    assert error.startswith("tensorcas: ")
    assert error.count("\n") == 1
    assert error[:-1].isprintable()


# --- dtypes and shapes that claim anything

CLAIMS: list[tuple[str, Any]] = [
    ("S99999999999", (1,)),
    ("S999999999", (1,)),
    ("U999999999", (0,)),
    ("{a:{b:int8}}", (1,)),
    ("{" + "a:int8," * 5000 + "}", (1,)),
    ("{a:int8[" + ",".join(["99999999"] * 30) + "]}", (0,)),
    ("{a:int8,a:int8}", (1,)),
    ("{" * 10_000, (1,)),
    ("object", (1,)),
    ("O", (1,)),
    ("datetime64[9999999999s]", (1,)),
    ("float64", (1 << 62, 4)),
    ("float64", (1 << 62, 0)),
    ("float64", (-1,)),
    ("float64", (0,) * 65),
    ("uint8", (1 << 57,)),
]


@pytest.mark.parametrize(("dtype", "shape"), CLAIMS, ids=lambda value: repr(value)[:30])
def test_a_dtype_or_shape_that_cannot_be_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        Spec(name="x", dtype=dtype, shape=shape)
