"""What the page shows of each run, gathered from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.compare.comparison import Row
from quantexp.analysis.compare.matched import last_iteration
from quantexp.analysis.compare.side import Side
from quantexp.analysis.report.cells import Numerics
from quantexp.analysis.report.origin import Origin, origin
from quantexp.analysis.report.pictures import Pictures
from quantexp.analysis.report.proof import Proof, proof
from quantexp.analysis.scheme_style import scheme_style
from quantexp.format_label import describe_scheme

#: Characters of config.yaml that are shown.
MAX_CONFIG = 60_000


@dataclass(frozen=True)
class Part:
    """One run on the page."""

    row: Row
    colour: str
    #: Heading -> value, of the overview.
    facts: tuple[tuple[str, str], ...]
    proof: Proof
    origin: Origin
    config: str
    numerics: Numerics
    pictures: Pictures


def part(row: Row, cells: Numerics, pictures: Pictures) -> Part:
    """A run's part of the page."""
    side = row.side
    maps = side.maps
    shown = proof(side.precision, maps[min(maps)] if maps else [], side.names.precision)
    came_from = origin(side.provenance)
    config = side.run.config
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    return Part(
        row,
        scheme_style(side.scheme).colour,
        tuple(_facts(row, shown, came_from).items()),
        shown,
        came_from,
        text if len(text) <= MAX_CONFIG else text[:MAX_CONFIG] + "\n# cut here",
        cells,
        pictures,
    )


def _facts(row: Row, shown: Proof, came_from: Origin) -> dict[str, str]:
    side, status = row.side, row.side.status
    speed = side.speed
    found = {
        "state": side.state + (f": {status.reason}" if status and status.reason else ""),
        "model": side.names.model_label,
        "data": side.names.dataset,
        "scheme": describe_scheme(side.scheme, side.names.precision),
        "seed": None if side.seed is None else str(side.seed),
        "proof": f"{'' if shown.proved else 'not proved; '}{shown.words}",
        "numerics": came_from.verified,
        "training": _training(side),
        "speed": None
        if speed.tokens_per_s is None
        else f"{speed.tokens_per_s:,.0f} tokens/s (median without iteration 1; emulation costs time that hardware "
        "would save)",
        "memory": None if speed.memory_gb is None else f"{speed.memory_gb:.1f} GB",
        "captured": _captured(status.capture if status else {}),
        "ran": _ran(side.provenance or {}),
        "folder": side.run.root.name,
    }
    return {key: value for key, value in found.items() if value}


def _training(side: Side) -> str | None:
    if not side.losses.losses:
        return None
    lowest = min(side.losses.losses)
    return f"iteration {last_iteration(side)}, loss {side.last_loss}, lowest {lowest:.4f}"


def _captured(capture: Mapping[str, Any]) -> str | None:
    tensors = capture.get("tensors")
    if not tensors:
        return None
    num_bytes = int(capture.get("num_bytes") or 0)
    return (
        f"{tensors} tensors, {num_bytes / 1e6:,.1f} MB of values"
        if num_bytes
        else f"statistics of {tensors} tensors"
    )


def _ran(provenance: Mapping[str, Any]) -> str | None:
    ran = provenance.get("ran")
    if not isinstance(ran, dict):
        return None
    started = str(ran.get("started") or "")[:19].replace("T", " ")
    return f"on {ran.get('device')} of {ran.get('host')}" + (f", {started} UTC" if started else "")
