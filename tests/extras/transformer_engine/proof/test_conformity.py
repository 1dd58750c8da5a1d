"""What may differ between Transformer Engine's bytes and ours, by hand: each edge in a block of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantexp.extras.transformer_engine.proof.conformity import Comparison, compare, finding_of
from quantexp.extras.transformer_engine.proof.stored import Kind, Stored
from quantexp.extras.transformer_engine.rank.gemm_watch import judge_operand
from quantexp.formats import encode, resolve
from quantexp.formats.types import Rounding
from quantexp.proof.findings import Finding, Status

MXFP8 = resolve("mxfp8_e4m3", scale_rule="rceil")
BLOCK = resolve("mxfp8_e4m3", block=128, scale_rule="rceil")
NAN, INF, ONE = float("nan"), float("inf"), 0x38


def block(source: Tensor, codes: list[int], scale: int) -> tuple[Stored, Tensor]:
    """One block of 32 of which the first elements are given, the others 0."""
    full = torch.zeros(1, 32, dtype=torch.uint8)
    full[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    x = torch.zeros(1, 32)
    x[0, : len(source)] = source
    scales = torch.tensor([[scale]], dtype=torch.uint8)
    return Stored(Kind.MXFP8, "e4m3", full, scales, -1), x


def test_a_nan_stays_one_element_and_does_not_enter_the_amax() -> None:
    # 448 has the code 0x7E at the scale 2^0; NaN has 0x7F.
    stored, x = block(torch.tensor([448.0, NAN, 1.0]), [0x7E, 0x7F, ONE], 127)
    comparison = compare(stored, MXFP8, x)
    assert comparison.conforms
    assert comparison.expected == {"NaN": 1}


def test_a_nan_that_became_a_number_does_not_conform() -> None:
    stored, x = block(torch.tensor([448.0, NAN, 1.0]), [0x7E, 0x10, ONE], 127)
    assert compare(stored, MXFP8, x).code_mismatches == 1


def test_a_block_with_inf_has_the_scale_254() -> None:
    stored, x = block(torch.tensor([float("inf"), 1.0]), [0x7E, 0], 254)
    comparison = compare(stored, MXFP8, x)
    assert comparison.conforms
    assert comparison.expected == {"Inf": 32}
    stored, x = block(torch.tensor([float("inf"), 1.0]), [0x7E, 0], 127)
    assert compare(stored, MXFP8, x).scale_mismatches == 1


@pytest.mark.parametrize(
    ("version", "codes", "conforms"),
    [
        ((2, 12), [0], True),
        ((2, 12), [ONE], False),
        ((2, 13), [ONE], True),
        ((2, 13), [0], False),
    ],
)
def test_a_block_with_the_smallest_scale_is_flushed_up_to_version_2_12(
    version: tuple[int, int], codes: list[int], conforms: bool
) -> None:
    stored, x = block(torch.tensor([2.0**-127]), codes, 0)
    comparison = compare(stored, MXFP8, x, version)
    assert comparison.conforms is conforms
    assert comparison.expected == ({"smallest": 1} if version == (2, 12) else {})


def test_a_block_of_zeros_may_have_the_scale_zero_in_nvfp4() -> None:
    x = torch.zeros(1, 32)
    x[0, 16] = 6.0
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 16] = 7
    scales = torch.tensor([[0, 0x7E]], dtype=torch.uint8)
    stored = Stored(Kind.NVFP4, "e2m1", codes, scales, -1, tensor_scale=torch.tensor(6.0 / 2688))
    comparison = compare(stored, resolve("nvfp4"), x)
    assert comparison.conforms, str(comparison)
    assert comparison.expected == {"zero block": 1}


def lines(
    source: list[float], codes: list[int], scale: float, axis: int = -1
) -> tuple[Stored, Tensor]:
    """Two lines of 128 under float32 scales: one that starts as given, and one of 448 and zeros under the scale 1."""
    x, full = torch.zeros(2, 128), torch.zeros(2, 128, dtype=torch.uint8)
    x[0, : len(source)], x[1, 0] = torch.tensor(source), 448.0
    full[0, : len(codes)], full[1, 0] = torch.tensor(codes, dtype=torch.uint8), 0x7E
    scales = torch.tensor([[scale], [1.0]])
    if axis == 0:
        x, full, scales = x.t(), full.t(), scales.t()
    return Stored(Kind.BLOCK, "e4m3", full, scales, axis), x


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(
    ("source", "codes", "scale", "expected"),
    [
        ([0.0, -0.0], [0, 0x80], 1.0, {"zero block": 1}),
        ([0.0], [0], 2.0**-127, {}),
        ([0.0, NAN], [0, 0x7F], 1.0, {"NaN": 1, "zero block": 1}),
        ([INF, 1.0], [0x7E, ONE], 1.0, {"Inf": 128}),
        ([448 * 2.0**-127], [0x7E], 2.0**-127, {}),
        ([2.0**-130], [0x20], 2.0**-127, {}),
        ([2.0**-149], [0], 2.0**-127, {}),
        ([2.0**-149], [0], 1.0, {"zero block": 1}),
        ([449 * 2.0**-110], [0x76], 2.0**-109, {}),
    ],
)
def test_a_block_of_128_conforms_with_our_scale_or_where_no_scale_matters(
    source: list[float], codes: list[int], scale: float, axis: int, expected: dict[str, int]
) -> None:
    stored, x = lines(source, codes, scale, axis)
    comparison = compare(stored, BLOCK, x)
    assert comparison.conforms, str(comparison)
    assert comparison.expected == expected


@pytest.mark.parametrize(
    ("source", "codes", "scale"),
    [
        ([2.0**-130], [0x20], 1.0),  # a tiny block
        ([2.0**-130], [0x20], 2.0**-128),  # below E8M0
        ([448.0, 1.0], [0x7E, ONE], 2.0),
        ([INF, 1.0], [0x7E, ONE], 2.0**127),
        ([INF, 1.0], [0, 0], 2.0),
        ([0.0], [0], 0.0),
        ([0.0], [0], INF),
        ([0.0], [0], NAN),
        ([0.0], [0], 3.0),
    ],
)
def test_a_block_of_128_with_another_scale_does_not_conform(
    source: list[float], codes: list[int], scale: float
) -> None:
    stored, x = lines(source, codes, scale)
    comparison = compare(stored, BLOCK, x)
    assert (comparison.code_mismatches, comparison.scale_mismatches) == (0, 1)


def test_a_code_in_a_block_of_zeros_is_two_mismatches() -> None:
    stored, x = lines([0.0], [ONE], 1.0)
    comparison = compare(stored, BLOCK, x)
    assert (comparison.code_mismatches, comparison.scale_mismatches) == (1, 1)


def of_lines(source: list[float], codes: list[int], scale: float) -> Finding:
    stored, x = lines(source, codes, scale)
    return finding_of(stored, BLOCK, x)


def test_the_finding_counts_the_scales_of_blocks_of_zeros() -> None:
    finding = of_lines([0.0], [0], 1.0)
    assert finding.status is Status.ENGAGED
    assert finding.reason == ("1 of 2 scales are Transformer Engine's own, of blocks of zeros")
    assert of_lines([448.0], [0x7E], 1.0).reason == ""
    wrong = of_lines([448.0], [0x7E], 2.0)
    assert wrong.status is Status.MISMATCH


def nvfp4(amax: float, scale: float, codes: list[int]) -> Comparison:
    """A block of `amax`, 1.3 and zeros under a stored scale, beside one of 2688, which makes the tensor's scale 1."""
    x, full = torch.zeros(1, 32), torch.zeros(1, 32, dtype=torch.uint8)
    x[0, 0], x[0, 1], x[0, 16] = amax, -1.3, 2688.0
    full[0, : len(codes)], full[0, 16] = torch.tensor(codes, dtype=torch.uint8), 7
    scales = torch.tensor([[scale, 448.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    stored = Stored(Kind.NVFP4, "e2m1", full, scales, -1, tensor_scale=torch.tensor(1.0))
    return compare(stored, resolve("nvfp4"), x)


@pytest.mark.parametrize(
    ("amax", "scale", "codes", "wrong"),
    [
        (12.0, 2.0, [7, 9], (0, 0)),  # 1.3 / 2 is nearest to 0.5, not to 1
        (12.0, 2.0, [7, 10], (1, 0)),
        (12.0, 2.0, [7, 1], (1, 0)),  # the sign
        (12.0, 2.25, [6, 9], (1, 1)),  # 12 / 2.25 is nearest to 6, not to 4
        (102.0, 16.0, [7, 8], (0, 0)),  # 102 / 6 lies at the middle of 16 and 18
        (102.0, 18.0, [7, 8], (0, 0)),
        (102.0, 20.0, [7, 8], (0, 1)),
        (102.01, 16.0, [7, 8], (0, 1)),
    ],
)
def test_in_nvfp4_each_scale_and_code_is_a_nearest_one(
    amax: float, scale: float, codes: list[int], wrong: tuple[int, int]
) -> None:
    comparison = nvfp4(amax, scale, codes)
    assert (comparison.code_mismatches, comparison.scale_mismatches) == wrong


def test_a_block_of_nvfp4_far_below_the_others_may_be_flushed() -> None:
    x, codes = torch.zeros(1, 32), torch.zeros(1, 32, dtype=torch.uint8)
    x[0, 0], x[0, 16], codes[0, 16] = 6 * 2.0**-11, 2688.0, 7
    one = torch.tensor(1.0)

    def of(scale: int, code: int) -> Comparison:
        codes[0, 0] = code
        scales = torch.tensor([[scale, 0x7E]], dtype=torch.uint8)
        return compare(
            Stored(Kind.NVFP4, "e2m1", codes, scales, -1, tensor_scale=one), resolve("nvfp4"), x
        )

    flushed, ours = of(0, 0), of(1, 3)
    assert flushed.conforms
    assert flushed.expected == {"NVFP4": 1}
    assert ours.conforms
    assert not ours.expected
    assert not of(0, 3).conforms
    x[0, 0] = 6 * 2.0**-9
    assert of(0, 0).scale_mismatches == 1


@pytest.mark.parametrize("axis", [-1, 0])
def test_blocks_of_16_by_16_share_the_largest_amax(axis: int) -> None:
    x = torch.full((16, 32), 3.0)
    x[0, 0], x[0, 16] = 12.0, 2688.0
    each = torch.tensor([2.0, 448.0]).repeat_interleave(16).expand(16, 32)
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[:, :16], codes[0, 0], codes[0, 16] = 3, 7, 7
    scales = each[:, ::16] if axis == -1 else each[:1]
    stored = Stored(
        Kind.NVFP4,
        "e2m1",
        codes,
        scales.to(torch.float8_e4m3fn).view(torch.uint8).clone(),
        axis,
        tensor_scale=torch.tensor(1.0),
    )
    comparison = compare(stored, resolve("nvfp4_16x16"), x)
    assert comparison.conforms, str(comparison)
    stored.scales[-1, 0] += 1
    assert compare(stored, resolve("nvfp4_16x16"), x).scale_mismatches == 1


def test_nvfp4_under_another_scale_of_the_tensor_does_not_conform() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    codes, scales = encode(x, "nvfp4")
    stored = Stored(Kind.NVFP4, "e2m1", codes, scales.block, -1, tensor_scale=scales.tensor)
    assert compare(stored, resolve("nvfp4"), x).conforms
    other = replace(stored, tensor_scale=scales.tensor * (1 + 2.0**-16))
    assert compare(other, resolve("nvfp4"), x).scale_mismatches >= 1


def test_delayed_scaling_is_held_to_the_scale_that_transformer_engine_chose() -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    spec = resolve("fp8_e4m3", scaling="delayed")
    scale = torch.tensor([3.0])
    codes = (x * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    stored = Stored(Kind.FP8, "e4m3", codes, scale.reciprocal(), -1)
    assert compare(stored, spec, x).conforms
    assert not compare(stored, spec, x.roll(1, 0)).conforms


def test_random_bits_are_not_compared_and_the_finding_names_the_format() -> None:
    stored, x = block(torch.tensor([448.0]), [0x7E], 127)
    spec = resolve("mxfp8_e4m3", scale_rule="rceil", rounding=Rounding.STOCHASTIC)
    assert compare(stored, spec, x).expected == {"random": 32}
    finding = finding_of(stored, spec, x)
    assert finding.status is Status.ENGAGED
    assert finding.reason == (
        "by its class: the random bits are Transformer Engine's, it was not compared"
    )
    other = finding_of(stored, resolve("nvfp4"), x)
    assert other.status is Status.MISMATCH
    assert other.reason == "it reached the product as MXFP8 (e4m3) of Transformer Engine"


def test_an_operand_of_another_shape_than_its_source_does_not_engage() -> None:
    stored, x = block(torch.tensor([448.0]), [0x7E], 127)
    part, bf16 = x[:, :16], resolve("bf16")
    for finding in (finding_of(stored, MXFP8, part), judge_operand(x, bf16, -1, part)):
        assert finding.status is Status.MISMATCH
        assert finding.reason == "it reached the product as 1 x 32, and its source is 1 x 16"


def test_zeros_and_values_that_are_not_finite_are_inconclusive() -> None:
    stored, x = block(torch.tensor([448.0]), [0x7E], 127)
    assert finding_of(stored, MXFP8, torch.zeros_like(x)).reason == "all zero"
    assert finding_of(stored, MXFP8, torch.full_like(x, NAN)).reason == "not finite"
