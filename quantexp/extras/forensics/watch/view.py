"""The runs over each other: names, styles and baselines, and the lines that look other than before."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from pathlib import Path
from typing import Any

from quantexp.analysis.compare.labels import labels_of
from quantexp.analysis.compare.side import Side
from quantexp.analysis.report.series import XY, drawn
from quantexp.analysis.scheme_style import BASELINE, SchemeStyle, scheme_styles
from quantexp.extras.forensics.watch.followed import FollowedRun, Pairs
from quantexp.extras.forensics.watch.metrics import gap, late_mean
from quantexp.extras.forensics.watch.rows import GapWords, LedgerRow, run_row

_NOTHING: dict[str, Any] = {"points": [[], []], "mean": [[], []], "window": 1, "band": None}
#: Digits of the values in a page that is sent every few seconds.
_DIGITS = 6


class View:
    """What depends on several runs."""

    def __init__(self) -> None:
        self._sides: list[Side] = []
        self._labels: list[str] = []
        self._styles: list[SchemeStyle] = []
        self._pairs = Pairs([])
        self._losses: dict[Path, dict[str, Any]] = {}
        self._gaps: dict[Path, tuple[dict[str, Any], GapWords | None]] = {}

    def update(self, runs: Sequence[FollowedRun]) -> dict[str, dict[str, Any]]:
        """The lines that look other than at the last call, by the runs' keys."""
        for one in runs:
            one.refresh_side()
        is_anew = self._refresh_sides([one.side for one in runs])
        changed = {one.run.root for one in runs if one.is_to_draw()}
        for one in runs:
            if one.run.root in changed:
                self._losses[one.run.root] = _drawn(one.metrics.line)
        lines = {}
        for i, one in enumerate(runs):
            root, baseline = one.run.root, self._pairs.baseline(i)
            other = None if baseline is None else runs[baseline]
            if is_anew or root in changed or (other is not None and other.run.root in changed):
                self._gaps[root] = _gap(one, other)
                lines[one.key] = {
                    "label": self._labels[i],
                    "colour": self._styles[i].colour,
                    "dash": list(self._styles[i].dash),
                    "baseline": one.side.is_baseline,
                    "loss": self._losses.get(root, _NOTHING),
                    "gap": self._gaps[root][0],
                }
        return lines

    def _refresh_sides(self, sides: list[Side]) -> bool:
        if len(sides) == len(self._sides) and all(map(is_, sides, self._sides)):
            return False
        self._sides, self._labels = sides, labels_of(sides)
        self._styles = scheme_styles([BASELINE if s.quantises_nothing else s.scheme for s in sides])
        self._pairs = Pairs(sides)
        return True

    def rows(
        self, runs: Sequence[FollowedRun], ledger: Sequence[LedgerRow]
    ) -> list[dict[str, Any]]:
        """The rows of the page's table."""
        return [
            run_row(
                *(one, self._labels[i], self._styles[i], ledger[i]),
                *(self._gaps[one.run.root][1], self._pairs.note(i)),
            )
            for i, one in enumerate(runs)
        ]


def _drawn(line: XY) -> dict[str, Any]:
    return drawn(line, _DIGITS) | {"band": None}


def _gap(one: FollowedRun, baseline: FollowedRun | None) -> tuple[dict[str, Any], GapWords | None]:
    if baseline is None or one.metrics.sketch or baseline.metrics.sketch:
        return _NOTHING, None
    line = gap(one.metrics.line, baseline.metrics.line)
    if not len(line[0]):
        return _NOTHING, None
    return _drawn(line), GapWords(f"{line[1][-1]:+.4f}", f"{late_mean(line):+.4f}")
