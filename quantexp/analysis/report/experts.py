"""The experts of a layer as one cell: the worst expert and its name.

Counts and histograms are added, extremes are those of all experts. Mean, standard deviation and skew of several
experts are left out; of kurtosis and crest factor the largest is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from quantexp.analysis.report.slots import SlotCell, State
from quantexp.capture.statistics.counts import Counts

_COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "count": sum,
    "nonfinite": sum,
    "abs_max": max,
    "kurtosis": max,
    "crest": max,
    "min": min,
    "max": max,
}


def tensors_together(alike: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Merge the contents of several named modules into one."""
    if len(alike) == 1:
        return alike[0][1]
    contents = [content for _, content in alike]
    together: dict[str, Any] = {"experts": len(alike), "dtype": contents[0]["dtype"]}
    states = [content["state"] for content in contents if "state" in content]
    if len(states) == len(contents):
        together["state"] = states[0]
    for key, combine in _COMBINED.items():
        if values := [content[key] for content in contents if key in content]:
            together[key] = combine(values)
    if count := together.get("count"):
        zeros = sum(c.get("zero_share", 0.0) * c.get("count", 0) for c in contents)
        together["zero_share"] = float(f"{zeros / count:.6g}")
    known = [(name, content["abs_max"]) for name, content in alike if "abs_max" in content]
    if known:
        together["largest"] = max(known, key=lambda one: one[1])[0]
    exponents = sum((Counts(c["bins"][0], tuple(c["bins"][1])) for c in contents), Counts())
    outside = [sum(content["bins"][i] for content in contents) for i in (2, 3)]
    shapes = dict.fromkeys(content["shape"] for content in contents)
    together["shape"] = next(iter(shapes)) if len(shapes) == 1 else "of several shapes"
    together["bins"] = [exponents.first, list(exponents.counts), *outside]
    return together


def slots_together(alike: Sequence[tuple[str, SlotCell]]) -> dict[str, Any]:
    """The slot of a module, or of the expert with the lowest SQNR; an infinite error counts as the lowest."""
    judged = [(name, cell) for name, cell in alike if _sqnr_db(cell) is not None]
    name, worst = min(judged or alike, key=lambda one: _sqnr_db(one[1]) or 0.0)
    content: dict[str, Any] = {"state": worst.state.value}
    shares = {
        key: max((v for _, c in alike if (v := getattr(c, key)) is not None), default=None)
        for key in ("underflow_share", "saturated_share")
    }
    numbers = {"sqnr_db": worst.sqnr_db, **shares}
    content |= {key: value for key, value in numbers.items() if value is not None}
    if worst.format:
        content["format"] = worst.format
    if worst.num_elements:
        content["sampled"] = worst.num_elements
    if worst.reason:
        content["reason"] = worst.reason
    if len(alike) > 1:
        content["experts"] = len(alike)
    if len(judged) > 1:
        content["worst"] = name
        finite = [cell.sqnr_db for _, cell in judged if cell.sqnr_db is not None]
        if finite:
            content["best_db"] = max(finite)
    return content


def _sqnr_db(cell: SlotCell) -> float | None:
    """The SQNR, -inf if a finite value became infinite, which the report shows without a number."""
    return -math.inf if cell.state is State.INFINITE else cell.sqnr_db
