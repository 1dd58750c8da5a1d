"""Collects a run's part of the report from its folder."""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.analysis.compare.comparison import Row
from quantexp.analysis.report.cells import Numerics
from quantexp.analysis.report.facts import Facts, facts
from quantexp.analysis.report.origin import Origin, origin
from quantexp.analysis.report.pictures import Pictures
from quantexp.analysis.report.proof import Proof, proof
from quantexp.analysis.scheme_style import SchemeStyle

#: Maximum shown characters of config.yaml.
MAX_CONFIG = 60_000


@dataclass(frozen=True)
class Part:
    """One run in the report."""

    row: Row
    style: SchemeStyle
    #: Heading -> value of the overview.
    facts: Facts
    proof: Proof
    origin: Origin
    config: str
    numerics: Numerics
    pictures: Pictures


def part(row: Row, style: SchemeStyle, cells: Numerics, pictures: Pictures) -> Part:
    """A run's part of the report."""
    side = row.side
    maps = side.maps
    shown = proof(side.precision, maps[min(maps)] if maps else [], side.names.precision)
    came_from = origin(side.provenance)
    config = side.run.config
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    return Part(
        row,
        style,
        facts(side, shown, came_from),
        shown,
        came_from,
        text if len(text) <= MAX_CONFIG else text[:MAX_CONFIG] + "\n# cut here",
        cells,
        pictures,
    )
