"""The frame of a page inside the server, its links, and the two static files. Everything is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlencode

from tensorcas_mlflow.integration.pages import SCRIPT as SEARCH_SCRIPT
from tensorcas_mlflow.integration.pages import STYLE as PAGE_STYLE
from tensorcas_mlflow.integration.pages import Markup, text

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'self'"
)
"""Content-Security-Policy of every answer."""

STYLE = (
    PAGE_STYLE
    + """
a { color: var(--bar); }
a:focus-visible, button:focus-visible, input:focus-visible { outline: 2px solid var(--bar); outline-offset: 2px; }
.skip { position: absolute; left: -999px; } .skip:focus { left: 8px; top: 8px; background: var(--back); padding: 8px; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 20px; padding: 0 0 10px; list-style: none;
 border-bottom: 1px solid var(--line); }
nav [aria-current] { color: var(--fore); font-weight: 600; text-decoration: none; }
td.name a { overflow-wrap: anywhere; } td.report { overflow-wrap: anywhere; }
input[type=checkbox], input[type=radio] { width: auto; } .actions { display: flex; flex-wrap: wrap; gap: 0 12px; }
th a { color: inherit; white-space: nowrap; }
caption { padding: 4px 0; color: var(--dim); text-align: left; }
button { padding: 6px 14px; border: 1px solid var(--bar); border-radius: 4px; background: var(--bar);
 color: var(--back); font: inherit; cursor: pointer; }
form p { margin: 10px 0; } .pages { display: flex; gap: 16px; margin: 10px 0; }
.note { padding: 8px 12px; border-left: 3px solid var(--part); color: var(--fore); }
.bad { color: var(--part); font-weight: 600; } .good { color: var(--new); }
svg .own { fill: var(--bar); } svg .common { fill: var(--plain); } i.own { background: var(--bar); }
i.common { background: var(--plain); } svg.bar { width: 120px; height: 10px; } pre { white-space: pre-wrap; margin: 0;
 overflow-wrap: anywhere; font-size: 12px; }
@media (max-width: 600px) { body { margin: 12px auto; padding: 0 12px; } th, td { padding: 6px 8px 6px 0; }
 .optional, th.report { display: none; } td.name { min-width: 8em; } th.size { white-space: normal; }
 tr:has(td.report) { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--line); }
 tr:has(td.report) td { border: 0; } td.report { flex: 100%; }
 tr:has(th.report) { display: none; } }
@media (prefers-color-scheme: dark) { button { color: #11171c; } }
"""
)
SCRIPT = 'if (document.getElementById("search")) {\n' + SEARCH_SCRIPT + "}\n"


class Page(NamedTuple):
    """A page without its frame."""

    title: str
    body: Iterable[str]
    is_pending: bool = False
    """True if figures are still being computed: the browser asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Addresses of pages. They begin with MLflow's static prefix."""

    prefix: str
    """Static prefix without a slash at its end; often empty."""

    def to(self, page: str = "", /, **query: str | int | None) -> str:
        """Return the address of a page of ours."""
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        return f"{self.prefix}/tensorcas/{page}" + (f"?{asked}" if asked else "")

    def mlflow(self) -> str:
        """Return the address of MLflow's own pages."""
        return f"{self.prefix}/"

    def mlflow_experiment(self, experiment_id: str) -> str:
        """Return the address of MLflow's page of an experiment."""
        return f"{self.prefix}/#/experiments/{quote(experiment_id, safe='')}"

    def mlflow_run(self, experiment_id: str, run_id: str) -> str:
        """Return the address of MLflow's page of a run."""
        return f"{self.mlflow_experiment(experiment_id)}/runs/{quote(run_id, safe='')}"


_PAGES = (("", "Overview"), ("models", "Models"), ("diff", "Compare"), ("health", "Health"))


def frame(page: Page, links: Links, *, current: str) -> Iterator[str]:
    """Yield a page in its frame.

    Args:
        page: Title and body.
        links: Addresses.
        current: The page of the menu that it belongs to.
    """
    again = '<meta http-equiv="refresh" content="2">\n' if page.is_pending else ""
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{again}<title>{text(page.title)}'
        f'</title>\n<link rel="stylesheet" href="{attribute(links.to("style.css"))}">\n'
        f'<script src="{attribute(links.to("script.js"))}" defer></script>\n</head>\n<body>\n'
        '<a class="skip" href="#content">Skip to the content</a>\n<nav aria-label="Pages"><ul>\n'
    )
    for name, label in _PAGES:
        here = ' aria-current="page"' if name == current else ""
        yield f'<li><a href="{attribute(links.to(name))}"{here}>{label}</a></li>\n'
    yield f'<li><a href="{attribute(links.mlflow())}">MLflow</a></li>\n</ul></nav>\n<main id="content">\n'
    yield f"<h1>{text(page.title)}</h1>\n"
    if page.is_pending:
        yield '<p class="note" role="status">Figures are being computed. This page asks again by itself.</p>\n'
    yield from page.body
    yield "</main>\n</body>\n</html>\n"


def link(address: str, words: str) -> Markup:
    """Return a link; an address longer than a page shows of a text is given whole."""
    return Markup(f'<a href="{attribute(address)}">{text(words)}</a>')


def grid(
    headings: Sequence[tuple[str, str | Markup]],
    rows: Iterable[Sequence[str | Markup]],
    *,
    caption: str,
    names: Iterable[str] | None = None,
) -> Iterator[str]:
    """Yield a table with links in it.

    Args:
        headings: The kind and the text of each column; see `tensorcas_mlflow.integration.pages.row`.
        rows: Cells of each row.
        caption: Its caption.
        names: For each row the name by which a search finds it.
    """
    kinds = [kind for kind, _ in headings]
    cells = "".join(f'<th scope="col"{_class(kind)}>{text(words)}</th>' for kind, words in headings)
    yield f'<div class="wide" role="region" aria-label="{text(caption)}" tabindex="0"><table>'
    yield f"<caption>{text(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>\n"
    found_by = iter(names) if names is not None else None
    for each in rows:
        name = "" if found_by is None else f' data-name="{text(next(found_by))}"'
        cells = "".join(f"<td{_class(kind)}>{text(words)}</td>" for kind, words in zip(kinds, each, strict=True))
        yield f"<tr{name}>{cells}</tr>\n"
    yield "</tbody></table></div>\n"


def bar(own: int, common: int, most: int) -> Markup:
    """Draw two sizes as one bar; the cells beside it say them in words."""
    if most <= 0:
        return Markup("")
    left, right = 120 * own / most, 120 * common / most
    return Markup(
        '<svg class="bar" viewBox="0 0 120 10" aria-hidden="true">'
        f'<rect class="own" width="{left:.1f}" height="10"/>'
        f'<rect class="common" x="{left:.1f}" width="{right:.1f}" height="10"/></svg>'
    )


def pager(address: Iterable[tuple[str, str]]) -> str:
    """Return links to other pages of a list, as addresses and words."""
    items = " ".join(f'<a href="{attribute(href)}">{text(words)}</a>' for href, words in address)
    return f'<nav class="pages" aria-label="More of this list">{items}</nav>\n' if items else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def attribute(value: str) -> str:
    """Escape the whole value of an attribute, such as an address; characters that nobody sees are left out."""
    return html.escape("".join(filter(str.isprintable, value)))
