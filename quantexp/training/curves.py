"""One rank's statistics for the trackers: after each captured iteration, rank 0 writes a line of curves.jsonl.

The statistics are those of the capture. Those that its background thread has not computed by the end of the iteration
are computed now, by training's own threads; nothing waits for a disk. Micro-batches and ranks are merged
(`quantexp.capture.statistics.moments`). Values that do not exist, or are not finite, are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from quantexp.capture.names import TensorName
from quantexp.capture.select.curves import Curve, choose_curves, curves_in_words
from quantexp.runs.curves import CurvesLine
from quantexp.runs.disk import writing
from quantexp.schema import TrackedStatistic
from quantexp.training.context import RunContext
from quantexp.training.log import LOG

if TYPE_CHECKING:
    from quantexp.capture.record.recorder import Recorder
    from quantexp.capture.statistics.moments import Totals
    from quantexp.capture.statistics.summary import Summary
    from quantexp.capture.store.deferred import Deferred

#: Layer, module and name of a tensor.
Key = tuple[int, str, str]


class Curves:
    """The chosen statistics of one rank's recorder."""

    def __init__(self, context: RunContext, recorder: Recorder) -> None:
        self._context, self._recorder = context, recorder
        choice = choose_curves(context.experiment)
        self._curves = choice.curves
        self._keys = {_key_of(curve) for curve in choice.curves}
        self._pending: list[tuple[Key, Summary | Deferred]] = []
        recorder.on_statistics = self._add
        if context.rank.leads:
            context.run.curves.touch()  # uploads open it together with metrics.jsonl
            if choice.num_left_out or choice.missing:
                missing = [each.value for each in choice.missing]
                LOG.info(
                    curves_in_words(len(choice.curves), choice.num_left_out, choice.layers, missing)
                )

    def _add(self, name: TensorName, statistics: Summary | Deferred) -> None:
        key = (name.layer, name.module, name.tensor)
        if key in self._keys:
            self._pending.append((key, statistics))

    def after(self, iteration: int) -> CurvesLine | None:
        """Merge the statistics of a captured iteration and write them; every rank calls this.

        Returns the line on rank 0; None on other ranks, and after an iteration that is not captured.
        """
        from quantexp.training.megatron.collectives import gather

        if not self._recorder.captures(iteration):
            return None
        own = self._totals()
        ranks = [own] if self._context.rank.alone else gather(own)
        if not self._context.rank.leads:
            return None
        merged: dict[Key, Totals] = {}
        for of_rank in ranks:
            _add_up(merged, of_rank.items())
        line = _line(iteration, self._curves, merged)
        text = json.dumps(line, allow_nan=False) + "\n"
        file = self._context.run.curves
        with writing(file, len(text)), file.open("a") as stream:
            stream.write(text)
        return line

    def _totals(self) -> dict[Key, Totals]:
        """The totals of this rank's tensors, over micro-batches."""
        from quantexp.capture.store.deferred import all_summaries

        pending, self._pending = self._pending, []
        summaries = all_summaries([statistics for _, statistics in pending])
        totals: dict[Key, Totals] = {}
        _add_up(totals, _totals_of(pending, summaries))
        return totals


def _key_of(curve: Curve) -> Key:
    return curve.layer, curve.module, curve.tensor


def _totals_of(
    pending: Sequence[tuple[Key, object]], summaries: Sequence[Summary | None]
) -> Iterator[tuple[Key, Totals]]:
    from quantexp.capture.statistics.summary import all_totals

    counted = [
        (key, summary)
        for (key, _), summary in zip(pending, summaries, strict=True)
        if summary is not None
    ]
    totals = all_totals([summary for _, summary in counted])
    for (key, _), each in zip(counted, totals, strict=True):
        yield key, each


def _add_up(merged: dict[Key, Totals], more: Iterable[tuple[Key, Totals]]) -> None:
    for key, totals in more:
        merged[key] = merged[key] + totals if key in merged else totals


def _line(iteration: int, curves: Sequence[Curve], merged: Mapping[Key, Totals]) -> CurvesLine:
    line: CurvesLine = {"iteration": iteration, "scalars": {}, "histograms": {}}
    for curve in curves:
        totals = merged.get(_key_of(curve))
        if totals is None:
            continue
        if curve.statistic is TrackedStatistic.histogram:
            if totals.magnitudes.counts:
                line["histograms"][curve.tag] = totals.magnitudes.json()
            continue
        value = _SCALARS[curve.statistic](totals)
        if value is not None and math.isfinite(value):
            line["scalars"][curve.tag] = value
    return line


_SCALARS: Mapping[TrackedStatistic, Callable[[Totals], float | None]] = {
    TrackedStatistic.amax: lambda totals: totals.amax,
    TrackedStatistic.sqnr: lambda totals: totals.sqnr_db,
    TrackedStatistic.underflow: lambda totals: totals.underflow_share,
    TrackedStatistic.saturation: lambda totals: totals.saturated_share,
}
