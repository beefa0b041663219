"""The frame of all pages: head, style, the search, and escaped text."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np

_MAX_TEXT = 300

STYLE = """
:root { color-scheme: light dark; --back: #fff; --fore: #1f272d; --dim: #5f7281; --line: #e8ecf0; --new: #0a6640;
 --part: #925d00; --bar: #2272b4; --plain: #b5bec6; }
@media (prefers-color-scheme: dark) { :root { --back: #11171c; --fore: #e8ecf0; --dim: #92a4b3; --line: #2b3740;
 --new: #5cc48f; --part: #e0a94a; --bar: #5ea7e0; --plain: #55636f; } }
body { margin: 24px auto; padding: 0 20px; max-width: 1200px; background: var(--back); color: var(--fore);
 font: 14px/1.45 system-ui, sans-serif; }
h1 { margin: 0 0 4px; font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
h2 { margin: 28px 0 8px; font-size: 16px; font-weight: 600; }
p { margin: 4px 0; color: var(--dim); overflow-wrap: anywhere; }
ul.totals { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 16px 0; padding: 0; list-style: none; }
ul.totals li { font-size: 18px; } ul.totals span { display: block; color: var(--dim); font-size: 12px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 8px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--dim); font-size: 12px; font-weight: 600; }
td { unicode-bidi: isolate; } td.name, td.shape { overflow-wrap: anywhere; } td.name { min-width: 12em; }
td.name, td.shape { font-family: ui-monospace, monospace; font-size: 13px; }
th.size, td.size { text-align: right; white-space: nowrap; } td.time { white-space: nowrap; }
.new { color: var(--new); font-weight: 600; } .part { color: var(--part); } .shared { color: var(--dim); }
summary { padding: 4px 0; cursor: pointer; } details { border-bottom: 1px solid var(--line); }
details table { margin: 0 0 8px 16px; width: calc(100% - 16px); }
input { width: 100%; max-width: 30em; box-sizing: border-box; padding: 6px 8px; border: 1px solid var(--dim);
 border-radius: 4px; background: var(--back); color: var(--fore); font: inherit; }
svg, img { display: block; max-width: 100%; } img { image-rendering: pixelated; }
p.axis { display: flex; justify-content: space-between; margin: 0; font-size: 12px; }
.map { display: grid; grid-template-columns: minmax(6em, max-content) 1fr; gap: 0 8px; align-items: stretch; }
.map .label { overflow: hidden; max-width: 22em; font: 11px/14px ui-monospace, monospace; white-space: nowrap;
 text-overflow: ellipsis; direction: rtl; text-align: right; }
.picture { grid-column: 2; position: relative; border: 1px solid var(--line); cursor: pointer; }
.map .picture img { position: absolute; width: 100%; height: 100%; } .fine img { image-rendering: auto; }
polyline { vector-effect: non-scaling-stroke; }
.cursor { position: absolute; top: -3px; bottom: -3px; border-left: 2px solid var(--bar); pointer-events: none; }
[hidden] { display: none !important; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24em, 100%), 1fr)); gap: 0 32px; }
a { color: var(--bar); } h2 select { margin-left: 8px; }
button, select { padding: 4px 8px; border: 1px solid var(--line); border-radius: 4px; background: var(--back);
 color: var(--fore); font: inherit; } button:not(:disabled) { cursor: pointer; }
:focus-visible { outline: 2px solid var(--bar); outline-offset: 1px; }
th button { padding: 0; border: 0; color: inherit; font-weight: inherit; }
th[aria-sort="ascending"] button::after { content: " ▴"; }
th[aria-sort="descending"] button::after { content: " ▾"; }
#tensors td.size, #tensors th.size { padding-right: 24px; }
#tensors td.name { padding-left: calc(18px * var(--depth, 0)); } #tensors th:nth-child(5) { min-width: 14em; }
button.fold, td button { padding: 0; border: 0; text-align: left; overflow-wrap: anywhere; }
button.fold { font-weight: 600; }
button.fold:disabled { color: var(--fore); } span.leaf { display: block; padding-left: 15px; }
tr.fold td { color: var(--dim); } td button { color: var(--bar); } td button.fold { color: var(--fore); }
td.spec { white-space: nowrap; } td button[data-at] { overflow-wrap: normal; }
tr.gone td { color: var(--dim); } p.steps { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; }
@media (max-width: 640px) { body { padding: 0 12px; } th, td { padding-right: 8px; }
 .map { grid-template-columns: minmax(5em, 9em) 1fr; }
 #tensors tr { display: grid; grid-template-columns: 1fr auto; padding: 4px 0; border-bottom: 1px solid var(--line); }
 #tensors td, #tensors th { padding: 1px 0; border: 0; } #tensors .spec { display: none; }
 #tensors td.name { padding-left: calc(10px * var(--depth, 0)); } #tensors .size { padding-right: 0 !important; }
 #tensors td.name::after { content: attr(data-spec); display: block; padding-left: 15px; color: var(--dim);
 font-size: 11px; }
 #tensors td.amount { text-align: right; } #tensors td:nth-last-child(-n+2):not(.size) { font-size: 12px; }
 #tensors td:nth-child(5) { padding-left: calc(10px * var(--depth, 0) + 15px); } .optional { display: none; } }
.key { display: flex; gap: 16px; flex-wrap: wrap; margin: 6px 0; color: var(--dim); font-size: 12px; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 4px; vertical-align: -1px;
 box-sizing: border-box; border: 1px solid var(--line); }
"""

SCRIPT = """
const box = document.getElementById("search");
box.hidden = false;
box.addEventListener("input", () => {
  const words = box.value.toLowerCase();
  for (const row of document.querySelectorAll("tr[data-name]"))
    row.hidden = !row.dataset.name.toLowerCase().includes(words);
  for (const part of document.querySelectorAll("details.tensors")) {
    const some = part.querySelector("tr[data-name]:not([hidden])") !== null;
    part.hidden = !some;
    if (words) part.open = some;
  }
});
"""
SEARCH = (
    '<p><label for="search">Search tensors by name</label></p>\n'
    '<input id="search" type="search" hidden autocomplete="off" spellcheck="false">\n'
)
"""The box of the search; rows to search have their tensor's name in ``data-name``."""


class Markup(str):
    """A text that is HTML, with everything escaped that must be."""

    __slots__ = ()


def script_hash(script: str) -> str:
    """Return the hash by which a page's policy allows a script."""
    return base64.b64encode(sha256(script.encode()).digest()).decode()


def document(title: str, body: Iterable[str], *, has_search: bool = False, script: str = "") -> Iterator[str]:
    """Yield a page.

    Args:
        title: Its title, escaped here.
        body: HTML of its content.
        has_search: Whether the content holds `SEARCH`.
        script: A script of the page's own, in place of the search's.
    """
    if has_search:
        script = SCRIPT
    policy = f"; script-src 'sha256-{script_hash(script)}'" if script else ""
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'{policy}\">\n"
        f'<meta name="viewport" content="width=device-width">\n<title>{text(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
    )
    yield from body
    if script:
        yield f"<script>{script}</script>\n"
    yield "</body>\n</html>\n"


def text(value: str) -> str:
    """Escape text, unless it is `Markup`.

    It then has no meaning as markup, and invisible and direction-changing characters are visible.
    """
    return value if isinstance(value, Markup) else html.escape(visible(value))


def visible(value: str, most: int = _MAX_TEXT) -> str:
    """Make invisible and direction-changing characters of a text visible, and cut it off after so many characters."""
    if len(value) > most:
        value = value[:most] + "…"
    return "".join(c if c.isprintable() else f"\\u{{{ord(c):x}}}" for c in value)


def totals(items: Iterable[tuple[str, str]]) -> str:
    """Return a row of labeled figures; a figure is escaped here unless it is `Markup`."""
    cells = "".join(f"<li><span>{text(label)}</span>{text(value)}</li>\n" for label, value in items)
    return f'<ul class="totals">\n{cells}</ul>\n'


def table(headings: Iterable[tuple[str, str]], rows: Iterable[str]) -> Iterator[str]:
    """Yield a table.

    Args:
        headings: The kind and the text of each heading; see `row`.
        rows: Its rows, from `row`.
    """
    cells = "".join(_cell("th", *heading) for heading in headings)
    yield f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n'
    yield from rows
    yield "</tbody></table></div>\n"


def row(cells: Iterable[tuple[str, str]], *, name: str | None = None) -> str:
    """Return a row of a table.

    Args:
        cells: The kind of each cell, one of the style's classes or "", and its text, escaped here unless it is
            `Markup`.
        name: The name by which a search finds the row.
    """
    found_by = "" if name is None else f' data-name="{text(name)}"'
    return f"<tr{found_by}>{''.join(_cell('td', *cell) for cell in cells)}</tr>\n"


def _cell(tag: str, kind: str, words: str) -> str:
    opening = f'<{tag} class="{kind}">' if kind else f"<{tag}>"
    return f"{opening}{text(words)}</{tag}>"


def png(pixels: Any, palette: Any) -> str:
    """Return a picture as a ``data:`` URI.

    Args:
        pixels: The number of each pixel's color, uint8, shape ``(height, width)``.
        palette: The colors and how opaque they are, uint8, shape ``(n, 4)``.
    """
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)
    lines[:, 1:] = pixels

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    chunks = (
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", palette[:, :3].tobytes()),
        chunk(b"tRNS", palette[:, 3].tobytes()),
        chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
        chunk(b"IEND", b""),
    )
    encoded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    return f"data:image/png;base64,{encoded}"
