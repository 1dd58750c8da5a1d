"""The content of precision.json: the precision map, with the calls and the proof of each of its entries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Required, TypedDict

from quantexp.reading.json_files import require_json
from quantexp.reading.typed import Count


class PrecisionPart(TypedDict, total=False):
    """A part of a slot's operand: what it takes, and the options of its format besides."""

    take: Required[str]
    format: Required[str]


class PrecisionEntry(TypedDict, total=False):
    """A slot of the map; it has the options of its format besides, and the proof's keys after the proof."""

    layer: Count | None
    module: str
    site: str
    product: str
    operand: str
    format: Required[str]
    parts: list[PrecisionPart]
    calls: Count
    recomputed_calls: Count
    quantised_calls: Count
    product_elements: Count
    product_rows: Count
    status: str
    reason: str


class Precision(TypedDict, total=False):
    """The proof of one iteration."""

    iteration: Count
    proved: bool
    quantised_calls: Count
    failures: list[str]
    router_calls: dict[str, Count]
    #: What was drawn and compared in later iterations.
    drawn: dict[str, Count]
    entries: Required[list[PrecisionEntry]]


def proof_word(precision: Mapping[str, Any] | None) -> str | None:
    """`proved` or `failed`; None without a proof."""
    if precision is None or precision.get("proved") is None:
        return None
    return "proved" if precision["proved"] else "failed"


def read_precision(file: Path) -> Precision:
    """The content of precision.json.

    Raises:
        UnreadableError: names the file and what is wrong with it.
    """
    return require_json(file, Precision)
