from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from quantexp.analysis.draw.statistics_only_figure import draw_statistics_only, ranges_of
from quantexp.analysis.measures.counted import StatisticsOnly
from quantexp.analysis.measures.table import name_of
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.formats.spec import get_format

from ..captures import MX4, Capture, linear_formats  # noqa: TID252
from ..quick.test_first_look import as_statistics  # noqa: TID252
from .conftest import Draw


def statistics_of(x: torch.Tensor, fmt: str | None = None, **more: Any) -> StatisticsOnly:
    chosen = None if fmt is None else chosen_for(fmt, "input")
    metadata = {
        **{"module": "fc1", "layer": 3, "layer_type": "linear", "operation": "forward"},
        **{"phase": "pre", "component": "linear", "quant_type": "mxfp4", "tensor": "input"},
        **{"iteration": 7, "micro_batch": 0, "rank": 0, "shape": list(x.shape)},
        **{"dtype": "float32", "formats": linear_formats(MX4), "statistics": statistics(x, chosen)},
    }
    return StatisticsOnly.of(CapturedTensor.of(Path(), metadata | more))


def words(figure: Figure) -> str:
    texts = [*figure.texts, *(text for ax in figure.axes for text in ax.texts)]
    return "\n".join(text.get_text() for text in texts)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_octaves_have_the_share_of_the_elements_in_them() -> None:
    x = normal(64, 64)
    x[0, :8] = 0
    bars = draw_statistics_only(statistics_of(x), "run").axes[0]
    heights = {
        round(math.log2(c.get_paths()[0].get_extents().x0)): c.get_paths()[0].get_extents().y1
        for c in bars.collections
    }
    wide = np.abs(x.double().numpy().ravel())
    exponents, counts = np.unique(np.floor(np.log2(wide[wide > 0])), return_counts=True)
    expected = dict(zip(exponents, counts / wide.size, strict=True))
    assert {e: h for e, h in heights.items() if h} == pytest.approx(expected)
    assert "zero: 0.20%" in words(draw_statistics_only(statistics_of(x), "run"))


def test_a_format_of_ones_own_is_drawn_by_its_recorded_definition() -> None:
    """Workers have read no capture, so the name alone says nothing to them."""
    definition = '{"block": 24, "element": "e3m3", "scale": "ue5m3"}'
    own = {"format": "of_my_own", "definition": definition, "axis": "input_width", "block": 24}
    content = statistics_of(normal(64, 64), formats={"fprop.x": own})
    judged = {**own, "scale_exponents": {"first": -2, "counts": [5]}}
    content.record["fidelity"] = judged
    labels = {label: fmt.element.max for label, (fmt, _) in ranges_of(content)}
    assert labels == {
        "of_my_own at the scale of the largest element": 30.0,
        "of_my_own in the median block": 30.0,
    }
    assert "of_my_own in the median block" in words(draw_statistics_only(content, "run"))


def test_ranges_are_those_of_the_largest_element_and_of_the_median_block() -> None:
    x = normal(64, 64) * torch.logspace(-3, 3, 64)[:, None]
    scales = np.floor(np.log2(np.abs(x.double().numpy()).reshape(-1, 32).max(1))) - 2
    fmt = get_format("mxfp4")
    assert dict(ranges_of(statistics_of(x, "mxfp4"))) == {
        "mxfp4_e2m1 at the scale of the largest element": (fmt, 2.0 ** scales.max()),
        "mxfp4_e2m1 in the median block": (fmt, 2.0 ** np.sort(scales)[63]),
    }
    assert len(dict(ranges_of(statistics_of(x)))) == 1


def test_quantiles_stand_against_those_of_a_normal_distribution() -> None:
    x = normal(64, 64)
    line = draw_statistics_only(statistics_of(x), "run").axes[3].lines[1]
    wide = x.double().numpy().ravel()
    shares = np.array([float(share) for share in statistics_of(x).record["quantiles"]])
    expected = (np.quantile(wide, shares) - wide.mean()) / wide.std()
    # Quantiles of float32 are those of the elements truncated to bfloat16.
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=1 / 128, atol=0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "finding"),
    [
        (torch.zeros(0, 4), "empty"),
        (torch.zeros(4, 4), "all zero"),
        (torch.full((4, 4), math.nan), "nothing finite: 16 NaN"),
        (torch.full((4, 4), 3.0), "constant 3"),
    ],
)
def test_a_degenerate_tensor_is_drawn_with_its_finding(x: torch.Tensor, finding: str) -> None:
    assert finding in words(draw_statistics_only(statistics_of(x), "run"))


def test_a_name_is_like_a_file_name_with_iteration_micro_batch_and_rank() -> None:
    assert name_of(statistics_of(normal(4, 4)).entry.metadata) == (
        "mxfp4/linear_L3-fc1_forward_pre_linear_mxfp4_input_i7_m0_r0"
    )


def test_statistics_alone_are_drawn_and_tabulated(
    capture: Capture, draws: Draw, tmp_path: Path
) -> None:
    capture.add_layers(1, tokens=32, width=32)
    tensors = {
        (line["module"], line["tensor"]): torch.load(capture.dir / line["file"])["tensor"]
        for line in capture.lines
    }
    as_statistics(capture)
    outcome, complaints, printed = draws(
        capture.run_dir, only=("distributions", "heatmaps", "statistics"), filters={"module": "fc*"}
    )
    assert complaints == []
    assert outcome.num_tensors == 12
    assert (
        "statistics of 12 tensors, no values: heatmaps and attention_maps are left out" in printed
    )
    figures = list((tmp_path / "draw" / "distributions").rglob("*.png"))
    assert len(figures) == 12
    assert not (tmp_path / "draw" / "heatmaps").exists()
    rows = json.loads((tmp_path / "draw" / "statistics" / "statistics.json").read_text())
    assert {(row["module"], row["tensor"]) for row in rows} == {
        one for one in tensors if one[0].startswith("fc")
    }
    for row in rows:
        x = tensors[row["module"], row["tensor"]].double().numpy()
        assert row["mean"] == pytest.approx(x.mean(), abs=1e-6)
        assert row["max"] == x.max()


def test_only_the_last_of_many_iterations_has_figures_without_a_filter(
    capture: Capture, draws: Draw, tmp_path: Path
) -> None:
    for iteration in (1, 2, 3):
        capture.add(normal(4, 32), "input")["iteration"] = iteration
    as_statistics(capture)
    outcome, _, _ = draws(capture.run_dir, only=("distributions",))
    drawn = {path.stem[-9:] for path in (tmp_path / "draw").rglob("*.png")}
    assert (outcome.num_tensors, drawn) == (3, {"_i3_m0_r0"})
    draws(capture.run_dir, only=("distributions",), filters={"iteration": "1-2"})
    drawn = {path.stem[-9:] for path in (tmp_path / "draw").rglob("*.png")}
    assert drawn == {"_i1_m0_r0", "_i2_m0_r0", "_i3_m0_r0"}
