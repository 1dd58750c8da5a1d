"""The proof of engagement on Transformer Engine's own linear layers, whose kernels are replaced by our formats'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quantexp.proof.verdict import Observed, Verdict, verdict
from quantexp.proof.watch import ProductWatch
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import LinearFprop, LinearSite
from quantexp.schema import Slot as SlotConfig
from tests.extras.transformer_engine.rank.child import B200, H100, Child

NAME = ModuleId(0, "fc1")
SITES = {
    "MXFP8BlockScaling": LinearSite(format="mxfp8"),
    "Float8CurrentScaling": LinearSite(format="fp8_e4m3", scaling="exact"),
    "NVFP4BlockScaling": LinearSite(format="nvfp4"),
}


def declared(recipe: str) -> ModulePrecision:
    return ModulePrecision(NAME, resolve_site(Site.LINEAR, SITES[recipe]))


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe as recipes

    off = dict.fromkeys(
        ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), True
    )
    options = {
        "Float8CurrentScaling": {"fp8_format": recipes.Format.E4M3},
        "NVFP4BlockScaling": off,
    }.get(name, {})
    return getattr(recipes, name)(**options)


@contextmanager
def multiplying_originals() -> Iterator[None]:
    """Layers quantise their operands, and multiply what they quantised."""
    import transformer_engine_torch as native
    from transformer_engine.pytorch.module import linear

    quantise, multiply = native.quantize, linear.general_gemm
    originals: dict[int, tuple[Any, Any]] = {}

    def quantize(x: Any, *args: Any) -> Any:
        result = quantise(x, *args)
        originals[id(result)] = x, result
        return result

    def general_gemm(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        a, b = (originals.get(id(each), (each,))[0] for each in (a, b))
        return multiply(a, b, *rest, **options)

    native.quantize, linear.general_gemm = quantize, general_gemm
    try:
        yield
    finally:
        native.quantize, linear.general_gemm = quantise, multiply


def outcome(recipe: str | None, precision: ModulePrecision, fault: str = "") -> Verdict:
    """The verdict on a layer under a recipe, or none, of which a map declares `precision`."""
    import transformer_engine.pytorch as te

    from quantexp.extras.transformer_engine.rank.gemm_watch import GemmWatch
    from tests.extras.transformer_engine.rank import kernels

    kernels.install()
    torch.manual_seed(1)
    module = te.Linear(128, 64, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(64, 1, 128).to(torch.bfloat16).requires_grad_()
    if fault == "stale":
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe_of(str(recipe))):
            module(x, is_first_microbatch=True)
        with torch.no_grad():
            module.weight.mul_(1.5)
    products = ProductWatch(Observed({NAME: precision}, {}), {}, {"layer 0": module})
    gemms = GemmWatch(products, {NAME: module})
    with multiplying_originals() if fault == "originals" else nullcontext():
        options = {"is_first_microbatch": False} if fault == "stale" else {}

        def forward(x: torch.Tensor) -> Any:
            enabled, chosen = recipe is not None, recipe_of(recipe) if recipe else None
            with te.fp8_autocast(enabled=enabled, fp8_recipe=chosen):
                return module(x, **options)

        with products.watching(), gemms.watching():
            is_recomputed = fault == "recomputed"
            y = checkpoint(forward, x, use_reentrant=True) if is_recomputed else forward(x)
            y.backward(torch.randn_like(y))
    return verdict(1, products.observed)


@pytest.mark.parametrize("recipe", SITES)
@pytest.mark.parametrize("capability", [H100, B200])
def test_every_operand_of_a_recipe_engages_byte_for_byte(
    each_te: Child, recipe: str, capability: tuple[int, int]
) -> None:
    if capability == H100 and recipe != "Float8CurrentScaling":
        return
    result = each_te.run(outcome, recipe, declared(recipe), capability=capability)
    assert result.failures == []
    assert [entry["status"] for entry in result.entries] == ["engaged"] * 6
    assert result.quantised_calls == 6


@pytest.mark.slow
def test_the_operands_of_a_later_version_are_read_too(later_te: Child) -> None:
    result = later_te.run(outcome, "MXFP8BlockScaling", declared("MXFP8BlockScaling"))
    assert result.failures == []
    assert [entry["status"] for entry in result.entries] == ["engaged"] * 6


def test_a_layer_in_bf16_multiplies_its_operands_as_they_are(each_te: Child) -> None:
    bf16 = ModulePrecision(NAME, resolve_site(Site.LINEAR, LinearSite()))
    result = each_te.run(outcome, None, bf16)
    assert result.failures == []
    assert result.quantised_calls == 0
    assert [entry["status"] for entry in result.entries] == ["engaged"] * 6


def test_a_layer_without_its_recipe_fails(te: Child) -> None:
    result = te.run(outcome, None, declared("MXFP8BlockScaling"))
    assert len(result.failures) == 6
    assert "declared mxfp8_e4m3, it reached the product in bfloat16" in result.failures[0]


def test_another_recipe_than_the_declared_one_fails(te: Child) -> None:
    result = te.run(outcome, "Float8CurrentScaling", declared("MXFP8BlockScaling"))
    assert len(result.failures) == 6
    assert (
        "declared mxfp8_e4m3, it reached the product as FP8 under one scale (e4m3) of Transformer "
        "Engine" in result.failures[0]
    )


def test_a_recipe_on_a_slot_that_is_declared_bf16_fails(te: Child) -> None:
    site = LinearSite(format="mxfp8", fprop=LinearFprop(x=SlotConfig(format="bf16")))
    precision = ModulePrecision(NAME, resolve_site(Site.LINEAR, site))
    (failure,) = te.run(outcome, "MXFP8BlockScaling", precision).failures
    assert "layer 0 fc1 linear.fprop.x: declared bf16, it reached the product as MXFP8" in failure


def test_a_layer_that_quantises_and_multiplies_the_originals_fails(te: Child) -> None:
    result = te.run(outcome, "MXFP8BlockScaling", declared("MXFP8BlockScaling"), "originals")
    assert any("it reached the product in bfloat16" in failure for failure in result.failures)


def test_a_stale_weight_fails(te: Child) -> None:
    result = te.run(outcome, "MXFP8BlockScaling", declared("MXFP8BlockScaling"), "stale")
    assert [failure.split(":")[0] for failure in result.failures] == [
        "layer 0 fc1 linear.fprop.w",
        "layer 0 fc1 linear.dgrad.w",
    ]
    assert "scales differ from those of mxfp8_e4m3 of its source" in result.failures[0]


def test_a_recomputed_forward_counts_as_such(te: Child) -> None:
    result = te.run(outcome, "MXFP8BlockScaling", declared("MXFP8BlockScaling"), "recomputed")
    assert result.failures == []
    calls = [(entry["calls"], entry["recomputed_calls"]) for entry in result.entries]
    assert calls == [(1, 1), (1, 1), (1, 0), (1, 0), (1, 0), (1, 0)]


def grouped() -> Verdict:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as native

    from quantexp.extras.transformer_engine.rank.gemm_watch import GemmWatch

    class Grouped(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            native.te_general_grouped_gemm([x])
            return x

    native.te_general_grouped_gemm = lambda *args: None
    layer, linear = Grouped(), te.Linear(32, 32, device="cpu")
    products = ProductWatch(
        Observed({NAME: declared("MXFP8BlockScaling")}, {}), {}, {"layer 0": layer}
    )
    with products.watching(), GemmWatch(products, {NAME: linear}).watching():
        layer(torch.ones(1))
    return verdict(1, products.observed)


def test_a_grouped_product_inside_the_decoder_fails(te: Child) -> None:
    assert te.run(grouped).failures[-1] == (
        "layer 0: 1 matrix products (transformer_engine_torch.te_general_grouped_gemm) that the precision map does "
        "not list"
    )
