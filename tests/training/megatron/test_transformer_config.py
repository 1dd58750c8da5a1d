"""Megatron's own settings of quantisation are refused, not ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quantexp.errors import ConfigError
from quantexp.schema import Experiment
from quantexp.training.megatron.transformer_config import (
    refuse_own_quantisation,
    transformer_config,
)


def test_quantexps_own_configuration_is_neutral(tiny: Any) -> None:
    experiment: Experiment = tiny()
    refuse_own_quantisation(transformer_config(experiment.model, experiment.training))


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        (
            "fp8",
            "hybrid",
            "quantises beside the scheme, or without Transformer Engine nothing at all",
        ),
        (
            "fp4",
            "e2m1",
            "quantises beside the scheme, or without Transformer Engine nothing at all",
        ),
        ("fp8_param", True, "leaves no weights in high precision to quantise"),
        ("fp4_param", True, "leaves no weights in high precision to quantise"),
        ("fp8_wgrad", False, "has no effect in Transformer Engine 2"),
        ("quant_recipe", "file.yaml", "gives modules recipes beside the scheme"),
        ("use_kitchen", True, "takes linear layers that the scheme does not reach"),
        ("fp8_output_proj", True, "quantises beside the scheme, or"),
        ("mla_down_proj_fusion", True, "multiplies past the scheme's layers"),
        ("use_transformer_engine_op_fuser", True, "multiplies past the scheme's layers"),
        ("use_grouped_gemm_for_dense_mlp", True, "multiplies past the scheme's layers"),
        ("use_grouped_gemm_for_shared_expert", True, "multiplies past the scheme's layers"),
        ("moe_grouped_gemm", True, "multiplies past the scheme's layers"),
        ("delay_wgrad_compute", True, "multiplies past the scheme's layers"),
        ("overlap_dispatch_backward_with_experts_wgrad", True, "multiplies past the scheme's"),
        ("flash_attention_version", 3, "chooses a kernel, and attention is the scheme's"),
        ("fused_residual_rmsnorm", True, "rounds the residual stream inside a norm"),
        ("mtp_num_layers", 1, "builds layers that the scheme's spec does not describe"),
        ("gtp_weight_remat_size", 2, "gathers weights for each product, which the scheme's layers"),
        ("expert_gtp_weight_remat_size", 2, "gathers weights for each product"),
        ("tensor_parallel_num_weight_shards", 2, "gathers weights for each product"),
        ("expert_tensor_parallel_num_weight_shards", 2, "gathers weights for each product"),
        ("use_mup", True, "scales weights, logits and rates in a way that no run records"),
        ("moe_expert_rank_capacity_factor", 1.5, "drops tokens of experts, which no run records"),
        ("moe_expert_capacity_factor", 1.5, "drops tokens of experts, which no run records"),
        ("moe_paged_stash", True, "keeps the inputs of experts in memory that no product of"),
        ("cuda_graph_impl", "local", "replays products that no proof and no capture sees"),
        ("gradient_accumulation_fusion", True, "computes the weight gradient past the scheme, and"),
    ],
)
def test_a_setting_that_would_bypass_the_scheme_is_refused(
    tiny: Any, name: str, value: object, effect: str
) -> None:
    experiment: Experiment = tiny()
    config = vars(transformer_config(experiment.model, experiment.training))
    with pytest.raises(ConfigError) as caught:
        refuse_own_quantisation(SimpleNamespace(**{**config, name: value}))
    assert f"TransformerConfig.{name} {effect}" in str(caught.value)
    assert f"got {value!r}; leave it at" in str(caught.value)
