from __future__ import annotations

import pytest

from quantexp.analysis.compare.look import DASHED, DOTTED, FORMAT_COLOURS, OTHER, SOLID, look_of
from quantexp.analysis.style import QUANT_COLOURS, quant_colour
from quantexp.paths import conf_dir


def test_colours_are_those_of_the_figures() -> None:
    assert FORMAT_COLOURS.items() >= QUANT_COLOURS.items()
    assert look_of("FA_linear_mxfp8").colour == quant_colour("mxfp8")


@pytest.mark.parametrize(
    ("scheme", "dash"),
    [("FA_mxfp4", DOTTED), ("linear_mxfp4", DASHED), ("FA_linear_mxfp4", SOLID), ("bf16", SOLID)],
)
def test_sites_are_told_by_the_dash(scheme: str, dash: tuple[float, ...]) -> None:
    assert look_of(scheme).dash == dash


def test_no_two_of_the_ten_schemes_look_alike() -> None:
    names = [path.stem for path in (conf_dir() / "quant").glob("*.yaml")]
    assert len(names) == len({look_of(name) for name in names}) == 10


def test_a_scheme_of_ones_own_has_a_colour() -> None:
    assert look_of("mine").colour == OTHER
