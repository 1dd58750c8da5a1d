from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from quantexp.analysis.after_run import draw_sweep
from quantexp.analysis.chapter import Source
from quantexp.analysis.compare.lines import Band
from quantexp.analysis.measures.table import MeasuresTable
from quantexp.analysis.quick.first_look import captured_in, first_look
from quantexp.analysis.quick.overview import draw_overview
from quantexp.analysis.quick.scheme_table import Scheme, schemes_of
from quantexp.analysis.scheme_style import scheme_styles
from quantexp.analysis.tensors.run_record import RunNames
from quantexp.runs.find import runs_below
from quantexp.runs.paths import RunDir

from .. import mxfp4  # noqa: TID252
from ..captures import BF16, MX4, Capture, linear_formats  # noqa: TID252
from ..compare.runs import Runs  # noqa: TID252
from .test_first_look import as_statistics

SCHEMES = {"bf16": [6.0, 5.0], "linear_mxfp4": [6.1, 5.2], "FA_linear_mxfp4": [6.2, 5.4]}


def schemes(tmp_path: Path) -> tuple[list[Scheme], list[np.ndarray]]:
    """Three runs, the quantised ones with two inputs each, and these inputs."""
    sources, inputs = [], []
    generator = torch.Generator().manual_seed(1)
    for name, losses in SCHEMES.items():
        run = Runs(tmp_path).add(name, losses)
        capture = Capture(run.root)
        for layer in range(2):
            x = torch.randn(64, 64, generator=generator) ** 3
            settings = BF16 if name == "bf16" else MX4
            formats = {"fprop.x": {**settings, "axis": "input_width"}}
            capture.add(x, "input", layer=layer, formats=formats)
            inputs.append(x.numpy())
        sources.append(source(run, name))
    looks = [first_look(one.capture) for one in sources]
    return schemes_of(sources, looks)[0], inputs


def source(run: RunDir, scheme: str) -> Source:
    names = RunNames(run.root.name, scheme=scheme)
    return Source(run.root.name, captured_in(run.tensors), names, run)


def titles(figure: Figure) -> list[str]:
    return [title for ax in figure.axes if (title := ax.get_title(loc="left"))]


def test_losses_gaps_and_fidelity_of_each_scheme_are_one_picture(tmp_path: Path) -> None:
    three_schemes, inputs = schemes(tmp_path)
    figure = draw_overview(three_schemes).figure
    assert titles(figure) == [
        "a  Training loss",
        "b  Gap to the baseline, paired by iteration",
        "c  SQNR (dB)",
        "d  Became zero (share)",
        "e  Saturated (share)",
    ]
    losses, gaps, sqnr, _, _ = figure.axes
    assert [text.get_text() for text in losses.texts] == list(SCHEMES)
    assert [text.get_text() for text in gaps.texts] == list(SCHEMES)[1:]
    labels = [tick.get_text() for tick in sqnr.get_yticklabels()]
    assert labels == list(SCHEMES)[1:], "bf16 quantises nothing"
    expected = [median(mxfp4.sqnr_db(x) for x in inputs[i : i + 2]) for i in (2, 4)]
    assert [text.get_text() for text in sqnr.texts] == [f"{value:.1f}" for value in expected]


def test_a_cells_share_is_the_median_over_the_operands(tmp_path: Path) -> None:
    three_schemes, inputs = schemes(tmp_path)
    became_zero, saturated = draw_overview(three_schemes).figure.axes[3:]
    for ax, which in ((became_zero, 0), (saturated, 1)):
        expected = median(mxfp4.shares(x)[which] for x in inputs[2:4])
        assert ax.texts[0].get_text() == f"{float(f'{100 * expected:.2g}'):g} %"


def test_ten_schemes_have_names_that_do_not_overlap(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    sources = [source(runs.add("bf16"), "bf16")]
    for fmt in ("mxfp8", "mxfp4", "hifp8"):
        for site in ("FA", "linear", "FA_linear"):
            sources.append(source(runs.add(f"{site}_{fmt}"), f"{site}_{fmt}"))
    figure = draw_overview(*schemes_of(sources, [first_look(s.capture) for s in sources])).figure
    assert titles(figure) == ["a  Training loss", "b  Gap to the baseline, paired by iteration"]
    figure.canvas.draw()
    for ax in figure.axes:
        boxes = sorted((t.get_window_extent() for t in ax.texts), key=lambda box: box.y0)
        assert len(boxes) in (9, 10)
        assert all(a.y1 <= b.y0 + 0.5 for a, b in itertools.pairwise(boxes))
        assert max(box.x1 for box in boxes) <= figure.bbox.width


def test_a_sweep_is_one_picture_from_the_tables_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemes(tmp_path)
    for run in runs_below(tmp_path):
        first_look(captured_in(run.tensors), MeasuresTable(run.figures))
    monkeypatch.setattr("quantexp.analysis.quick.first_look.measure", None)
    out = draw_sweep(tmp_path, tmp_path / "sweep.png")
    assert imread(out).shape[1] == 9 * 130


def test_bare_folders_have_only_their_table(capture: Capture) -> None:
    x = torch.randn(64, 64)
    capture.add(x, "input", formats=linear_formats(MX4))
    opened = captured_in(capture.dir)
    bare = Source("tensors", opened, RunNames("tensors"))
    figure = draw_overview(*schemes_of([bare], [first_look(opened)])).figure
    assert titles(figure)[0] == "a  SQNR (dB)"


def test_a_picture_without_content_has_a_note(tmp_path: Path) -> None:
    run = Runs(tmp_path).add("bf16", [])
    one = source(run, "bf16")
    figure = draw_overview(*schemes_of([one], [first_look(one.capture)])).figure
    assert "no run has a loss or a judged operand" in [text.get_text() for text in figure.texts]


@pytest.mark.parametrize("num", [1, 3])
def test_the_title_counts_the_schemes(tmp_path: Path, num: int) -> None:
    three_schemes, _ = schemes(tmp_path)
    first = draw_overview(three_schemes[:num]).figure.texts[0].get_text()
    assert first == f"{num} scheme{'s' * (num > 1)} at a glance"


def test_single_seeds_and_unmatched_pairs_have_a_note(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path)
    variants: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {}),
        ("linear_mxfp4", {}),
        ("FA_mxfp4", {"lr": 3e-4}),
    ]
    sources = [source(runs.add(name, **more), name) for name, more in variants]
    figure = draw_overview(*schemes_of(sources, [first_look(s.capture) for s in sources])).figure
    texts = [text.get_text() for text in figure.texts]
    assert "one seed for each scheme: no gap can be told from noise, whatever its size" in texts
    assert "no matched pair with the baseline, see quantexp compare: FA_mxfp4" in texts


def bare(capture: Capture, fmt: str | None) -> Figure:
    """The overview of a folder of statistics alone of an input in MXFP4."""
    capture.add(torch.randn(64, 64), "input", formats=linear_formats(MX4))
    as_statistics(capture, fmt)
    opened = captured_in(capture.dir)
    folder = Source("tensors", opened, RunNames("tensors"))
    return draw_overview(*schemes_of([folder], [first_look(opened)])).figure


@pytest.mark.parametrize("fmt", [None, "mxfp8"])
def test_statistics_without_an_sqnr_in_the_schemes_format_have_a_note_and_no_table(
    capture: Capture, fmt: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    figure = bare(capture, fmt)
    assert titles(figure) == []
    texts = [text.get_text() for text in figure.texts]
    assert "no SQNR: capture.format=mxfp8 or capture=tensors adds it" in texts
    assert not recwarn.list


def test_statistics_in_the_schemes_format_have_a_table(capture: Capture) -> None:
    assert titles(bare(capture, "mxfp4"))[0] == "a  SQNR (dB)"


def test_thirty_schemes_have_names_that_do_not_overlap() -> None:
    band = Band((1, 2), (5.0, 4.0), (5.0, 4.0), (5.0, 4.0))
    styles = scheme_styles([f"scheme{i}" for i in range(30)])
    thirty_schemes = [Scheme(f"scheme{i}", style, (), band, band) for i, style in enumerate(styles)]
    figure = draw_overview(thirty_schemes).figure
    assert len(titles(figure)) == len(figure.axes) == 2
    figure.canvas.draw()
    for ax in figure.axes:
        boxes = sorted((t.get_window_extent() for t in ax.texts), key=lambda box: box.y0)
        assert len(boxes) == 30
        assert all(a.y1 <= b.y0 + 0.5 for a, b in itertools.pairwise(boxes))
        assert boxes[-1].y1 <= ax.get_window_extent().y1 + boxes[-1].height
