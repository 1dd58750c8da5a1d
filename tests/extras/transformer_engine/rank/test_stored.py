"""Operands read from Transformer Engine's own classes, against our formats and against its reference quantizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.extras.transformer_engine.proof.conformity import Comparison, compare
from quantexp.extras.transformer_engine.proof.stored import read, unswizzled
from quantexp.formats import resolve
from tests.extras.transformer_engine.rank.child import Child

SPECS = {
    "MXFP8BlockScaling": resolve("mxfp8_e4m3", scale_rule="rceil"),
    "Float8CurrentScaling": resolve("fp8_e4m3", scaling="exact"),
    "Float8BlockScaling": resolve("mxfp8_e4m3", block=128, scale_rule="rceil"),
    "NVFP4BlockScaling": resolve("nvfp4"),
}


def source(rows: int = 160, columns: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp(2 * torch.randn(rows, 1, generator=generator))).to(torch.bfloat16)


def stored(recipe: str, x: Tensor, optimized: bool) -> Any:
    """x as the first quantizer of a recipe makes it, with our kernels."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import RecipeState

    from tests.extras.transformer_engine.rank import kernels

    kernels.install()
    by_recipe: dict[str, dict[str, Any]] = {
        "Float8BlockScaling": {"w_block_scaling_dim": 1},
        "NVFP4BlockScaling": dict.fromkeys(
            ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), True
        ),
        "Float8CurrentScaling": {"fp8_format": recipes.Format.E4M3},
    }
    options = by_recipe.get(recipe, {})
    state = RecipeState.create(
        getattr(recipes, recipe)(**options),
        mode="forward",
        num_quantizers=3,
        device=torch.device("cpu"),
    )
    quantizer = state.make_quantizers()[0]
    quantizer.optimize_for_gemm = optimized
    return quantizer(x)


def comparisons(recipe: str, optimized: bool) -> list[Comparison]:
    x = source()
    held = stored(recipe, x, optimized)
    copies = [read(held, axis) for axis in (-1, 0)]
    return [compare(copy, SPECS[recipe], x) for copy in copies if copy is not None]


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("recipe", SPECS)
def test_both_copies_are_read_from_their_padded_and_swizzled_layouts(
    each_te: Child, recipe: str, optimized: bool
) -> None:
    for comparison in each_te.run(comparisons, recipe, optimized):
        assert comparison.conforms, str(comparison)
        assert comparison.elements == 160 * 96


def faults(recipe: str) -> list[bool]:
    """Whether each of several wrong tensors conforms: another source, scale, code, and another axis."""
    x = source()
    spec = SPECS[recipe]

    def conforms(change: Any, of: Tensor = x) -> bool:
        copy = read(stored(recipe, of, False), -1)
        assert copy is not None
        change(copy)
        return compare(copy, spec, x).conforms

    def nothing(copy: Any) -> None:
        pass

    def one_code(copy: Any) -> None:
        copy.codes[:1, :8] ^= 1

    def one_scale(copy: Any) -> None:
        if copy.scales.dtype is torch.uint8:
            copy.scales[:, 0] += 1
        else:
            copy.scales.mul_(2)

    return [
        conforms(nothing),
        conforms(nothing, torch.roll(x, 1, 0)),
        conforms(one_code),
        conforms(one_scale),
    ]


@pytest.mark.parametrize("recipe", SPECS)
def test_another_source_code_or_scale_does_not_conform(te: Child, recipe: str) -> None:
    assert te.run(faults, recipe) == [True, False, False, False]


def reference_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, E4M3 scales and the amax of Transformer Engine's reference quantizer, along rows."""
    from transformer_engine.pytorch.custom_recipes import utils
    from transformer_engine.pytorch.custom_recipes.quantization_nvfp4 import NVFP4QuantizerRef

    quantizer = NVFP4QuantizerRef(dtype=utils.Fp4Formats.E2M1, quant_tile_shape=(1, 16))
    codes, scales, _, _, amax, _ = quantizer._quantize(x)
    return codes, scales.view(torch.uint8), amax


def of_reference(x: Tensor) -> Comparison:
    """How NVFP4 by the reference differs from ours, read as a stored tensor."""
    from types import SimpleNamespace

    codes, scales, amax = reference_nvfp4(x)
    held = type("NVFP4TensorStorage", (SimpleNamespace,), {})(
        _rowwise_data=codes, _rowwise_scale_inv=scales, _amax_rowwise=amax
    )
    copy = read(held, -1)
    assert copy is not None
    return compare(copy, SPECS["NVFP4BlockScaling"], x)


def test_transformer_engines_reference_of_nvfp4_conforms_up_to_the_stated_share(
    each_te: Child,
) -> None:
    comparison = each_te.run(of_reference, source(512, 512))
    assert comparison.conforms, str(comparison)
    assert set(comparison.expected) <= {"NVFP4"}


def reference_current(x: Tensor, element: str) -> tuple[Tensor, Tensor]:
    from transformer_engine.pytorch.custom_recipes.quantization_current_scaling import (
        CurrentScalingQuantizerRef,
    )

    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
    codes, scale_inv, _, _ = CurrentScalingQuantizerRef(dtype)._quantize(x)
    return codes.view(torch.uint8), scale_inv


def current_differs(x: Tensor, element: str) -> Comparison:
    from types import SimpleNamespace

    codes, scale_inv = reference_current(x, element)
    held = type("Float8TensorStorage", (SimpleNamespace,), {})(
        _data=codes,
        _transpose=None,
        _transpose_invalid=True,
        _scale_inv=scale_inv,
        _fp8_dtype=f"DType.kFloat8{element.upper()}",
    )
    copy = read(held, -1)
    assert copy is not None
    return compare(copy, resolve(f"fp8_{element}", scaling="exact"), x)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_transformer_engines_reference_of_current_scaling_conforms_to_the_bit(
    each_te: Child, element: str
) -> None:
    comparison = each_te.run(current_differs, source(256, 256), element)
    assert comparison.conforms, str(comparison)
    assert not comparison.expected


def recovered(scales: Tensor, rows: int, columns: int) -> Tensor:
    from transformer_engine.pytorch.custom_recipes.quantization_nvfp4 import NVFP4QuantizerRef

    result: Tensor = NVFP4QuantizerRef._recover_swizzled_scales(
        True, scales, rows, columns * 16, 16
    )
    return result


def test_swizzled_scales_are_read_as_transformer_engines_reference_reads_them(te: Child) -> None:
    scales = torch.randperm(256 * 12).reshape(256, 12)
    ours = unswizzled(scales, 160, 9)[:160, :9]
    assert torch.equal(ours, te.run(recovered, scales, 160, 9))
