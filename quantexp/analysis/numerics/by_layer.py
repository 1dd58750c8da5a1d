"""Figures over layers, iterations and ranks: heat maps of every measure, overflow, and differences between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from matplotlib.figure import Figure

from quantexp.analysis.numerics.heat import draw_heat
from quantexp.analysis.numerics.lines import draw_lines
from quantexp.analysis.numerics.series import (
    AMAX,
    KURTOSIS,
    NONFINITE,
    OPERAND_MEASURES,
    SATURATED,
    SQNR,
    STD,
    TENSOR_MEASURES,
    UNDERFLOW,
    Judged,
    Measure,
    Member,
    Run,
    operand_members,
    tensor_members,
)

_OVER_ITERATIONS = (AMAX, STD, KURTOSIS)


def operand_heat(run: Run, group: str, judged: Sequence[Judged]) -> Figure:
    """SQNR, underflow, saturation and relative error of every operand by layer."""
    panels = {measure: operand_members(judged, measure) for measure in OPERAND_MEASURES}
    return draw_heat(f"Numerics by layer: {run.label}", about_group(run, group), panels)


def tensor_heat(run: Run) -> Figure:
    """Magnitude, spread, kurtosis and zeros of every tensor by layer."""
    panels = {measure: tensor_members(run.tensors, measure) for measure in TENSOR_MEASURES}
    return draw_heat(f"Tensors by layer: {run.label}", "values before quantisation", panels)


def overflow(run: Run, group: str, judged: Sequence[Judged]) -> Figure:
    """Saturation and underflow of every operand, and NaN and Inf of its tensor, by layer."""
    rows = {measure: operand_members(judged, measure) for measure in (SATURATED, UNDERFLOW)}
    operands = {j.place: j.series for j in reversed(judged)}
    rows[NONFINITE] = [
        replace(member, series=operands[member.place])
        for member in tensor_members(run.tensors, NONFINITE)
        if member.place in operands
    ]
    title = f"Overflow and underflow by layer: {run.label}"
    about = (
        f"{about_group(run, group)}, after the scale in force; line: median, band: least to largest"
    )
    return draw_lines(title, about, rows, lambda member: member.place.layer, "layer")


def over_iterations(run: Run, groups: dict[str, list[Judged]]) -> Figure | None:
    """Every measure by iteration; None with a single iteration."""
    if len({one.place.iteration for one in run.tensors}) < 2:
        return None
    rows = {measure: tensor_members(run.tensors, measure) for measure in _OVER_ITERATIONS}
    for group, judged in groups.items():
        of_tensors = [replace(one, series=one.place.tensor) for one in judged]
        for measure in (SQNR, UNDERFLOW):
            label = f"{measure.label.partition(' (share')[0]},\n{group}"
            rows[replace(measure, label=label)] = operand_members(of_tensors, measure)
    about = f"scheme {run.scheme}; line: median over layers, band: least to largest"
    title = f"Numerics over iterations: {run.label}"
    return draw_lines(title, about, rows, lambda member: member.place.iteration, "iteration")


def between_ranks(run: Run) -> Figure | None:
    """Each rank relative to the mean over ranks; None with a single rank."""
    ranks = {one.place.rank for one in run.tensors}
    if len(ranks) < 2:
        return None
    rows = {
        Measure(m.name, f"{m.label},\nof the mean over ranks"): _of_the_mean(
            tensor_members(run.tensors, m)
        )
        for m in (STD, AMAX, KURTOSIS)
    }
    title = f"Ranks: {run.label}"
    about = "each tensor against the same tensor of the other ranks (1: all alike); what one rank alone has is left out"
    return draw_lines(title, about, rows, lambda member: member.place.rank, "rank")


def _of_the_mean(members: Sequence[Member]) -> list[Member]:
    """Each number divided by the mean over ranks of the same tensor, iteration and micro-batch."""
    together: dict[object, list[Member]] = {}
    for member in members:
        together.setdefault(replace(member.place, rank=0, quant_type=""), []).append(member)
    relative = []
    for same in together.values():
        average = mean(member.value for member in same)
        if len(same) > 1 and average:
            relative += [replace(member, value=member.value / average) for member in same]
    return relative


def about_group(run: Run, group: str) -> str:
    """`scheme FA_linear_mxfp8, operands as declared`."""
    how = "operands as declared" if group == "as declared" else f"operands under {group}"
    return f"scheme {run.scheme}, {how}"
