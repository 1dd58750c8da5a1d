"""Our formats inside Transformer Engine's linear layers against the three products written out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import quantise
from quantexp.formats.spec import QuantSpec
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import DGRAD_G, DGRAD_W, FPROP_W, FPROP_X, WGRAD_G, WGRAD_X, Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import LinearFprop, LinearSite
from quantexp.schema import Slot as SlotConfig
from tests.extras.transformer_engine.rank.child import H100, Child

#: Tokens, sequences, input and output width; tokens leave a short last block.
T, B, I, O = 40, 2, 96, 64  # noqa: E741


def site(name: str) -> LinearSite:
    if name == "one slot in bf16":
        return LinearSite(format="mxfp8", fprop=LinearFprop(x=SlotConfig(format="bf16")))
    if name == "mxfp4 of forward":
        return LinearSite(format="mxfp4", of="forward")
    return LinearSite(format=name)


def precision_of(name: str) -> ModulePrecision:
    return ModulePrecision(ModuleId(0, "fc1"), resolve_site(Site.LINEAR, site(name)))


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(  # type: ignore[return-value]
        torch.randn(*shape, generator=generator).to(torch.bfloat16)
        for shape in ((T, B, I), (O, I), (T, B, O))
    )


def layer(precision: ModulePrecision, **options: Any) -> Any:
    """Transformer Engine's linear layer with the recipe of its slots."""
    import transformer_engine.pytorch as te

    from quantexp.extras.transformer_engine.rank.own_formats import scheme_recipe

    chosen = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"} | options
    module = te.Linear(I, O, **chosen)
    module.precision = precision
    return module, scheme_recipe(module)


def results_of(name: str, keeps_weight: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    import transformer_engine.pytorch as te

    x, w, g = tensors()
    module, recipe = layer(precision_of(name))
    x.requires_grad_()
    options = {"is_first_microbatch": True} if keeps_weight else {}
    if keeps_weight:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            module(x, **options)
        options = {"is_first_microbatch": False}
    with torch.no_grad():
        module.weight.copy_(w)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = module(x, **options)
    y.backward(g)
    assert x.grad is not None
    return y.detach(), x.grad, module.weight.grad


def written_out(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """y = x w^T, dx = g w, dw = g^T x, each operand quantised along the axis that is summed."""
    x, w, g = tensors()
    specs = precision_of(name).slots

    def q(operand: Tensor, spec: QuantSpec, axis: int) -> Tensor:
        if spec.of is not None:  # along the input width, the last axis of x and w
            operand = quantise(operand, spec.of, axis=-1)
        return quantise(operand, spec, axis=axis) if spec.quantised else operand

    y = q(x, specs[FPROP_X], -1) @ q(w, specs[FPROP_W], -1).t()
    dx = q(g, specs[DGRAD_G], -1) @ q(w, specs[DGRAD_W], 0)
    g_tokens, x_tokens = q(g, specs[WGRAD_G], 0), q(x, specs[WGRAD_X], 0)
    return y, dx, g_tokens.reshape(-1, O).t() @ x_tokens.reshape(-1, I)


@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp4", "hifp8", "nvfp4", "one slot in bf16", "mxfp4 of forward"]
)
def test_a_layers_output_and_gradients_are_those_of_the_scheme_to_the_bit(
    each_te: Child, name: str
) -> None:
    results = each_te.run(results_of, name, capability=H100)
    for result, expected in zip(results, written_out(name), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.slow
def test_a_later_version_takes_the_same_quantizers(later_te: Child) -> None:
    name = "one slot in bf16"
    for result, expected in zip(later_te.run(results_of, name), written_out(name), strict=True):
        assert torch.equal(result, expected)


def test_a_weight_that_is_kept_over_micro_batches_is_not_stale(te: Child) -> None:
    results = te.run(results_of, "mxfp4", True)
    for result, expected in zip(results, written_out("mxfp4"), strict=True):
        assert torch.equal(result, expected)


def refusal(reason: str) -> str:
    from quantexp.errors import ConfigError
    from quantexp.extras.transformer_engine.rank.own_formats import scheme_recipe

    precision = precision_of("mxfp8")
    if reason == "clip":
        slots = resolve_site(Site.LINEAR, LinearSite(format="mxfp4", clip_gradient=True))
        precision = ModulePrecision(precision.module, slots)
    options = {"bias": reason == "bias"}
    try:
        module, _ = layer(precision, **options)
        module.fuse_wgrad_accumulation = reason == "fusion"
        scheme_recipe(module)
    except ConfigError as error:
        return str(error)
    return "no refusal"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "fusion",
            "drops the weight gradients of custom formats, got gradient_accumulation_fusion=True",
        ),
        ("bias", "must not add a bias, whose gradient .*; take quant.backend=emulated"),
        ("clip", "must not have clip_gradient, which needs x .*; remove it"),
    ],
)
def test_what_would_lose_a_gradient_is_refused(te: Child, reason: str, words: str) -> None:
    message = te.run(refusal, reason)
    assert message.startswith("quant.backend=te_emulated: layer 0 fc1 must not ")
    assert re.search(words, message)
