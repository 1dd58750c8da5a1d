"""A bias of a linear module: added after the product, hidden from the hook, and with the gradient of a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.quant.hooks import FORWARD, POST
from quantexp.quant.precision import precision_map
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.schema import Experiment
from quantexp.training.megatron.model import build_model, set_precision
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec

from .whole_models import draw

Tiny = Callable[..., Experiment]


@pytest.mark.parametrize("scheme", ["bf16", "linear_mxfp4"])
def test_a_bias_is_added_in_full_precision_after_the_captured_product(
    tiny: Tiny, tiny_models: dict[str, list[str]], scheme: str
) -> None:
    experiment = tiny(*tiny_models["qwen2"], f"quant={scheme}", "training.precision=fp32")
    model, seen = experiment.model, {}

    def hook(operation: str, phase: str, name: str, tensor: Tensor, *more: Any) -> None:
        if (operation, phase) == (FORWARD, POST):
            assert name not in seen
            seen[name] = tensor.detach().clone()

    with session(experiment.training), use_step_state(StepState(1)):
        gpt, _ = build_model(model, experiment.training, inject(stock_spec(model)))
        draw(gpt, model)
        set_precision(gpt, precision_map(model, experiment.quant))
        qkv = gpt.decoder.layers[0].self_attention.linear_qkv
        qkv.hook = hook
        bias = torch.randn(qkv.bias.shape, generator=torch.Generator().manual_seed(1))
        x = torch.randn(64, 2, model.hidden_size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            plain, _ = qkv(x)
            assert torch.equal(seen.pop("output"), plain)  # biases begin at zero
            qkv.bias.copy_(bias)
        output, _ = qkv(x)
        assert torch.equal(seen["output"], plain)
        assert torch.equal(output, plain + bias)
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        output.backward(gradient)
        torch.testing.assert_close(qkv.bias.grad, gradient.sum((0, 1)), rtol=1e-5, atol=1e-5)
