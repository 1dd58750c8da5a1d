"""Plans of command-line words, and their printed text."""

from __future__ import annotations

import io

from rich.console import Console

from quantexp.cli.plan_record import Plan, make_plan
from quantexp.cli.plan_text import show
from quantexp.config.compose import compose

FULL = ["training=default", "capture=tensors"]


def planned(*words: str) -> Plan:
    return make_plan(compose(list(words), None, {}))


def text_of(plan: Plan, width: int = 160) -> str:
    out = io.StringIO()
    show(plan, Console(file=out, width=width))
    return out.getvalue()
