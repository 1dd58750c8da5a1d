"""Refusals of decode. Its results are tested with the codes and with encode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantexp.formats import decode, encode


def mx_encode(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = encode(x, "mxfp8", **options)
    assert isinstance(scales, torch.Tensor)
    return codes, scales


CODES, SCALES = mx_encode(torch.ones(2, 40))


def test_other_dtypes_round_to_nearest_even() -> None:
    codes, scales = mx_encode(torch.full((1,), 2.0**-9 * 448), scale_rule="rceil")
    tiny = scales - 127 + 9  # 448 * 2^(s - 127) lies among the subnormals of bfloat16
    exact = decode(codes, tiny, "mxfp8")
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(decode(codes, tiny, "mxfp8", dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((CODES.tolist(), SCALES, "mxfp8"), "codes must be a torch.Tensor, got a list"),
        ((CODES.to_sparse(), SCALES, "mxfp8"), "codes must be a dense tensor, got a sparse one"),
        ((CODES, SCALES.to("meta"), "mxfp8"), "scales must be a dense tensor, got a meta one"),
        ((CODES.int(), SCALES, "mxfp8"), r"codes must be uint8, got torch\.int32"),
        (
            (CODES, SCALES.int(), "mxfp8"),
            r"scales must be torch\.uint8 of shape \(2, 2\), got torch\.int32",
        ),
        (
            (CODES, SCALES, "hifp8"),
            r"scales must be torch\.float32 of shape \(\), got torch\.uint8",
        ),
        (
            (CODES & 0xF, SCALES, "nvfp4"),
            "scales of nvfp4_e2m1 must be a pair, block scales and the tensor's scale, got Tensor",
        ),
        (
            (CODES, (SCALES, torch.ones(())), "mxfp8"),
            r"scales must be torch\.uint8 of shape \(2, 2\), got a tuple",
        ),
        (
            (CODES, (SCALES, torch.ones(())), "fp8_e4m3"),
            r"scales must be torch\.float32 of shape \(\), got a tuple",
        ),
    ],
)
def test_codes_and_scales_of_another_type_are_refused(
    arguments: tuple[Any, ...],
    words: str,
) -> None:
    with pytest.raises(TypeError, match=words):
        decode(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (CODES, SCALES[:, :1], "mxfp8"),
            r"scales must be torch\.uint8 of shape \(2, 2\), got .* \(2, 1\)",
        ),
        ((CODES, SCALES, "mxfp4"), "mxfp4_e2m1 has codes of 4 bits, got 0x78"),
        ((CODES, SCALES, "bf16"), "bf16 has no 8-bit code"),
        ((CODES, SCALES, "fp8"), "unknown number format 'fp8'"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(
    arguments: tuple[Any, ...],
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        decode(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis": 2}, r"axis must lie in \[-2, 1\], got 2"),
        ({"block": 3}, "block must be a power of two of at least 1, got 3"),
        ({"block": 64}, r"scales must be torch\.uint8 of shape \(2, 1\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(CODES, SCALES, "mxfp8", **options)


def test_another_dtype_of_the_values_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"cannot decode to torch\.float64: must be one of torch\.bfloat16"
    ):
        decode(CODES, SCALES, "mxfp8", dtype=torch.float64)


def test_a_scale_that_would_lose_its_gradient_is_refused() -> None:
    codes, scale = encode(torch.ones(3), "hifp8", scaling="current")
    assert isinstance(scale, torch.Tensor)
    with pytest.raises(RuntimeError, match=r"scales requires a gradient.*pass scales\.detach"):
        decode(codes, scale.requires_grad_(), "hifp8")
