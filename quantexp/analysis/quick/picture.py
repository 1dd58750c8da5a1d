"""The quick analysis: one picture of a run, for a first impression and for a paper's appendix.

    a  magnitudes of each kind of tensor over the range of its format    b  underflow and saturation of each kind
    c  SQNR by layer and slot, operands that stand out named             d  training loss, with the matched bf16 run's

The tensors are those of the last captured iteration: the first one of a training shows random weights.
A panel without data is left out and the others take its room; a line below says what to switch on. Tensors that could
not be judged are named there too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from quantexp.analysis.chapter import Source
from quantexp.analysis.compare.matched import mismatches
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.measures.table import MeasuresTable
from quantexp.analysis.quick.by_kind import OfKind, by_kind
from quantexp.analysis.quick.fidelity_panel import (
    CREST_MARGIN_OCTAVES,
    SQNR_MARGIN_DB,
    Grid,
    crest_grid,
    draw_grid,
    sqnr_grid,
)
from quantexp.analysis.quick.first_look import FirstLook, captured_in, first_look
from quantexp.analysis.quick.panels import draw_loss, draw_magnitudes, draw_shares
from quantexp.analysis.style import (
    LABEL_PT,
    TICK_PT,
    TITLE_PT,
    Page,
    new_figure,
    save_figure,
    save_png,
)
from quantexp.analysis.tensors.run_record import RunNames, read_names
from quantexp.analysis.tree import QUICK
from quantexp.errors import QuantexpError, UnreadableError
from quantexp.quant.label import describe_scheme
from quantexp.runs.find import is_run
from quantexp.runs.metrics import LossCurve, loss_curve, read_metrics
from quantexp.runs.paths import RunDir

FILE_NAME = f"{QUICK}.png"
#: At a width of 800 pixels the smallest letters are 10 pixels high.
_WIDTH_INCH = 9.0
_EDGE_INCH, _LEFT_INCH, _RIGHT_INCH = 0.12, 1.62, 0.25
#: Heights above the top panel, between panels, below the lowest axis, and of the last line.
_TITLE_INCH, _BETWEEN_INCH, _AXIS_INCH, _FOOT_INCH = 1.2, 1.08, 0.55, 0.1
_KIND_INCH, _CELL_INCH = 0.62, 0.158
_GRID_INCH, _LEAST_GRID_INCH = 4.15, 2.9
_LOSS_INCH, _MOST_LOSS_INCH, _LOSS_LEFT_INCH = 2.6, 2.8, 0.75
#: The maximum length of the second line, in letters.
_SUBTITLE_INCH, _LETTERS = 0.19, 108
_LINE_INCH, _LIST_LINE_INCH = 0.16, 0.17
#: Maximum names for one anomaly below the panels, and maximum anomalies.
_MAX_NAMES, _MAX_FINDINGS = 3, 5
#: Maximum bf16 runs checked for a match.
_MOST_CANDIDATES = 50


@dataclass(frozen=True)
class _Content:
    """The data of the picture of one run."""

    names: RunNames
    look: FirstLook
    curve: LossCurve
    baseline: LossCurve | None
    notes: tuple[str, ...]


def draw_quick_analysis(run_dir: Path, out: Path) -> Path:
    """Draw the quick analysis of a run folder to `out`: a .png, or a folder for one.

    Its numbers are in the table of measures beside it. A run without tensors or without metrics is drawn all the same.

    Raises:
        RunError: no such run folder, or an unreadable config.yaml.
    """
    run = RunDir(run_dir)
    names = read_names(run)
    path = out if out.suffix == ".png" else out / FILE_NAME
    captured = captured_in(run.captured(names.capture_dir))
    look = first_look(captured, MeasuresTable(path.parent))
    return save_png(_figure(_content(names, look, run)), path)


def save_quick_analysis(
    source: Source, look: FirstLook, stem: Path, formats: Sequence[str]
) -> list[Path]:
    """Draw the picture of a source of `quantexp draw`: a run, a capture folder or an old collection, with filters."""
    return save_figure(_figure(_content(source.names, look, source.run)), stem, formats)


def baseline_of(run: RunDir) -> LossCurve | None:
    """The loss of the matched bf16 run in the same folder of runs; None if there is none."""
    side = read_side(run)
    if side.is_baseline:
        return None
    beside = sorted(run.root.resolve().parent.glob("*bf16*"), key=_written, reverse=True)
    for folder in beside[:_MOST_CANDIDATES]:
        if not is_run(RunDir(folder)):
            continue
        try:
            other = read_side(RunDir(folder))
        except (QuantexpError, OSError):  # another's run: damaged, or removed meanwhile
            continue
        if other.is_baseline and other.losses.iterations and not mismatches(side, other):
            return other.losses
    return None


def _written(folder: Path) -> float:
    """The modification time of a folder; the earliest time for a missing folder or a broken link."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return -math.inf


def _content(names: RunNames, look: FirstLook, run: RunDir | None) -> _Content:
    curve = LossCurve() if run is None else _losses(run)
    baseline = None if run is None or not curve.iterations else baseline_of(run)
    look = look.of_last_iteration()
    return _Content(names, look, curve, baseline, tuple(_notes(look)))


def _losses(run: RunDir) -> LossCurve:
    """The losses of a run; none if its metrics.jsonl is damaged, which the source reports."""
    try:
        return loss_curve(read_metrics(run))
    except UnreadableError:
        return LossCurve()


def _notes(look: FirstLook) -> list[str]:
    if not look.tensors and not look.findings:
        return ["no tensors captured: capture=stats keeps statistics, capture=tensors values"]
    notes = []
    if look.tensors and not look.is_judged:
        notes.append(
            "no SQNR, underflow or saturation: statistics alone do not have them, "
            "capture.format=mxfp8 adds them, capture=tensors keeps values"
            if not look.has_values
            else "no SQNR, underflow or saturation: no tensor is an operand of a product"
        )
    elif any(k.measured.operands and not k.measured.from_values for k in look.tensors):
        panels = "b, c" if any(k.scales for k in look.tensors) else "a, b, c"
        which = "of statistics alone, " if look.has_values else ""
        notes.append(
            f"{panels}: {which}in capture.format, as the tensors passed, along the axis of each one's first product"
        )
    if look.iterations is not None:
        notes.append(f"tensors of iteration {look.iterations[-1]}, the last that was captured")
    listed = list(look.findings.items())
    notes += [_finding(what, who) for what, who in listed[:_MAX_FINDINGS]]
    if len(listed) > _MAX_FINDINGS:
        notes.append(
            f"and {len(listed) - _MAX_FINDINGS} more findings: tensor_stats.txt of quantexp draw"
        )
    return notes


def _finding(what: str, who: Sequence[str]) -> str:
    names = ", ".join(who[:_MAX_NAMES])
    more = f", and {len(who) - _MAX_NAMES} more" if len(who) > _MAX_NAMES else ""
    return f"{what} ({len(who)}): {names}{more}"


def _figure(content: _Content) -> Figure:
    kinds = by_kind(content.look)
    sqnr = sqnr_grid(content.look)
    grid = sqnr or crest_grid(content.look)
    top_inch = _KIND_INCH * max(2, len(kinds)) if kinds else 0.0
    bottom_inch = _LOSS_INCH
    if grid is not None:
        bottom_inch = max(_LEAST_GRID_INCH, _CELL_INCH * len(grid.rows))
    foot_inch = _FOOT_INCH + (0.16 + _LINE_INCH * len(content.notes) if content.notes else 0)
    bottom = foot_inch + _AXIS_INCH
    subtitle = _subtitle(content.names)
    title_inch = _TITLE_INCH + _SUBTITLE_INCH * max(0, len(subtitle) - 1)
    height = bottom + bottom_inch + (_BETWEEN_INCH + top_inch if kinds else 0) + title_inch
    page = Page(new_figure(_WIDTH_INCH, height))
    if kinds:
        _draw_kinds(page, content, kinds, bottom + bottom_inch + _BETWEEN_INCH, top_inch)
    if grid is not None:
        _draw_grid(page, content, grid, bottom, bottom_inch, is_sqnr=sqnr is not None)
    else:
        ax = page.axes(_LOSS_LEFT_INCH, bottom, _WIDTH_INCH - 2.4, bottom_inch)
        draw_loss(ax, content.curve, _scheme(content), "b" if kinds else "a", content.baseline)
    _write_title(page, content.names, subtitle)
    for i, note in enumerate(content.notes):
        page.write(_EDGE_INCH, foot_inch - 0.12 - i * _LINE_INCH, note, TICK_PT)
    return page.figure


def _draw_kinds(
    page: Page, content: _Content, kinds: Sequence[OfKind], y: float, tall: float
) -> None:
    """Draw panels a and b side by side; without judged operands, a has the full width."""
    room = _WIDTH_INCH - _LEFT_INCH - _RIGHT_INCH
    wide = 0.68 * room if content.look.is_judged else room
    ax = page.axes(_LEFT_INCH, y, wide, tall)
    draw_magnitudes(ax, kinds, is_assumed=content.look.is_assumed)
    if content.look.is_judged:
        draw_shares(page.axes(_LEFT_INCH + wide + 0.28, y, room - wide - 0.28, tall), kinds)


def _draw_grid(
    page: Page, content: _Content, grid: Grid, y: float, tall: float, *, is_sqnr: bool
) -> None:
    """Draw the heat map, and beside it the loss and the list of the operands that stand out."""
    letter = "c" if is_sqnr else "b"
    ax = page.axes(_LEFT_INCH, y, _GRID_INCH, tall)
    if is_sqnr:
        draw_grid(ax, grid, f"{letter}  SQNR{_formats(content)}", "dB", low_is_worst=True)
        heading, unit, words = "Lowest SQNR", "dB", f"more than {SQNR_MARGIN_DB:g} dB below"
    else:
        draw_grid(ax, grid, f"{letter}  Largest magnitude over RMS", "log2", low_is_worst=False)
        heading, unit = "Farthest above RMS", "octaves"
        words = f"more than {CREST_MARGIN_OCTAVES:g} octave above"
    lines = [
        f"{i}  {name}: {value:.1f} {unit}" for i, (name, value, _, _) in enumerate(grid.worst, 1)
    ]
    if math.isfinite(grid.typical):
        none = "" if lines else "none is "
        lines.insert(0, f"{none}{words} the median, {grid.typical:.1f}")
    if grid.num_more:
        lines.append(f"and {grid.num_more} more")
    if grid.aggregated:
        lines.append(f"rows: {grid.aggregated}")
    list_inch = 0.3 + _LIST_LINE_INCH * len(lines)
    x, top = _LEFT_INCH + _GRID_INCH + 0.9, y + tall
    if content.curve.iterations or content.curve.nonfinite:
        loss_inch = min(_MOST_LOSS_INCH, tall - list_inch - _AXIS_INCH)
        right = 1.12 if content.baseline else 0.25
        loss = page.axes(x, top - loss_inch, _WIDTH_INCH - x - right, loss_inch)
        draw_loss(loss, content.curve, _scheme(content), chr(ord(letter) + 1), content.baseline)
        top -= loss_inch + _AXIS_INCH + 0.15
    page.write(x - 0.45, top, heading, LABEL_PT, bold=True)
    for i, line in enumerate(lines):
        page.write(x - 0.45, top - 0.22 - i * _LIST_LINE_INCH, line, TICK_PT)


def _formats(content: _Content) -> str:
    names = dict.fromkeys(
        o.format.split()[0] for k in content.look.tensors for o in k.measured.operands
    )
    listed = ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f" if held in {listed}" if content.look.is_assumed else f" in {listed}"


def _scheme(content: _Content) -> str:
    return content.names.scheme or content.names.run


def _write_title(page: Page, names: RunNames, lines: Sequence[str]) -> None:
    page.write(_EDGE_INCH, page.height - 0.16, names.run, TITLE_PT + 2, bold=True)
    for i, line in enumerate(lines):
        page.write(_EDGE_INCH, page.height - 0.46 - i * _SUBTITLE_INCH, line, LABEL_PT)


def _subtitle(names: RunNames) -> list[str]:
    """Model, dataset and scheme in one line if it fits, else with the model on separate lines."""
    parts = {
        "model": names.model_label or names.model,
        "dataset": names.dataset,
        "scheme": describe_scheme(names.scheme, names.precision) if names.scheme else None,
    }
    words = [f"{key}: {value}" for key, value in parts.items() if value]
    if len("     ".join(words)) <= _LETTERS:
        return ["     ".join(words)] if words else []
    first = textwrap.wrap(words[0], _LETTERS, max_lines=2, placeholder=" ...")
    return [*first, "     ".join(words[1:])]
