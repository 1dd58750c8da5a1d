from __future__ import annotations

import pytest

from quantexp.analysis.scheme_style import (
    DASH_DOT,
    DASHED,
    DOTTED,
    FORMAT_COLOURS,
    OTHER,
    SOLID,
    Dash,
    format_colour,
    scheme_style,
    scheme_styles,
    shaded,
)
from quantexp.folders import conf_dir

TEN = [path.stem for path in (conf_dir() / "quant").glob("*.yaml")]
MORE = [path.stem for path in (conf_dir() / "quant" / "more").glob("*.yaml")]


@pytest.mark.parametrize(
    ("scheme", "dash"),
    [
        ("FA_mxfp4", DOTTED),
        ("linear_mxfp4", DASHED),
        ("FA_linear_mxfp4", SOLID),
        ("FA_full_mxfp4", DASH_DOT),
        ("bf16", SOLID),
    ],
)
def test_the_dash_shows_the_site(scheme: str, dash: Dash) -> None:
    assert scheme_style(scheme).dash == dash


def test_markers_distinguish_sites_where_nothing_has_a_dash() -> None:
    sites = ("FA", "linear", "FA_linear", "FA_full")
    markers = {scheme_style(f"{site}_mxfp4").marker for site in sites}
    assert len(markers | {scheme_style("bf16").marker, scheme_style("mxfp4").marker}) == 6


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_e2m1 floor", "linear_mxfp4", "FA_full_mxfp4"])
def test_the_colour_is_that_of_the_format_that_the_name_mentions(name: str) -> None:
    assert format_colour(name) == scheme_style(name).colour == FORMAT_COLOURS["mxfp4"]


def test_a_users_own_scheme_has_a_colour() -> None:
    assert format_colour("mine") is None
    assert scheme_style("mine").colour == OTHER


def test_no_two_shipped_schemes_look_alike_on_one_page() -> None:
    assert len(TEN) == 10
    assert len({(s.colour, s.dash) for s in scheme_styles(TEN + MORE)}) == len(TEN + MORE)


def test_the_ten_schemes_look_the_same_on_every_page() -> None:
    among_all = dict(zip(MORE + TEN, scheme_styles(MORE + TEN), strict=True))
    assert all(among_all[name] == scheme_style(name) for name in TEN)


def test_bf16_is_neutral_and_nothing_else_is() -> None:
    def is_grey(colour: str) -> bool:
        return colour[1:3] == colour[3:5] == colour[5:7]

    styles = zip(TEN + MORE, scheme_styles(TEN + MORE), strict=True)
    assert [name for name, style in styles if is_grey(style.colour)] == ["bf16"]


def test_fifteen_lines_of_one_name_look_different() -> None:
    styles = scheme_styles(["linear_mxfp4"] * 15)
    assert len({(style.colour, style.dash) for style in styles}) == 15
    assert styles[0] == scheme_style("linear_mxfp4")


def test_shades_differ_in_lightness() -> None:
    assert shaded("#0072B2", -0.5) == "#003959"
    assert shaded("#0072B2", 0.5) == "#80B8D8"
    assert shaded("#0072B2", 0) == "#0072B2"


def test_matplotlib_takes_the_dash() -> None:
    assert scheme_style("FA_mxfp8").linestyle == (0, DOTTED)
    assert scheme_style("bf16").linestyle == "solid"
