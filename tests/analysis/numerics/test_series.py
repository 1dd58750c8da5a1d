from __future__ import annotations

import pytest

from quantexp.analysis.numerics.lines import mark_of, percent
from quantexp.analysis.numerics.series import in_order, slug


def test_an_operand_has_the_colour_of_its_tensor_and_the_line_of_its_product() -> None:
    fprop, wgrad = mark_of("fprop.x"), mark_of("wgrad.x")
    assert fprop.colour == wgrad.colour == mark_of("input").colour == mark_of("input_wgrad").colour
    assert (fprop.line, wgrad.line, mark_of("dgrad.w").line) == ("-", ":", "--")
    assert mark_of("dgrad_k.dS").colour == mark_of("grad_scores").colour


def test_a_gradient_is_an_open_marker_in_its_tensors_colour() -> None:
    assert mark_of("grad_query").colour == mark_of("query").colour
    assert not mark_of("grad_query").filled


def test_an_unknown_series_has_a_mark_too() -> None:
    assert mark_of("something").colour


def test_series_are_in_the_order_of_the_passes() -> None:
    names = ["wgrad.x", "grad_input", "dgrad.g", "weight", "fprop.x", "input"]
    assert in_order(names) == ["fprop.x", "dgrad.g", "wgrad.x", "input", "weight", "grad_input"]


@pytest.mark.parametrize(
    ("share", "words"), [(0, "0"), (1e-6, "0.0001 %"), (0.01, "1 %"), (1, "100 %")]
)
def test_shares_are_percent(share: float, words: str) -> None:
    assert percent(share) == words


def test_words_become_parts_of_file_names() -> None:
    assert slug("mxfp8_e4m3 rceil") == "mxfp8_e4m3-rceil"
    assert slug("../a run/") == "..-a-run"
