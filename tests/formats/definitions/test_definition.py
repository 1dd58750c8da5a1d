"""A declaration becomes the family whose arithmetic it has; what makes no sense is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.files import (
    format_of_record,
    formats_in,
    know_format,
    read_format,
    shipped_formats,
)
from quantexp.formats.spec import get_format
from quantexp.formats.types import WHOLE_ROW, Family, Format, Scaling

Keys = dict[str, Any]


def declared(**keys: Any) -> Format:
    return declared_format("own", keys)


@pytest.mark.parametrize(
    ("keys", "family", "block"),
    [
        ({"element": "e3m3", "block": 24}, Family.MX, 24),
        (
            {"element": "int8", "block": 32, "scale": "power_of_two", "scale_rule": "rceil"},
            Family.MX,
            32,
        ),
        ({"element": "e3m3", "block": 24, "scale": "ue5m3"}, Family.GRID, 24),
        ({"element": "e3m3", "block": 24, "scale_rule": "search"}, Family.GRID, 24),
        ({"element": "e2m1", "block": 16, "scale": "e4m3", "candidates": [6, 4]}, Family.GRID, 16),
        ({"element": "e3m3", "block": [4, 8]}, Family.GRID, 8),
        ({"element": ["e2m1", "int4"], "block": 32}, Family.GRID, 32),
        ({"element": "int4", "block": 64, "micro_exponents": [8, 4]}, Family.GRID, 64),
        ({"element": "e2m1", "block": 16, "scale": "e4m3", "eden": 32}, Family.GRID, 32),
        (
            {"element": "e2m1", "block": 8, "tensor_scale": "fp32", "macro_block": "row"},
            Family.GRID,
            WHOLE_ROW,
        ),
        ({"element": "e3m3", "block": "row"}, Family.GRID, WHOLE_ROW),
        ({"element": "hif8", "block": 32}, Family.GRID, 32),
        ({"element": {"integer_bits": 4, "symmetric": False}, "block": 32}, Family.GRID, 32),
        ({"element": "e3m3"}, Family.FP8, None),
        ({"element": "hif8", "scale": "none"}, Family.HIF8, None),
        ({"element": {"values": [-1, 0, 1]}}, Family.GRID, None),
    ],
)
def test_arithmetic_decides_the_family(keys: Keys, family: Family, block: int | None) -> None:
    fmt = declared(**keys)
    assert (fmt.family, fmt.block) == (family, block)


def test_scales_of_the_tensor() -> None:
    assert declared(element="e3m3").scaling is Scaling.EXACT
    assert declared(element="e3m3", scale="power_of_two").scaling is Scaling.CURRENT
    assert declared(element="hif8").amax_target == 15
    assert declared(element="e3m3", amax_target=3).amax_target == 3
    two = declared(element="e2m1", block=16, scale="e4m3", tensor_scale="fp32")
    assert (two.scaling, two.amax_target) == (Scaling.EXACT, 6 * 448)


def test_square_blocks_do_not_depend_on_the_axis() -> None:
    assert not declared(element="e4m3", block=[16, 16], scale="fp32").depends_on_axis
    assert declared(element="e4m3", block=[8, 16], scale="fp32").depends_on_axis


def test_bits_count_the_share_of_the_scale() -> None:
    assert declared(element="e3m3", block=24, scale="ue5m3").bits_each() == 7 + 8 / 24
    assert declared(element="e4m3", block=[128, 128], scale="fp32").bits_each() == 8 + 32 / 128**2
    assert declared(element="int4", block=16, scale="bf16").bits_each() == 5
    assert declared(element="e2m1", block=16, scale="e4m7").bits_each() == 5
    corrected = declared(element="e2m1", block=16, scale="e4m3", eden=64)
    assert corrected.bits_each() == 4.5
    levels = declared(element="int4", block=64, scale="ue6m2", micro_exponents=[8, 4])
    assert levels.bits_each() == 4 + 8 / 64 + 1 / 8 + 1 / 4
    macro = declared(element="e2m1", block=32, tensor_scale="fp32", macro_block=128)
    assert macro.bits_each() == 4 + 8 / 32 + 32 / 128
    powers = declared(element="e2m1", block=32, tensor_scale="power_of_two", macro_block=128)
    assert powers.bits_each() == 4 + 8 / 32 + 8 / 128


@pytest.mark.parametrize(
    ("scale", "bits"), [("e4m3", 8), ("ue5m3", 16), ("e8m0", 16), ("fp32", 32)]
)
def test_the_choice_of_an_element_is_free_where_a_scale_has_a_bit_left(
    scale: str, bits: int
) -> None:
    assert declared(element=["e2m1", "int4"], block=16, scale=scale).bits_each() == 4 + bits / 16


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"block": 32}, "element is missing; a format has element, block"),
        ({"element": "e3m3", "blocks": 3}, "unknown key blocks; a format has element, block"),
        (
            {"element": "e3m3", "block": 0},
            "block must be a number of elements, [rows, elements], row",
        ),
        ({"element": "e3m3", "block": [1, 2, 3]}, "with numbers from 1 to 1048576, got [1, 2, 3]"),
        ({"element": "e3m3", "block": 8, "scale": "q8"}, "scale must be one of e8m0, power_of_two"),
        ({"element": "e3m3", "block": 8, "scale": "none"}, "scale must not be none with blocks"),
        ({"element": "e3m3", "scale": "ue5m3"}, "scale of a whole tensor must be one of fp32"),
        (
            {"element": "e3m3", "block": 8, "scale_rule": "exact"},
            "scale_rule must be one of floor, rceil, ceil, even, search for scale e8m0, got 'exact'",
        ),
        (
            {"element": {"values": [-1, 0, 1]}, "block": 8, "scale_rule": "even"},
            "scale_rule even rounds an amax to the element's mantissa, which 3 values does not have",
        ),
        ({"element": "e3m3", "scale_rule": "floor"}, "scale_rule is for a format with blocks"),
        ({"element": "e3m3", "tensor_scale": "fp32"}, "tensor_scale is for a format with blocks"),
        (
            {"element": "e3m3", "block": 8, "tensor_scale": "fp32"},
            "tensor_scale is for block scales that are small floats such as e4m3",
        ),
        (
            {"element": "e3m3", "block": 8, "scale": "e4m3", "tensor_scale": "yes"},
            "tensor_scale must be one of fp32, power_of_two, none, got 'yes'",
        ),
        (
            {"element": "e3m3", "block": 8, "amax_target": 3},
            "amax_target is the amax of a tensor after scaling; with blocks it needs a tensor_scale",
        ),
        (
            {
                "element": "e2m1",
                "block": 8,
                "scale": "e4m3",
                "tensor_scale": "fp32",
                "amax_target": 2689,
            },
            "amax_target must be above 0 and at most the largest value 2688, got 2689",
        ),
        (
            {"element": "e2m1", "block": 8, "candidates": [6, 4]},
            "candidates is for scales that are no powers of two; scale_rule: search tries halves of those",
        ),
        (
            {
                "element": "e2m1",
                "block": 8,
                "scale": "e4m3",
                "scale_rule": "search",
                "candidates": [6, 4],
            },
            "candidates and scale_rule search exclude each other; drop one",
        ),
        (
            {"element": "e2m1", "block": 8, "scale": "e4m3", "candidates": []},
            "candidates must be 1 to 16 numbers above 0, got []",
        ),
        (
            {"element": "e2m1", "block": 8, "scale": "e4m3", "candidates": [6, "1e0"]},
            "candidates must be 1 to 16 numbers above 0, got [6, '1e0']",
        ),
        (
            {"element": "e2m1", "block": 8, "scale": "e4m3", "choose": "mse"},
            "choose is for several candidates or elements and for scale_rule search; give these, or drop",
        ),
        (
            {
                "element": "e2m1",
                "block": 8,
                "scale": "e4m3",
                "candidates": [6, 4],
                "choose": "least",
            },
            "choose must be one of mse, mae, max, got 'least'",
        ),
        ({"element": "e2m1", "candidates": [6, 4]}, "candidates is for a format with blocks"),
        ({"element": "e2m1", "eden": 32}, "eden is for a format with blocks"),
        ({"element": ["e2m1"], "block": 8}, "a list of elements must have 2 to 4, got 1"),
        ({"element": ["e2m1", "int4"]}, "a list of elements is for a format with blocks"),
        (
            {"element": ["e2m1", "hif8"], "block": 8, "scale_rule": "even"},
            "scale_rule even rounds an amax to the element's mantissa, which hif8 does not have",
        ),
        (
            {"element": "int4", "block": 64, "micro_exponents": [8, 3]},
            "micro_exponents must be 1 to 3 numbers of elements, each of which divides the one before, the first the "
            "block of 64, got [8, 3]",
        ),
        ({"element": "int4", "block": 8, "micro_exponents": 4}, "micro_exponents must be 1 to 3"),
        (
            {"element": "int4", "block": 8, "scale": "e4m3", "micro_exponents": [4], "eden": 8},
            "micro_exponents and eden exclude each other; drop one",
        ),
        (
            {"element": "int4", "block": [2, 8], "micro_exponents": [4]},
            "micro_exponents is for blocks of one row of one element, whose scale follows from an amax",
        ),
        (
            {"element": "hif8", "block": 8, "micro_exponents": [4]},
            "micro_exponents is for floats and integers, whose values a power of two moves, got hif8",
        ),
        ({"element": "e2m1", "block": 16, "eden": 32}, "eden corrects scales by some percent"),
        (
            {"element": "e2m1", "block": [2, 8], "scale": "e4m3", "eden": 32},
            "eden is for blocks of a number of elements; give block a number",
        ),
        (
            {"element": "e2m1", "block": 16, "scale": "e4m3", "eden": 40},
            "eden must be a multiple of the block of 16, at most 65536, got 40",
        ),
        ({"element": "e2m1", "macro_block": 32}, "macro_block is for a format with blocks"),
        (
            {"element": "e2m1", "block": [2, 8], "tensor_scale": "fp32", "macro_block": 32},
            "macro_block is for blocks of a number of elements; give block a number",
        ),
        (
            {"element": "e2m1", "block": 8, "tensor_scale": "fp32", "macro_block": 12},
            "macro_block must be row or a multiple of 8 elements, at most 65536, got 12",
        ),
        (
            {"element": "e2m1", "block": 8, "macro_block": 32},
            "macro_block has the scale that tensor_scale names; give tensor_scale",
        ),
        (
            {
                "element": "e2m1",
                "block": 8,
                "scale": "bf16",
                "tensor_scale": "fp32",
                "macro_block": 32,
            },
            "macro_block is above block scales that are small floats or powers of two; drop it",
        ),
        (
            {
                "element": "e2m1",
                "block": 8,
                "tensor_scale": "fp32",
                "macro_block": 32,
                "amax_target": 7,
            },
            "amax_target must be above 0 and at most the largest value 6, got 7",
        ),
        (
            {"element": "e2m1", "block": 8, "scale": {"exponent_bits": 6, "mantissa_bits": 2}},
            "scale must have the keys exponent_bits, mantissa_bits, bias, got",
        ),
        (
            {
                "element": "e2m1",
                "block": 8,
                "scale": {"exponent_bits": 6, "mantissa_bits": 2, "bias": True},
            },
            "scale.bias must be a whole number, got True",
        ),
        ({"element": "e3m3", "amax_target": True}, "amax_target must be a number, got True"),
        (
            {"element": "e3m3", "amax_target": 99},
            "amax_target must be above 0 and at most the largest value 30, got 99",
        ),
        (
            {"element": "e3m3", "rounding": "up"},
            "rounding must be one of even, away, zero, stochastic, got 'up'",
        ),
        (
            {"element": {"integer_bits": 8, "step": 2.0**20}, "block": 8, "scale": "e2m1"},
            "scale ue2m1 cannot reach 1 with element int8*2^20",
        ),
        (
            {"element": "e3m3", "python": "a:B"},
            "unknown key element; a format in Python has python alone",
        ),
        ({"python": "nothing"}, "python must be package.module:Class, got 'nothing'"),
    ],
)
def test_nonsense_is_refused_in_one_line(keys: Keys, words: str) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        declared(**keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_plain_yaml_is_refused() -> None:
    with pytest.raises(ValueError, match="the format own must be plain YAML"):
        declared(element={"values": {1, 2}})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mxfp8", "element: e3m3", "mxfp8.yaml has the name of a format of quantexp; give the"),
        ("high", "element: e3m3", "high.yaml has the name of a format of quantexp; give the"),
        ("a b", "element: e3m3", "a b.yaml must be named with 1 to 64 letters, digits and under"),
        ("a", "element: e3m3\nblock: 8\nelement: e2m1", "a.yaml: element is there twice; drop one"),
        ("b", "element: {values: [1, -1, 1e-3]}", "text, so write it with a dot and a signed expo"),
        ("c", "element: e4m3\namax_target: 1.0e3", "YAML reads 1.0e3 as text, so write it with"),
        ("d", "element: e4m3\n3: 4", "must be plain YAML with text as keys"),
    ],
)
def test_files_that_mislead_are_refused(tmp_path: Any, name: str, text: str, words: str) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r".+") as caught:
        read_format(file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("element", "family"), [("e5m8", Family.MX), ("e5m9", Family.GRID)])
def test_steps_below_float32_are_no_arithmetic_of_mx(element: str, family: Family) -> None:
    """The smallest step is 2^(emin - m) times the smallest scale, 2^-127."""
    assert declared(element=element, block=32, scale="e8m0").family is family


def test_names_are_looked_up_in_the_table_the_scheme_and_the_shipped_files() -> None:
    own = declared(element="e3m3")
    assert get_format("mxfp8", {"mxfp8": own}).name == "mxfp8_e4m3"
    assert get_format("mxint8", {"mxint8": own}) is own
    assert get_format("mxint8") is shipped_formats()["mxint8"]
    with pytest.raises(ValueError, match=r"unknown number format 'e3'.*mxint8"):
        get_format("e3")


def test_files_name_their_formats(tmp_path: Any) -> None:
    (tmp_path / "tiny.yaml").write_text("element: e2m1\nblock: 8\n")
    assert formats_in(tmp_path)["tiny"] == declared_format("tiny", {"element": "e2m1", "block": 8})
    (tmp_path / "bad.yaml").write_text("element: e99m1\n")
    with pytest.raises(
        ValueError, match=r"bad\.yaml: exponent_bits must be between 0 and 8, got 99"
    ):
        read_format(tmp_path / "bad.yaml")


def test_records_bring_their_own_definitions() -> None:
    record = {"format": "mine_once", "definition": '{"element": "e3m3"}'}
    assert format_of_record(record).element.name == "e3m3"
    with pytest.raises(ValueError, match="unknown number format 'mine_once'"):
        get_format("mine_once")
    know_format(record)
    assert get_format("mine_once").element.name == "e3m3"
    with pytest.raises(ValueError, match="the format mine_once is not the same in all of these"):
        know_format(record | {"definition": '{"element": "e3m2"}'})
