"""The order in which a message looks for the first gradient that is not finite, and what is left out with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from quantexp.schema import Experiment
from quantexp.training.megatron.cpu import cpu_device
from quantexp.training.megatron.finite import gradients, step_if_finite
from quantexp.training.megatron.model import build_model
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import stock_spec


def test_gradients_come_in_the_order_of_the_backward_pass(
    tiny: Callable[..., Experiment], tiny_models: dict[str, list[str]]
) -> None:
    experiment = tiny(*tiny_models["deepseek2_lite"], "model.mla.q_lora_rank=24")
    with session(experiment.training):
        spec = stock_spec(experiment.model)
        gpt, _ = build_model(experiment.model, experiment.training, spec)
        named = dict(gpt.named_parameters())
        fake = SimpleNamespace(
            named_parameters=lambda: [(n, SimpleNamespace(main_grad=p)) for n, p in named.items()]
        )
        order = [name for name, _ in gradients(fake)]
    assert sorted(order) == sorted(named)
    assert order[:2] == ["output_layer.weight", "decoder.final_layernorm.weight"]
    assert order[-1] == "embedding.word_embeddings.weight"
    of_layer_0 = [name.split(".")[-2] for name in order if name.startswith("decoder.layers.0.")]
    assert of_layer_0 == [
        *("linear_fc2", "linear_fc1", "pre_mlp_layernorm", "linear_proj", "linear_kv_up_proj"),
        *("kv_layernorm", "linear_kv_down_proj", "linear_q_up_proj", "q_layernorm"),
        *("linear_q_down_proj", "input_layernorm"),
    ]


class _Fp16Optimizer:
    """As Megatron's: its own loss scale follows its own gradients."""

    def __init__(self, overflows: bool) -> None:
        self.overflows = overflows
        self.grad_scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 3, 1)

    def prepare_grads(self) -> bool:
        self.grad_scaler.update(self.overflows)
        return self.overflows


def test_gradients_of_experts_that_overflow_lower_the_scale_of_all_gradients() -> None:
    """The loss is scaled by that of the first optimizer, the gradients unscaled by their own."""
    with cpu_device():
        optimizers = [_Fp16Optimizer(False), _Fp16Optimizer(True), _Fp16Optimizer(False)]
        chain = SimpleNamespace(
            chained_optimizers=optimizers,
            prepare_grads=lambda: bool(sum(each.prepare_grads() for each in optimizers)),
        )
        assert step_if_finite(chain, 1.0) == (False, math.inf)
    states = [each.grad_scaler.state_dict() for each in optimizers]
    assert [float(state["scale"]) for state in states] == [512.0] * 3
    assert {state["growth_tracker"] for state in states} == {0}
    assert {state["hysteresis_tracker"] for state in states} == {0}
