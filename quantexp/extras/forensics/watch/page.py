"""The page: one document with its style and script, which loads nothing but the answers of its own server."""

from __future__ import annotations

import html
from dataclasses import dataclass

from quantexp.analysis.report.parts import page_text, policy

_ROOM = "quantexp.extras.forensics.watch"
#: The parts that the report has too.
_SHARED = ("svg.js", "losses.js", "colours.js", "detail.js", "map.js")
_OWN = ("following.js", "numerics.js", "watch.js")


@dataclass(frozen=True)
class Page:
    """The document, and the policy that goes with it as a header."""

    html: bytes
    policy: str


def page(about: str) -> Page:
    """The page about a folder."""
    style = page_text("page.css") + page_text("watch.css", room=_ROOM)
    script = page_text(*_SHARED) + "\n" + page_text(*_OWN, room=_ROOM)
    document = page_text("page.html", room=_ROOM)
    for name, text in (("about", html.escape(about)), ("style", style), ("script", script)):
        document = document.replace(f"{{{{ {name} }}}}", text, 1)
    allowed = policy(style, script, "connect-src 'self'", "frame-ancestors 'none'")
    return Page(document.encode(), allowed)
