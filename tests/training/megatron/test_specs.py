from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from quantexp.errors import RunError
from quantexp.quant.precision import precision_map
from quantexp.schema import Experiment
from quantexp.training.megatron.attention import SchemeAttention
from quantexp.training.megatron.latent import LatentSelfAttention, SchemeMLASelfAttention
from quantexp.training.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear
from quantexp.training.megatron.model import build_model, set_precision
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import CLASSES, inject, stock_layer_spec, stock_spec


def submodules(spec: Any) -> Any:
    """Those of a module's spec, or of its builder."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def test_every_linear_layer_and_the_core_attention_are_replaced() -> None:
    layer = inject(stock_layer_spec()).submodules
    attention, mlp = layer.self_attention.submodules, submodules(layer.mlp)
    assert attention.linear_qkv is SchemeColumnParallelLinear
    assert attention.core_attention is SchemeAttention
    assert attention.linear_proj is SchemeRowParallelLinear
    assert mlp.linear_fc1 is SchemeColumnParallelLinear
    assert mlp.linear_fc2 is SchemeRowParallelLinear


def test_the_original_spec_is_unchanged() -> None:
    spec = stock_layer_spec()
    inject(spec)
    assert spec.submodules.self_attention.submodules.linear_qkv is ColumnParallelLinear


def test_nothing_else_is_changed() -> None:
    stock, ours = stock_layer_spec(), inject(stock_layer_spec())
    assert ours.module is stock.module
    assert ours.submodules.input_layernorm is stock.submodules.input_layernorm
    assert ours.submodules.self_attention.params == stock.submodules.self_attention.params


def test_classes_inside_dicts_and_lists_are_replaced() -> None:
    assert inject({"a": [ColumnParallelLinear], "b": (1, ColumnParallelLinear)}) == {
        "a": [SchemeColumnParallelLinear],
        "b": (1, SchemeColumnParallelLinear),
    }


class Builds(ColumnParallelLinear):  # type: ignore[misc]
    """Has a constructor besides its class."""

    @classmethod
    def somehow(cls, *args: Any, **kwargs: Any) -> Any:
        return cls, args, kwargs


class Built(Builds):
    """What takes its place."""


def test_classes_that_a_builder_makes_are_replaced() -> None:
    """Megatron-Core wraps more of a layer from release to release: arguments, constructors, builders of builders."""
    classes: dict[type, type] = {ColumnParallelLinear: SchemeColumnParallelLinear, Builds: Built}
    inner = partial(ColumnParallelLinear, 1, parts={"fc1": ColumnParallelLinear})
    ours = inject(partial(inner, other=[ColumnParallelLinear]), classes)
    assert ours.func is SchemeColumnParallelLinear
    assert ours.args == (1,)
    assert ours.keywords == {
        "parts": {"fc1": SchemeColumnParallelLinear},
        "other": [SchemeColumnParallelLinear],
    }
    by_constructor = inject(partial(Builds.somehow, fc1=ColumnParallelLinear), classes)
    assert by_constructor() == (Built, (), {"fc1": SchemeColumnParallelLinear})
    assert inject(len, classes) is len
    assert inject("".join, classes)(["a"]) == "a"


def test_a_field_may_have_replacements_of_its_own() -> None:
    spec: Any = {"mlp": partial(dict, experts=[ColumnParallelLinear], shared=ColumnParallelLinear)}
    ours = inject(spec, {ColumnParallelLinear: Built}, {"experts": CLASSES})["mlp"]()
    assert ours == {"experts": [SchemeColumnParallelLinear], "shared": Built}


@pytest.mark.parametrize("missed", [RowParallelLinear, ColumnParallelLinear])
def test_a_class_that_injection_does_not_reach_is_refused_before_the_first_pass(
    tiny: Any, missed: type
) -> None:
    experiment: Experiment = tiny()
    reached = {stock: ours for stock, ours in CLASSES.items() if stock is not missed}
    spec = inject(stock_spec(experiment.model), reached)
    with session(experiment.training):
        model, _ = build_model(experiment.model, experiment.training, spec)
        with pytest.raises(RunError) as caught:
            set_precision(model, precision_map(experiment.model, experiment.quant))
    assert str(caught.value).startswith("decoder.layers.0.self_attention.linear_")
    assert f"'s {missed.__name__}, built by a part of its spec into which" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_latent_attention_is_built_of_what_its_spec_names() -> None:
    """Not of what Megatron-Core 0.19 chooses by its backend, which is Transformer Engine unless configured."""
    stock = stock_layer_spec(latent_attention=True).submodules.self_attention
    assert stock.module is LatentSelfAttention
    assert inject(stock).module is SchemeMLASelfAttention
    built: Any = object.__new__(LatentSelfAttention)
    assert built._resolve_qk_norm_config(stock.submodules) == vars(stock.submodules)


def test_linear_layers_of_experts_are_replaced() -> None:
    spec = inject(get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm"))
    experts = submodules(submodules(submodules(spec).mlp).experts)
    assert experts.linear_fc1 is SchemeColumnParallelLinear
    assert experts.linear_fc2 is SchemeRowParallelLinear
