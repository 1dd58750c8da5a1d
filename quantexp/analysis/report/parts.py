"""What every page is made of: scripts and style sheets, the policy that lets no others in, its data. Needs no torch."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from quantexp.terminal.escaping import printable_content

_ROOM = "quantexp.analysis.report"


def page_text(*names: str, room: str = _ROOM) -> str:
    """The files of a room's folder `page`, one after another."""
    folder = files(room) / "page"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def policy(style: str, script: str, *more: str) -> str:
    """The Content-Security-Policy of a page with one style sheet, one script and images inside, and more directives."""
    directives = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *more,
    )
    return "; ".join(directives)


def embedded(content: Any) -> Markup:
    """JSON for a script element, escaped so that it cannot end the element or start another."""
    text = json.dumps(printable_content(content), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
