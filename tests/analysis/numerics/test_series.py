from __future__ import annotations

import pytest

from quantexp.analysis.numerics.lines import percent
from quantexp.analysis.numerics.marks import mark_of, scheme_mark
from quantexp.analysis.numerics.series import in_order, slug
from quantexp.analysis.style import QUANT_COLOURS


def test_an_operand_has_the_colour_of_its_tensor_and_the_line_of_its_product() -> None:
    fprop, wgrad = mark_of("fprop.x"), mark_of("wgrad.x")
    assert fprop.colour == wgrad.colour == mark_of("input").colour == mark_of("input_wgrad").colour
    assert (fprop.line, wgrad.line, mark_of("dgrad.w").line) == ("-", ":", "--")
    assert mark_of("dgrad_k.dS").colour == mark_of("grad_scores").colour


def test_a_gradient_is_an_open_marker_in_its_tensors_colour() -> None:
    assert mark_of("grad_query").colour == mark_of("query").colour
    assert not mark_of("grad_query").filled


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "hifp8"])
def test_a_scheme_has_its_formats_colour_everywhere(kind: str) -> None:
    marks = [scheme_mark(f"{sites}_{kind}") for sites in ("FA", "linear", "FA_linear")]
    assert {mark.colour for mark in [*marks, scheme_mark(kind)]} == {QUANT_COLOURS[kind]}
    assert len({mark.marker for mark in marks}) == 3


def test_bf16_has_its_own_colour_and_what_is_not_known_has_one_too() -> None:
    assert scheme_mark("bf16").colour == QUANT_COLOURS["bf16"]
    assert mark_of("something").colour
    assert scheme_mark("mine").colour


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
