"""Plans of command-line words, and their printed text."""

from __future__ import annotations

import io

from rich.console import Console

from quantexp.cli.plan_record import Plan, make_plan, with_time
from quantexp.cli.plan_text import show
from quantexp.config.compose import compose

FULL = ["training=default", "capture=tensors"]


def planned(*words: str) -> Plan:
    experiment = compose(list(words), None, {})
    return with_time(make_plan(experiment), experiment)


def text_of(plan: Plan, width: int = 160) -> str:
    out = io.StringIO()
    show(plan, Console(file=out, width=width), lambda plan: plan)
    return out.getvalue()
