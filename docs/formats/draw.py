"""The pictures and the table of noise in this folder, made by quantexp.formats itself.

    python docs/formats/draw.py

One picture for each format: above, every positive finite value of its element; below, the distance between neighbours
relative to their size. One picture of what block scales leave unused. The table goes to standard output.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from quantexp.formats import (
    FORMATS,
    Family,
    Format,
    ScaleRule,
    decode,
    encode,
    quantise,
)
from quantexp.formats.codes import code_values

HERE = Path(__file__).parent
BLUE, VERMILLION, GREY, INK = "#0072B2", "#D55E00", "#999999", "#333333"
#: Okabe and Ito's colours, from the fewest mantissa bits to the most.
BY_BITS = ("#CC79A7", "#E69F00", "#009E73", "#0072B2")
SAMPLES = 1 << 21


def main() -> None:
    """Draw everything and write the table."""
    for fmt in FORMATS.values():
        if fmt.name != "bf16":
            draw_grid(fmt).savefig(HERE / f"{fmt.name}.png")
    draw_bf16().savefig(HERE / "bf16.png")
    draw_scales().savefig(HERE / "scales.png")
    sys.stdout.write(noise_table())


def figure(width_inch: float, height_inch: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A white figure with its axes below each other."""
    made = Figure(
        figsize=(width_inch, height_inch), dpi=110, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(made)
    heights = {1: [1.0], 2: [1.0, 2.4]}[rows]
    axes = made.subplots(rows, 1, sharex=rows == 2, height_ratios=heights, squeeze=False)
    for ax in axes[:, 0]:
        ax.tick_params(labelsize=8, colors=INK)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    return made, list(axes[:, 0])


def draw_grid(fmt: Format) -> Figure:
    """The element's values and their relative spacing, on a scale of powers of two."""
    values = np.array(sorted(v for v in code_values(fmt.element) if 0 < v < math.inf))
    steps = np.diff(values)
    exponents = np.log2(values)
    made, (top, bottom) = figure(7.4, 3.5, rows=2)
    draw_values(top, exponents, mantissa_bits(fmt, values, steps))
    title = f"{fmt.name}: the {len(values)} positive finite values of its element"
    top.set_title(title, fontsize=10, loc="left", color=INK)
    bottom.stairs(steps / values[:-1], exponents, baseline=None, color=BLUE, lw=1.2)
    bottom.set_ylabel("distance to the next value,\nrelative to the value", fontsize=8, color=INK)
    bottom.set_xlabel("magnitude, in units of the scale", fontsize=8, color=INK)
    in_powers_of_two(bottom, exponents[-1] - exponents[0])
    draw_ends(bottom, exponents[0] - 1, exponents[-1])
    return made


def mantissa_bits(fmt: Format, values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """How many bits tell the values of each one's binade apart."""
    binade = np.exp2(np.floor(np.log2(values)))
    # HiF8's largest value is alone in its binade, whose spacing is twice that of the binade below.
    spacing = np.append(steps, steps[-1] * (2 if fmt.family is Family.HIF8 else 1))
    return np.clip(np.round(np.log2(binade / spacing)), 0, 3).astype(int)


def draw_values(ax: Axes, exponents: np.ndarray, bits: np.ndarray) -> None:
    """A line for each value in the colour of its mantissa bits."""
    for count in np.unique(bits):
        last = count == bits.max()
        label = f"{count} mantissa bits" if last else str(count)
        ax.vlines(exponents[bits == count], 0, 1, color=BY_BITS[count], lw=0.9, label=label)
    ax.set_yticks([])
    ax.set_ylim(0, 1)
    ax.spines["left"].set_visible(False)
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    ax.legend(fontsize=7, frameon=False, ncols=4, handlelength=1.0, **place)


def draw_ends(ax: Axes, low: float, high: float) -> None:
    """Where rounding to nearest gives 0, and where it gives the largest value."""
    margin = 0.06 * (high - low)
    ax.set_xlim(low - margin, high + margin)
    for start, words, colour in (
        (low - margin, "becomes 0", "#F3D9CC"),
        (high, "saturates", "#D5E4EF"),
    ):
        ax.axvspan(start, start + margin, color=colour, lw=0)
        ax.text(
            start + margin / 2,
            0.04,
            words,
            transform=ax.get_xaxis_transform(),
            fontsize=7,
            rotation=90,
            ha="center",
            va="bottom",
            color=INK,
        )


def in_powers_of_two(ax: Axes, span: float) -> None:
    """Both axes labelled with powers of two; the horizontal one holds exponents."""
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_locator(MultipleLocator(1 if span < 10 else 2 if span < 24 else 4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda e, _: f"$2^{{{e:g}}}$"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{math.log2(y):g}}}$"))
    ax.grid(axis="y", color="#E4E4E4", lw=0.7)
    ax.set_axisbelow(True)


def draw_bf16() -> Figure:
    """Relative spacing of bf16 beside fp16 over the whole range of either."""
    made, (ax,) = figure(7.4, 2.8)
    for dtype, colour in ((torch.bfloat16, BLUE), (torch.float16, VERMILLION)):
        info = torch.finfo(dtype)
        smallest = info.smallest_normal * info.eps
        exponents = np.arange(math.log2(smallest), math.floor(math.log2(info.max)) + 1)
        magnitude = 2.0**exponents
        step = np.maximum(magnitude * info.eps, smallest)
        name = str(dtype).removeprefix("torch.")
        ax.plot(exponents, step / magnitude, color=colour, lw=1.4, label=name)
    in_powers_of_two(ax, 0)
    ax.set_title("bf16: spacing at powers of two, beside fp16", fontsize=10, loc="left", color=INK)
    ax.set_xlabel("magnitude", fontsize=8, color=INK)
    ax.set_ylabel("distance to the next value,\nrelative to the value", fontsize=8, color=INK)
    ax.xaxis.set_major_locator(MultipleLocator(16))
    ax.legend(fontsize=8, frameon=False)
    return made


def draw_scales() -> Figure:
    """The largest value a block can hold, relative to its amax, as amax runs over one binade."""
    made = Figure(figsize=(7.4, 3.2), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots(1, 3, sharey=True)
    amax = torch.linspace(1, 2, 1001)[:-1]
    columns = (
        ("mxfp8_e4m3", [rule.value for rule in ScaleRule]),
        ("mxfp4_e2m1", [rule.value for rule in ScaleRule]),
        ("nvfp4_e2m1", [None]),
    )
    styles = {"floor": "-", "rceil": "-", "ceil": "--", "even": ":", None: "-"}
    colours = {"floor": VERMILLION, "rceil": BLUE, "ceil": "#009E73", "even": INK, None: BLUE}
    for ax, (name, rules) in zip(axes, columns, strict=True):
        for rule in rules:
            reach = largest(amax, name, rule) / amax
            ax.plot(
                amax, reach, styles[rule], color=colours[rule], lw=1.6, label=rule or "E4M3 scale"
            )
        ax.axhline(1, color=GREY, lw=0.8)
        ax.set_title(name, fontsize=9, loc="left", color=INK)
        ax.set_xlabel("amax, within its binade", fontsize=8, color=INK)
        ax.tick_params(labelsize=8, colors=INK)
        ax.grid(axis="y", color="#E4E4E4", lw=0.7)
        ax.legend(fontsize=7, frameon=False, loc="upper right")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0].set_ylabel(
        "largest value of the block / amax\n(below 1 amax saturates)", fontsize=8, color=INK
    )
    return made


def largest(amax: torch.Tensor, name: str, rule: str | None) -> torch.Tensor:
    """The element's largest value times the scale that a block of this amax gets."""
    options = {"scale_rule": rule} if rule else {"scaling": "none"}
    blocks = amax[:, None]
    _, scales = encode(blocks, name, block=1, **options)
    element = FORMATS[name].element
    top = torch.full(blocks.shape, code_values(element).index(element.max), dtype=torch.uint8)
    return decode(top, scales, name, block=1)[:, 0]


def noise_table() -> str:
    """Signal to noise of each format and scale, of normal and Laplace samples, in a Markdown table."""
    lines = ["| format | scale | N(0, 1) dB | Laplace dB |", "|---|---|---|---|"]
    samples = [normal(1), laplace()]
    for fmt in FORMATS.values():
        for scale, options in _scales_of(fmt):
            noise = [sqnr_db(x, quantise(x, fmt, **options)) for x in samples]
            lines.append(f"| {fmt.name} | {scale} | {noise[0]:.2f} | {noise[1]:.2f} |")
    return "\n".join(lines) + "\n"


def _scales_of(fmt: Format) -> list[tuple[str, dict[str, str]]]:
    if fmt.scale_rule is not None:
        return [(rule, {"scale_rule": rule}) for rule in ("floor", "rceil")]
    if "scaling" in fmt.options:
        return [(scaling, {"scaling": scaling}) for scaling in ("current", "exact")]
    return [("", {})]


def normal(seed: int) -> torch.Tensor:
    """Standard normal samples."""
    return torch.randn(SAMPLES, generator=torch.Generator().manual_seed(seed))


def laplace() -> torch.Tensor:
    """Laplace samples: half the difference of two exponential ones, each half a sum of two squares."""
    a, b, c, d = (normal(seed).square() for seed in range(2, 6))
    return (a + b - c - d) / 2


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    """10 log10(sum x^2 / sum (x - y)^2)."""
    signal, noise = x.double().square().sum(), (x.double() - y.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


if __name__ == "__main__":
    main()
