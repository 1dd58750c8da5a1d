"""Runs of the script under a scheme, and what their folders say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantexp.runs.paths import RunDir
from tests.extras.megatron_lm.checkout import SPEC, Ended, run_script


def quantised(
    run: RunDir, folder: Path, source: Path, scheme: str, words: list[str], **options: Any
) -> Ended:
    """Run the script in a folder under a scheme; it must succeed."""
    ended = run_script(
        source,
        folder,
        [*SPEC, *words],
        QUANTEXP_QUANT=scheme,
        QUANTEXP_DIR=str(run.root),
        **options,
    )
    assert ended.code == 0, ended.output[-3000:]
    return ended


def lines(run: RunDir) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def proof(run: RunDir) -> dict[str, Any]:
    """precision.json."""
    content: dict[str, Any] = json.loads(run.precision.read_text())
    return content
