from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from quantexp.analysis import quick
from quantexp.analysis.quick import draw_quick_analysis
from quantexp.errors import CaptureError, RunError

from .captures import BF16, MX8, Capture, linear_formats


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    figures: list[Figure] = []

    def save(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path

    monkeypatch.setattr(quick, "save_png", save)
    return figures


def words(figure: Figure) -> str:
    texts = [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]
    return "\n".join(text.get_text() for text in texts)


def test_the_picture_is_a_png_of_its_size_and_not_blank(capture: Capture) -> None:
    capture.add_layers(2)
    capture.add_config()
    capture.add_metrics([5.0, 4.0, 3.5])
    path = draw_quick_analysis(capture.run_dir, capture.run_dir / "figures")
    assert path == capture.run_dir / "figures" / "quick_analysis.png"
    image = imread(path)
    assert image.shape[:2] == (9 * 130, 14 * 130)
    for rows in np.array_split(image[:, :, :3], 2):
        for panel in np.array_split(rows, 3, axis=1):
            assert 0.01 < float((panel.min(axis=2) < 0.9).mean()) < 0.6


def test_a_file_name_may_be_given(capture: Capture) -> None:
    capture.add_layers(1, tokens=32)
    path = draw_quick_analysis(capture.run_dir, capture.run_dir / "mine.png")
    assert path.name == "mine.png"
    assert path.is_file()


def test_the_title_says_run_model_dataset_and_scheme(capture: Capture, drawn: list[Figure]) -> None:
    capture.add_layers(1, tokens=32)
    capture.add_config()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    said = words(drawn[0])
    assert "llama32-1b_wikipedia_FA_linear_mxfp8-1a2b3c4d" in said
    assert "dataset: wikipedia (built-in sample)     scheme: FA_linear_mxfp8" in said


def test_bf16_is_drawn_and_said_to_be_unquantised(capture: Capture, drawn: list[Figure]) -> None:
    x = torch.randn(64, 64).to(torch.bfloat16)
    capture.add(x, "input", quant_type="bf16", formats=linear_formats(BF16))
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert "no quantised operand" in words(drawn[0])
    assert max(drawn[0].axes[0].lines[0].get_ydata()) > 0.2
    assert "1 tensor, 0.008192 MB" in words(drawn[0])


@pytest.mark.parametrize("manifest", [None, "", '{"file": "torn'])
def test_a_run_without_tensors_is_drawn_and_says_so(
    capture: Capture, drawn: list[Figure], manifest: str | None
) -> None:
    if manifest is None:
        capture.dir.rmdir()
    else:
        capture.write(tail=manifest)
    capture.add_metrics([5.0, 4.0])
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert words(drawn[0]).count("no tensors captured") == 5
    assert len(drawn[0].axes[5].lines) == 1


def test_statistics_only_is_no_tensors(capture: Capture, drawn: list[Figure]) -> None:
    capture.add(torch.ones(2), "input")["file"] = None
    capture.write()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert words(drawn[0]).count("no tensors captured") == 5


def test_tensors_that_cannot_be_judged_are_named_below(
    capture: Capture, drawn: list[Figure]
) -> None:
    capture.add_layers(1, tokens=32)
    for layer in range(5):
        capture.add(torch.zeros(4, 4), "grad_output", "fc2", layer)
    gone = capture.add(torch.ones(4), "output", "fc2", 9)["file"]
    (capture.dir / gone).unlink()
    capture.write(tail="{torn")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    said = words(drawn[0])
    assert "all zero (5): fc2 L0 backward grad_output, fc2 L1 backward grad_output, " in said
    assert "and 2 more" in said
    assert f"missing (1): {Path(gone).name}" in said
    assert f"torn lines of the manifest, ignored (1): {len(capture.lines) + 1}" in said


def test_many_findings_take_two_columns(capture: Capture, drawn: list[Figure]) -> None:
    odd = [torch.zeros(4), torch.ones(4), torch.zeros(0), torch.full((4,), float("nan"))]
    for layer, tensor in enumerate(odd):
        capture.add(tensor, "grad_output", "fc2", layer)
    gone = capture.add(torch.ones(4), "output")["file"]
    (capture.dir / gone).unlink()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    below = [t for t in drawn[0].texts if t.get_position()[1] < 0.08]
    assert [len(t.get_text().splitlines()) for t in below] == [3, 2]


def test_no_two_texts_overlap(capture: Capture, drawn: list[Figure]) -> None:
    capture.add_layers(2)
    capture.add_config()
    capture.add_metrics([5.0, 4.0, 3.5])
    capture.add(torch.zeros(4, 4), "grad_output", "fc2", 5, formats=linear_formats(MX8))
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    figure = drawn[0]
    figure.canvas.draw()
    texts = [*figure.texts]
    for ax in figure.axes:
        legend = ax.get_legend()
        texts += [*ax.texts, ax.xaxis.label, ax.yaxis.label, ax._left_title]
        texts += [] if legend is None else legend.get_texts()
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    width, height = figure.canvas.get_width_height()
    for index, (name, box) in enumerate(boxes):
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= width, name
        assert box.y1 <= height, name
        for other, its_box in boxes[index + 1 :]:
            apart = (
                box.x1 <= its_box.x0
                or its_box.x1 <= box.x0
                or box.y1 <= its_box.y0
                or its_box.y1 <= box.y0
            )
            assert apart, f"{name!r} overlaps {other!r}"


def test_tensors_elsewhere_are_found(capture: Capture, drawn: list[Figure]) -> None:
    capture.add_layers(1, tokens=32)
    elsewhere = capture.run_dir.parent / "elsewhere"
    elsewhere.mkdir()
    capture.dir.rename(elsewhere / capture.run_dir.name)
    (capture.run_dir / "config.yaml").write_text(f"capture: {{dir: {elsewhere}}}\n")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert "no tensors captured" not in words(drawn[0])


def test_a_foreign_manifest_is_refused(capture: Capture) -> None:
    (capture.dir / "manifest.jsonl").write_text('{"file": "a.pt"}\n')
    with pytest.raises(CaptureError, match="lacks module"):
        draw_quick_analysis(capture.run_dir, capture.run_dir)


def test_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder"):
        draw_quick_analysis(tmp_path / "nowhere", tmp_path)


def test_neither_pyplot_nor_hydra_nor_megatron_is_imported() -> None:
    code = (
        "import sys, quantexp.analysis.quick; "
        "print([m for m in ('matplotlib.pyplot', 'hydra', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
