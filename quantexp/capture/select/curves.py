"""The curves of captured statistics that trackers receive, chosen from the configuration alone.

A curve is one statistic of one captured tensor before quantisation. Beyond `tracking.most_curves`, as many evenly
spread layers as fit have curves, from the first layer to the last; if not even one fits, the first curves of the first
layer. SQNR, underflow and saturation exist for the tensors that the statistics score: all of them with
`capture.format`, else those that a product of the scheme quantises.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantexp.capture.names import place
from quantexp.capture.operands import first_quantised
from quantexp.capture.select.choice import expected_tensors
from quantexp.capture.select.schedule import captured_iterations
from quantexp.quant.precision import precision_map
from quantexp.quant.rules import changes
from quantexp.schema import Experiment, TrackedStatistic

#: The statistics that score a format.
OF_FORMAT = (TrackedStatistic.sqnr, TrackedStatistic.underflow, TrackedStatistic.saturation)
#: The first part of a tag: the statistic's name and unit.
_TAGS = {
    TrackedStatistic.amax: "amax",
    TrackedStatistic.sqnr: "sqnr_db",
    TrackedStatistic.underflow: "underflow_share",
    TrackedStatistic.saturation: "saturated_share",
    TrackedStatistic.histogram: "log2_magnitude",
}


@dataclass(frozen=True)
class Curve:
    """One statistic of one tensor."""

    statistic: TrackedStatistic
    layer: int
    module: str
    tensor: str

    @property
    def tag(self) -> str:
        """`amax/L3-fc1/input`."""
        return f"{_TAGS[self.statistic]}/{place(self.layer, self.module)}/{self.tensor}"


@dataclass(frozen=True)
class CurveChoice:
    """The curves of a run, in the order of the statistics and then of the layers."""

    curves: tuple[Curve, ...] = ()
    #: Those beyond `tracking.most_curves`.
    num_left_out: int = 0
    #: The chosen statistics without a curve: a run in bf16 has no format that they could score.
    missing: tuple[TrackedStatistic, ...] = ()

    @property
    def layers(self) -> list[int]:
        """The layers with curves, ascending."""
        return sorted({curve.layer for curve in self.curves})


def curves_in_words(
    num_curves: int, num_left_out: int, layers: Sequence[int], missing: Sequence[str] = ()
) -> str:
    """The number of curves, what the limit leaves of them, and the statistics that have none."""
    parts = []
    if num_left_out:
        word = "layer" if len(layers) == 1 else "layers"
        parts.append(
            f"{num_curves:,} of {num_curves + num_left_out:,} curves of captured statistics, of {word} "
            f"{', '.join(map(str, layers))}: tracking.most_curves allows no more layers"
        )
    elif num_curves:
        parts.append(f"{num_curves:,} curves of captured statistics")
    if missing:
        parts.append(f"no curves of {', '.join(missing)}: nothing is quantised")
    return "; ".join(parts)


def scores_scheme(experiment: Experiment) -> bool:
    """Whether captured statistics score each tensor in the scheme's own format."""
    wanted = any(each in OF_FORMAT for each in experiment.tracking.statistics)
    return wanted and experiment.capture.format is None


def choose_curves(experiment: Experiment) -> CurveChoice:
    """The curves of all captured iterations; none without `tracking.statistics`."""
    statistics = experiment.tracking.statistics
    if not statistics:
        return CurveChoice()
    possible = possible_curves(experiment, statistics)
    ordered = sorted(
        possible,
        key=lambda curve: (statistics.index(curve.statistic), curve.layer),
    )
    kept = _within(ordered, experiment.tracking.most_curves)
    has_curve = {curve.statistic for curve in possible}
    missing = tuple(each for each in statistics if each not in has_curve)
    return CurveChoice(tuple(kept), len(ordered) - len(kept), missing)


def possible_curves(experiment: Experiment, statistics: Sequence[TrackedStatistic]) -> list[Curve]:
    """The curves of some statistics without a limit, each once."""
    curves = (_all(experiment, statistics, i) for i in _first_captured(experiment))
    return list(dict.fromkeys(itertools.chain.from_iterable(curves)))


def _first_captured(experiment: Experiment) -> list[int]:
    """The first captured iteration of each precision map that has one."""
    taken = captured_iterations(experiment.capture, experiment.training.last_iteration)
    starts = changes(experiment.quant)
    firsts = (next((i for i in taken if i >= start), None) for start in starts)
    return list(dict.fromkeys(i for i in firsts if i is not None))


def _all(
    experiment: Experiment, statistics: Sequence[TrackedStatistic], iteration: int
) -> Iterator[Curve]:
    declared = precision_map(experiment.model, experiment.quant, iteration)
    for expected in expected_tensors(experiment, iteration):
        if expected.quantised is not None or expected.shared:
            continue
        module = declared.get(expected.module)
        is_scored = experiment.capture.format is not None or (
            module is not None
            and first_quantised(module, expected.operation, expected.tensor) is not None
        )
        for statistic in statistics:
            if is_scored or statistic not in OF_FORMAT:
                yield Curve(statistic, expected.module.layer, expected.module.name, expected.tensor)


def _within(curves: list[Curve], most: int) -> list[Curve]:
    if len(curves) <= most:
        return curves
    sizes = Counter(curve.layer for curve in curves)
    layers = sorted(sizes)
    for count in range(len(layers) - 1, 0, -1):
        kept = _spread(layers, count)
        if sum(sizes[layer] for layer in kept) <= most:
            return [curve for curve in curves if curve.layer in kept]
    return [curve for curve in curves if curve.layer == layers[0]][:most]


def _spread(layers: list[int], count: int) -> set[int]:
    """So many layers at equal distances, with the first and the last; one layer is the first."""
    if count == 1:
        return {layers[0]}
    last = len(layers) - 1
    return {layers[(2 * i * last + count - 1) // (2 * (count - 1))] for i in range(count)}
