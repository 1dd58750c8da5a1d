from __future__ import annotations

import pytest
import torch

from quantexp.formats import QuantSpec, quantise, resolve
from quantexp.formats.types import ScaleRule, Scaling
from quantexp.proof import grids
from quantexp.proof.grids import EVIDENCE, Status
from quantexp.proof.verdict import judge

BF16 = resolve("bf16")
MXFP8 = resolve("mxfp8_e4m3", scale_rule=ScaleRule.RCEIL)
MXFP4 = resolve("mxfp4_e2m1", scale_rule=ScaleRule.FLOOR)
HIFP8 = resolve("hifp8", scaling=Scaling.CURRENT, amax_target=15.0)
NVFP4 = resolve("nvfp4_e2m1", scaling=Scaling.EXACT)
FP8 = resolve("fp8_e4m3", scaling=Scaling.EXACT)
DECLARED = {
    "bf16": BF16,
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
    "hifp8": HIFP8,
    "nvfp4": NVFP4,
    "fp8_e4m3": FP8,
}


def quantise_as(fmt: str, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """x as a layer with that scheme would multiply it."""
    match fmt:
        case "bf16":
            return x
        case "mxfp8":
            return quantise(x, "mxfp8", axis=axis, scale_rule="rceil")
        case "mxfp8_e5m2":
            return quantise(x, fmt, axis=axis, scale_rule="rceil")
        case "mxfp4":
            return quantise(x, "mxfp4", axis=axis, scale_rule="floor")
        case "hifp8":
            return quantise(x, "hifp8", scaling="current", amax_target=15.0)
        case "nvfp4" | "fp8_e4m3" | "fp8_e5m2":
            return quantise(x, fmt, axis=axis)
    raise AssertionError(fmt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heavy_tails", [False, True])
@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("actual", [*DECLARED, "mxfp8_e5m2", "fp8_e5m2"])
def test_only_what_was_declared_passes(
    actual: str, declared: str, heavy_tails: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 256, generator=generator)
    if heavy_tails:
        x = x * torch.exp(torch.randn(96, 256, generator=generator))
    finding = judge(quantise_as(actual, x.to(dtype)), DECLARED[declared], -1)
    expected = Status.ENGAGED if actual == declared else Status.MISMATCH
    assert finding.status is expected, finding
    if actual == declared:
        assert finding.quantised == (actual != "bf16")


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_blocks_are_judged_along_their_own_axis(axis: int) -> None:
    x = torch.randn(64, 96, 128, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    assert judge(quantise_as("mxfp4", x, axis), MXFP4, axis).status is Status.ENGAGED
    other = (axis + 1) % 3
    assert judge(quantise_as("mxfp4", x, other), MXFP4, axis).status is Status.MISMATCH


def test_a_mismatch_states_how_many_elements_are_off() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    q = quantise_as("mxfp8", x)
    q[3, 5] = 1.0078125 * q.abs().max()
    finding = judge(q, MXFP8, -1)
    assert finding.status is Status.MISMATCH
    assert finding.reason.endswith("of 2048 elements are not on the grid of mxfp8_e4m3")


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_zeros_prove_nothing(declared: QuantSpec) -> None:
    finding = judge(torch.zeros(64, 64, dtype=torch.bfloat16), declared, -1)
    assert (finding.status, finding.reason) == (Status.INCONCLUSIVE, "all zero")
    assert judge(torch.zeros(0, 64), declared, -1).status is Status.INCONCLUSIVE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_prove_nothing(value: float) -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    x[0, 0] = value
    assert judge(x, MXFP8, -1).reason == "not finite"


def test_a_one_hot_matrix_is_on_the_grid_anyway() -> None:
    x = torch.eye(128, dtype=torch.bfloat16)
    assert judge(x, MXFP8, -1).reason == "on the grid anyway"
    assert judge(x, BF16, -1).status is Status.ENGAGED


def test_a_flat_causal_attention_is_no_quantised_tensor() -> None:
    x = torch.tril(torch.ones(128, 128)) / torch.arange(1, 129)[:, None]
    assert judge(x.to(torch.bfloat16), BF16, -1).status is Status.ENGAGED


def test_few_elements_prove_nothing() -> None:
    x = torch.randn(1, EVIDENCE - 1, generator=torch.Generator().manual_seed(3))
    q = quantise_as("mxfp8", x.to(torch.bfloat16))
    assert judge(q, MXFP8, -1).status is Status.INCONCLUSIVE
    assert judge(q, BF16, -1).status is Status.ENGAGED


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("fmt", ["mxfp8", "hifp8"])
def test_one_token_is_not_mistaken_for_blocks_of_one_element(fmt: str, axis: int) -> None:
    """An expert with one token: across it every element is its own block, on any grid with its own scales."""
    declared = DECLARED[fmt]
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        row = torch.randn(1, 192, generator=generator).bfloat16()
        assert judge(quantise_as(fmt, row, axis), declared, axis).status is not Status.MISMATCH, (
            seed
        )
    assert judge(row, declared, -1).status is Status.MISMATCH, "still held against its own grid"


def test_a_quantised_part_of_a_large_tensor_does_not_hide_the_rest() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(4), dtype=torch.bfloat16)
    q = quantise_as("mxfp8", x)
    q[300:340] = x[300:340]
    assert judge(q, MXFP8, -1).status is Status.MISMATCH


def test_a_transposed_operand_is_judged_without_a_copy_of_it() -> None:
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(5), dtype=torch.bfloat16)
    assert judge(quantise_as("mxfp8", w).t(), MXFP8, -2).status is Status.ENGAGED


def test_exact_scaled_hifp8_is_no_working_precision() -> None:
    x = torch.randn(96, 256, generator=torch.Generator().manual_seed(6), dtype=torch.bfloat16)
    for target in (15.0, 224.0):
        q = quantise(x, "hifp8", scaling="exact", amax_target=target)
        assert judge(q, BF16, -1).status is Status.MISMATCH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("share", [1.0, 0.77])
def test_an_8_bit_float_with_one_float_scale_is_no_working_precision(
    fmt: torch.dtype, dtype: torch.dtype, share: float
) -> None:
    """Whether the scale maps amax to the largest value, or is any other."""
    x = torch.randn(96, 256, generator=torch.Generator().manual_seed(7))
    scale = share * torch.finfo(fmt).max / x.abs().max()
    q = ((x * scale).to(fmt).float() / scale).to(dtype)
    finding = judge(q, BF16, -1)
    assert finding.status is Status.MISMATCH
    if share != 1.0:
        assert "distinct significands, as a scaled 8-bit float has" in finding.reason
    elif fmt is torch.float8_e4m3fn:
        assert "it lies on the grid of fp8_e4m3" in finding.reason


def test_small_fp16_gradients_are_no_quantised_tensor() -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(8))
    for size in (2e-5, 2e-6, 2e-7):
        finding = judge((x * size).half(), BF16, -1)
        assert not finding.quantised
        assert finding.status is not Status.MISMATCH


def test_flat_attention_of_a_short_sequence_is_no_quantised_tensor() -> None:
    for T in (4, 8, 16, 32):
        P = torch.tril(torch.ones(T, T)) / torch.arange(1, T + 1)[:, None]
        assert judge(P.to(torch.bfloat16).expand(64, T, T), BF16, -1).status is Status.ENGAGED


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_quantised_part_is_detected_at_true_width(axis: int) -> None:
    x = torch.randn(256, 2048, generator=torch.Generator().manual_seed(9), dtype=torch.bfloat16)
    x[32:] = quantise_as("mxfp4", x[32:], axis)
    assert judge(x, BF16, axis).status is Status.MISMATCH


def test_one_odd_element_does_not_clear_a_tensor() -> None:
    x = torch.randn(256, 2048, generator=torch.Generator().manual_seed(10), dtype=torch.bfloat16)
    q = quantise_as("mxfp4", x)
    q[0, 0] = 1.0078125
    assert judge(q, BF16, -1).status is Status.MISMATCH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("actual", [*DECLARED, "mxfp8_e5m2", "fp8_e5m2"])
def test_counting_significands_only_saves_work(
    actual: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of few bits, subnormals of the dtype, and values that also lie on another grid than the declared one."""
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    many = grids._are_too_many_everywhere
    for scaled in (x, (4 * x).round() / 4, x * torch.finfo(dtype).smallest_normal):
        operand = quantise_as(actual, scaled.to(dtype))
        findings = []
        for too_many in (many, lambda *_: False):
            monkeypatch.setattr(grids, "_are_too_many_everywhere", too_many)
            findings.append(judge(operand, BF16, -1))
        assert findings[0] == findings[1]


def test_elements_of_one_significand_are_one_accident() -> None:
    """hifp8 scaled exactly for this amax is coarser than e2m3 only at 1.875 2^k, which lies on it by accident."""
    generator = torch.Generator().manual_seed(0)
    x = 8e-5 * torch.randn(32, 64, generator=generator)
    x[0, 0] = 1.75 * 2.0**-12
    x[5, :32] = 0
    x[5, 3] = (
        1.625 * 2.0**-19
    )  # on that grid, too: the elements are not all equal up to powers of two
    operand = quantise(x.to(torch.bfloat16), "mxfp6_e2m3", axis=-1, scale_rule="floor")
    finding = judge(operand, resolve("mxfp6_e2m3", scale_rule=ScaleRule.FLOOR), -1)
    assert finding.status is Status.ENGAGED, finding


def test_equal_elements_are_one_accident() -> None:
    """Attention gives one row to all tokens that see one token alone.

    hifp8 with this scale has four significant bits from 2^-10 to 2^-3, as e4m3, and three in the binade above.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.exp2(-9 + 5.9 * torch.rand(32, 64, generator=generator))
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    x[:, 0], x[:, 1], x[0, 2], x[5, 3] = 0.15625, -0.15625, 0.125, 0.125
    largest = torch.full((1, 64), 0.5)
    operand = quantise(torch.cat([x, largest]).half(), "mxfp8_e4m3", axis=-1)
    finding = judge(operand, MXFP8, -1)
    assert finding.status is Status.ENGAGED, finding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("declared", [name for name in DECLARED if name != "bf16"])
def test_rows_that_are_mostly_zero_do_not_look_like_another_format(
    declared: str, dtype: torch.dtype
) -> None:
    """The gradient of an embedding: an element alone in a block of nvfp4 across the rows is its own scale."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.zeros(384, 128)
        rows = torch.arange(seed, 384, 16)
        x[rows] = torch.randn(len(rows), 128, generator=generator)
        finding = judge(quantise_as(declared, x.to(dtype)), DECLARED[declared], -1)
        assert finding.status is Status.ENGAGED, finding
