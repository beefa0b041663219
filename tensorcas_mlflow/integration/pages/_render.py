"""The renderer of all pages: templates of Jinja2, in which all content is text and cannot be markup."""

from __future__ import annotations

import base64
import html
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.base.text import count_text, size_text

if TYPE_CHECKING:
    from jinja2 import Environment

_MAX_TEXT = 300


def render(template: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: The name of its template.
        values: Its content. Every text of it is escaped, with what `visible` makes of it.
    """
    return _environment().get_template(template).render(values)


@cache
def source(name: str) -> str:
    """Return the text of a stylesheet or of a script of this room."""
    return files(__package__).joinpath(name).read_text("utf-8")


def script_hash(script: str) -> str:
    """Return the hash by which a page's policy allows a script."""
    return base64.b64encode(sha256(script.encode()).digest()).decode()


def visible(value: str, most: int = _MAX_TEXT) -> str:
    """Make invisible and direction-changing characters of a text visible, and cut it off after so many characters."""
    if len(value) > most:
        value = value[:most] + "…"
    return "".join(c if c.isprintable() else f"\\u{{{ord(c):x}}}" for c in value)


def time_text(created: str) -> str:
    """Format a time in ISO 8601 for people."""
    return created.replace("T", " ").partition(".")[0]


def _period_text(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.3g} s"


@cache
def _environment() -> Environment:
    # A process that logs checkpoints does not wait for Jinja2: it writes its pages in the background.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def address(value: str) -> Markup:
        """Keep an address whole; it loses characters that nobody sees."""
        return Markup(html.escape("".join(filter(str.isprintable, value))))

    made = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"source": source, "script_hash": script_hash}
    made.filters |= {
        "address": address,
        "count": count_text,
        "figure": lambda value: "" if value is None else f"{value:.3g}",
        "number": "{:,}".format,
        "percent": lambda value: "" if value is None else f"{value:.1%}",
        "period": _period_text,
        "size": size_text,
        "time": time_text,
    }
    return made
