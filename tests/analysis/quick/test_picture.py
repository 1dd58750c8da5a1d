from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from quantexp.analysis.quick import picture
from quantexp.analysis.quick.picture import baseline_of, draw_quick_analysis
from quantexp.analysis.tensors.run_record import RunNames
from quantexp.errors import RunError

from .. import mxfp4  # noqa: TID252
from ..captures import BF16, MX4, Capture, linear_formats  # noqa: TID252
from ..compare.runs import Runs  # noqa: TID252
from .test_first_look import as_statistics


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    figures: list[Figure] = []

    def save(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path

    monkeypatch.setattr(picture, "save_png", save)
    return figures


def words(figure: Figure) -> str:
    texts = [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]
    return "\n".join(text.get_text() for text in texts)


def panels(figure: Figure) -> list[str]:
    return [title for ax in figure.axes if (title := ax.get_title(loc="left"))]


def test_the_picture_is_a_png_and_no_panel_of_it_is_blank(capture: Capture) -> None:
    capture.add_layers(2)
    capture.add_config()
    capture.add_metrics([5.0, 4.0, 3.5])
    path = draw_quick_analysis(capture.run_dir, capture.run_dir / "figures")
    assert path == capture.run_dir / "figures" / "quick_analysis.png"
    image = imread(path)
    assert image.shape[1] == 9 * 130
    for rows in np.array_split(image[:, :, :3], 2):
        for panel in np.array_split(rows, 2, axis=1):
            assert 0.01 < float((panel.min(axis=2) < 0.9).mean()) < 0.7


def test_the_place_may_be_a_file(capture: Capture) -> None:
    capture.add_layers(1, tokens=32)
    path = draw_quick_analysis(capture.run_dir, capture.run_dir / "mine.png")
    assert path.name == "mine.png"
    assert path.is_file()


def test_the_title_names_run_model_dataset_and_scheme(
    capture: Capture, drawn: list[Figure]
) -> None:
    capture.add_layers(1, tokens=32)
    capture.add_config()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    text = words(drawn[0])
    assert "llama32-1b_wikipedia_FA_linear_mxfp8-1a2b3c4d" in text
    assert "dataset: wikipedia (built-in sample)     scheme: FA_linear_mxfp8" in text


def test_a_long_label_of_a_model_has_a_line_of_its_own_within_the_picture(
    capture: Capture, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "llama32-1b cut to 2 of 16 layers, " + "vocabulary 257 of 128,256, " * 8 + "122M"
    data = "wikipedia (built-in sample)"
    names = RunNames("run", "llama32-1b", data, "FA_linear_mxfp8", model_label=model)
    monkeypatch.setattr(picture, "read_names", lambda run: names)
    capture.add_metrics([5.0, 4.0])
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    figure = drawn[0]
    figure.canvas.draw()
    first, second, third = figure.texts[1:4]
    assert second.get_text().endswith("...")
    assert third.get_text() == "dataset: wikipedia (built-in sample)     scheme: FA_linear_mxfp8"
    width = figure.canvas.get_width_height()[0]
    assert all(text.get_window_extent().x1 <= width for text in (first, second, third))


def test_values_give_all_four_panels(capture: Capture, drawn: list[Figure]) -> None:
    capture.add_layers(1, tokens=32)
    capture.add_config()
    capture.add_metrics([5.0, 4.0])
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert panels(drawn[0]) == [
        "a  Magnitudes and the format's range",
        "b  Underflow, saturation",
        "c  SQNR in mxfp8_e4m3",
        "d  Training loss",
    ]


def test_bf16_is_drawn_as_if_quantised_to_mxfp8(capture: Capture, drawn: list[Figure]) -> None:
    x = torch.randn(64, 64).to(torch.bfloat16)
    capture.add(x, "input", quant_type="bf16", formats=linear_formats(BF16))
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert panels(drawn[0])[2] == "c  SQNR if held in mxfp8_e4m3"
    names = [tick.get_text() for tick in drawn[0].axes[0].get_yticklabels()]
    assert names == ["activations\nif mxfp8_e4m3"]


@pytest.mark.parametrize("manifest", [None, "", '{"file": "torn'])
def test_a_run_without_tensors_shows_its_loss_and_the_options_to_set(
    capture: Capture, drawn: list[Figure], manifest: str | None
) -> None:
    if manifest is None:
        capture.dir.rmdir()
    else:
        capture.write(tail=manifest)
    capture.add_metrics([5.0, 4.0])
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert panels(drawn[0]) == ["a  Training loss"]
    text = words(drawn[0])
    if manifest:
        assert "lines that a crash tore, left out (1): manifest.jsonl:1" in text
    else:
        assert "no tensors captured: capture=stats keeps statistics, capture=tensors values" in text


def test_statistics_with_a_format_give_all_panels(capture: Capture, drawn: list[Figure]) -> None:
    capture.add_layers(1, tokens=32)
    capture.add_config()
    capture.add_metrics([5.0, 4.0])
    as_statistics(capture, "mxfp4")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert panels(drawn[0])[1:3] == ["b  Underflow, saturation", "c  SQNR in mxfp4_e2m1"]
    assert "b, c: in capture.format, as the tensors passed" in words(drawn[0])


def test_the_range_of_a_run_that_quantises_nothing_is_that_of_the_captures_format(
    capture: Capture, drawn: list[Figure]
) -> None:
    capture.add(torch.randn(64, 64), "input", formats=linear_formats(BF16))
    as_statistics(capture, "mxfp4")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert "a, b, c: in capture.format, as the tensors passed" in words(drawn[0])


def test_statistics_without_a_format_have_their_panels_and_the_options_to_set(
    capture: Capture, drawn: list[Figure]
) -> None:
    capture.add_layers(1, tokens=32)
    capture.add_config()
    capture.add_metrics([5.0, 4.0])
    as_statistics(capture)
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert panels(drawn[0]) == [
        "a  Magnitudes and the format's range",
        "b  Largest magnitude over RMS",
        "c  Training loss",
    ]
    assert "capture.format=mxfp8 adds them, capture=tensors keeps values" in words(drawn[0])
    assert "Farthest above RMS" in words(drawn[0])


def test_an_old_collection_is_judged_in_the_format_of_its_names(
    capture: Capture, drawn: list[Figure]
) -> None:
    x = torch.randn(64, 1, 1, 64)
    capture.add(x, "query", "attention", quant_type="mxfp4")
    (capture.dir / "manifest.jsonl").unlink()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert panels(drawn[0])[2] == "c  SQNR if held in mxfp4_e2m1"


def test_tensors_that_are_no_operands_have_a_note(capture: Capture, drawn: list[Figure]) -> None:
    capture.add(torch.randn(64, 64), "output")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert "no tensor is an operand of a product" in words(drawn[0])


def test_operands_that_stand_out_are_named_with_their_error(
    capture: Capture, drawn: list[Figure]
) -> None:
    formats = {"fprop.x": {**MX4, "axis": "input_width"}}
    sqnr_db = {}
    for module, worst_layer, factor in (("fc1", 2, 10.0), ("fc2", 1, 300.0)):
        for layer in range(3):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(layer))
            if layer == worst_layer:
                x[:, ::32] *= factor
            capture.add(x, "input", module, layer, formats=formats)
            sqnr_db[f"L{layer} {module} fprop x"] = mxfp4.sqnr_db(x.numpy())
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    lines = [line for line in words(drawn[0]).splitlines() if line.endswith(" dB")]
    typical, name = np.median([*sqnr_db.values()]), "L2 fc1 fprop x"
    assert [each for each, value in sqnr_db.items() if value < typical - 3] == [name]
    assert lines == [f"1  {name}: {sqnr_db[name]:.1f} dB"]
    assert f"more than 3 dB below the median, {typical:.1f}" in words(drawn[0]).splitlines()


def test_the_tensors_are_those_of_the_last_iteration_captured_in_both_passes(
    capture: Capture, drawn: list[Figure]
) -> None:
    formats = {"fprop.x": {**MX4, "axis": "input_width"}}
    generator, sqnr_db = torch.Generator().manual_seed(0), {}
    for iteration in (1, 8, 9):
        for layer in range(3):
            x = torch.randn(64, 64, generator=generator)
            capture.add(x, "input", "fc1", layer, formats=formats)["iteration"] = iteration
            sqnr_db[iteration, layer] = mxfp4.sqnr_db(x.numpy())
            if iteration < 9:
                line = capture.add(torch.ones(4), "grad_output", "fc1", layer)
                line |= {"iteration": iteration, "operation": "backward"}
    capture.write()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    text = words(drawn[0]).splitlines()
    assert "tensors of iteration 8, the last that was captured" in text
    typical = np.median([sqnr_db[8, layer] for layer in range(3)])
    assert f"none is more than 3 dB below the median, {typical:.1f}" in text
    assert not any(line.endswith(" dB") for line in text)


def test_tensors_that_cannot_be_judged_are_named_below(
    capture: Capture, drawn: list[Figure]
) -> None:
    capture.add_layers(1, tokens=32)
    for layer in range(5):
        capture.add(torch.zeros(4, 4), "grad_output", "fc2", layer)
    missing = capture.add(torch.ones(4), "output", "fc2", 9)["file"]
    (capture.dir / missing).unlink()
    capture.write(tail="{torn")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    text = words(drawn[0])
    assert "all zero (5): fc2 L0 backward grad_output, fc2 L1 backward grad_output, " in text
    assert "and 2 more" in text
    assert f"missing (1): {Path(missing).name}" in text
    torn = f"manifest.jsonl:{len(capture.lines) + 1}"
    assert f"lines that a crash tore, left out (1): {torn}" in text


def test_many_findings_are_cut_with_a_place_to_look(capture: Capture, drawn: list[Figure]) -> None:
    odd = [torch.zeros(4), torch.ones(4), torch.zeros(0), torch.full((4,), float("nan"))]
    odd.append(torch.tensor([float("nan"), 1.0]))
    for layer, tensor in enumerate(odd):
        capture.add(tensor, "output", "fc2", layer)
    (capture.dir / capture.add(torch.ones(4), "output")["file"]).unlink()
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert "and 1 more findings: tensor_stats.txt of quantexp draw" in words(drawn[0])


def test_the_loss_of_the_matched_bf16_run_is_drawn_beside_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    other_seed = runs.add("bf16", [7.0, 6.0], seed=7)
    matched = runs.add("bf16", [6.0, 5.0])
    run = runs.add("linear_mxfp4", [6.1, 5.2])
    baseline = baseline_of(run)
    assert baseline is not None
    assert baseline.losses == (6.0, 5.0)
    assert baseline_of(matched) is None
    assert baseline_of(other_seed) is None


def test_without_a_matched_bf16_run_there_is_no_baseline(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add("bf16", [7.0, 6.0], seed=7)
    (tmp_path / "x_bf16-broken").mkdir()
    (tmp_path / "x_bf16-broken" / "config.yaml").write_text("[")
    (tmp_path / "x_bf16-dangling").symlink_to(tmp_path / "gone")
    assert baseline_of(runs.add("linear_mxfp4", [6.1, 5.2])) is None


@pytest.mark.parametrize(("num_layers", "fmt"), [(1, None), (2, "mxfp4"), (16, None)])
def test_no_two_texts_overlap(
    capture: Capture, drawn: list[Figure], num_layers: int, fmt: str | None
) -> None:
    capture.add_layers(num_layers, tokens=32, width=32)
    capture.add_config()
    capture.add_metrics([5.0, 4.0, 3.5])
    if fmt is not None:
        as_statistics(capture, fmt)
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    figure = drawn[0]
    figure.canvas.draw()
    texts = [*figure.texts]
    for ax in figure.axes:
        legend = ax.get_legend()
        texts += [*ax.texts, ax.xaxis.label, ax.yaxis.label, ax._left_title]  # type: ignore[attr-defined]
        texts += [] if legend is None else legend.get_texts()
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
            texts += [t for tick in ticks for t in (tick.label1, tick.label2) if t.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    assert len(boxes) > 20
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


def test_tensors_in_another_folder_are_drawn(capture: Capture, drawn: list[Figure]) -> None:
    capture.add_layers(1, tokens=32)
    elsewhere = capture.run_dir.parent / "elsewhere"
    elsewhere.mkdir()
    capture.dir.rename(elsewhere / capture.run_dir.name)
    (capture.run_dir / "config.yaml").write_text(f"capture: {{dir: {elsewhere}}}\n")
    draw_quick_analysis(capture.run_dir, capture.run_dir)
    assert "no tensors captured" not in words(drawn[0])


def test_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        draw_quick_analysis(tmp_path / "nowhere", tmp_path)


def test_neither_pyplot_nor_hydra_nor_megatron_is_imported() -> None:
    code = (
        "import sys, quantexp.analysis.quick.picture; "
        "print([m for m in ('matplotlib.pyplot', 'hydra', 'megatron') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
