"""The quick analysis: one picture of a run, for a first look and for a paper's appendix.

Six panels: magnitudes by kind of tensor; what was captured by quantisation type, module and
operation; the error of the declared format by operand; the training loss. What a run does not
have is said in its panel. Names of tensors that could not be judged stand below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from quantexp.analysis.collection import Collection, read_collection
from quantexp.analysis.draw.chapter import Source
from quantexp.analysis.draw.tree import QUICK
from quantexp.analysis.fidelity_panel import draw_fidelity
from quantexp.analysis.inventory import in_flow, module_of, tally
from quantexp.analysis.panels import (
    draw_by_class,
    draw_by_quant_type,
    draw_loss,
    draw_magnitudes,
)
from quantexp.analysis.run_record import LossCurve, RunNames, read_losses, read_names
from quantexp.analysis.sample import SAMPLE_ELEMENTS
from quantexp.analysis.style import INK, NOTE_PT, new_figure, save_figure, save_png
from quantexp.analysis.survey import Survey, survey_tensors
from quantexp.capture.manifest import MANIFEST
from quantexp.paths import RunDir

FILE_NAME = f"{QUICK}.png"
_WIDTH_INCH = 14
_HEIGHT_INCH = 9
#: Names listed below the panels for one finding, unless there are more findings than lines.
_MAX_NAMES = 3
_LINES_OF_NOTES = 4
_NOTES_TOP = 0.088
_NOTE = (
    f"a, e: at most {SAMPLE_ELEMENTS:,} elements of each tensor, whole blocks, evenly spread.   "
    "c, d: colours as in a; a weight that both passes use is counted once, in the forward pass."
)


def draw_quick_analysis(run_dir: Path, out: Path) -> Path:
    """Draw the quick analysis of a run folder to `out`: a .png, or a folder for one.

    A run without tensors (capture=off or stats) or without metrics is drawn all the same.

    Raises:
        RunError: no such run folder, or an unreadable config.yaml.
        CaptureError: a manifest without a complete line, or not one of quantexp's.
    """
    run = RunDir(run_dir)
    names = read_names(run)
    tensors_dir = run.captured(names.capture_dir)
    figure = _figure(_collection(tensors_dir), tensors_dir, names, run)
    return save_png(figure, out if out.suffix == ".png" else out / FILE_NAME)


def save_quick_analysis(source: Source, stem: Path, formats: Sequence[str]) -> list[Path]:
    """The same of a source of `quantexp draw`: a run, a capture folder, an old collection, with its filters."""
    folder = source.capture.folder
    torn = _collection(folder).torn_lines if (folder / MANIFEST).is_file() else ()
    collection = Collection(tuple(source.records), torn)
    return save_figure(_figure(collection, folder, source.names, source.run), stem, formats)


def _figure(
    collection: Collection, tensors_dir: Path, names: RunNames, run: RunDir | None
) -> Figure:
    survey = survey_tensors(tensors_dir, collection)
    figure = new_figure(_WIDTH_INCH, _HEIGHT_INCH)
    _draw_panels(figure, collection, survey, LossCurve() if run is None else read_losses(run))
    _write_title(figure, names)
    _write_notes(figure, collection, survey)
    return figure


def _collection(tensors_dir: Path) -> Collection:
    """What was captured; nothing where no manifest, or no whole line of it, was written."""
    manifest = tensors_dir / MANIFEST
    if not manifest.is_file():
        return Collection(())
    written = manifest.read_bytes()
    if b"\n" not in written:
        return Collection((), torn_lines=(1,) if written else ())
    return read_collection(tensors_dir)


def _draw_panels(figure: Figure, collection: Collection, survey: Survey, curve: LossCurve) -> None:
    top = figure.add_gridspec(
        1, 3, left=0.06, right=0.985, top=0.875, bottom=0.58, wspace=0.3, width_ratios=[1.35, 1, 1]
    )
    bottom = figure.add_gridspec(
        1,
        3,
        left=0.06,
        right=0.985,
        top=0.475,
        bottom=0.18,
        wspace=0.24,
        width_ratios=[0.8, 1.7, 0.9],
    )
    records = collection.records
    by_module = tally(records, module_of)
    by_operation = tally(records, lambda r: r.operation)
    draw_magnitudes(figure.add_subplot(top[0]), survey.magnitudes)
    draw_by_quant_type(figure.add_subplot(top[1]), tally(records, lambda r: r.quant_type))
    draw_by_class(
        figure.add_subplot(top[2]), "c  Captured, by module", in_flow(by_module), by_module
    )
    draw_by_class(
        figure.add_subplot(bottom[0]),
        "d  Captured, by operation",
        sorted(by_operation, reverse=True),
        by_operation,
    )
    draw_fidelity(figure.add_subplot(bottom[1]), survey.operands, captured=bool(by_module))
    draw_loss(figure.add_subplot(bottom[2]), curve)


def _write_title(figure: Figure, names: RunNames) -> None:
    figure.text(0.02, 0.965, names.run, fontsize=15, fontweight="bold", color=INK, va="center")
    parts = {"model": names.model_label, "dataset": names.dataset, "scheme": names.scheme}
    words = "     ".join(f"{key}: {value}" for key, value in parts.items() if value)
    figure.text(0.02, 0.932, words, fontsize=11, color=INK, va="center")


def _write_notes(figure: Figure, collection: Collection, survey: Survey) -> None:
    findings: dict[str, Sequence[object]] = dict(survey.findings)
    if collection.torn_lines:
        findings["torn lines of the manifest, ignored"] = collection.torn_lines
    if collection.records:
        figure.text(0.02, _NOTES_TOP, _NOTE, fontsize=NOTE_PT, color=INK, va="top")
    few = len(findings) <= _LINES_OF_NOTES
    lines = [_finding(what, who, _MAX_NAMES if few else 1) for what, who in findings.items()]
    half = _LINES_OF_NOTES if few else -(-len(lines) // 2)
    for x, column in ((0.02, lines[:half]), (0.51, lines[half:])):
        words = "\n".join(column)
        figure.text(x, _NOTES_TOP - 0.016, words, fontsize=NOTE_PT, color=INK, va="top")


def _finding(what: str, who: Sequence[object], max_names: int) -> str:
    names = ", ".join(str(name) for name in who[:max_names])
    more = f", and {len(who) - max_names} more" if len(who) > max_names else ""
    return f"{what} ({len(who)}): {names}{more}"
