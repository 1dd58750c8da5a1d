"""Options, shapes and models that a backend with Transformer Engine's linear layers refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.scheme.checking import check_backend
from quantexp.schema import Experiment

Make = Callable[..., Experiment]
NATIVE = "quant.backend=transformer_engine"
DELAYED = "quant=more/te_fp8_delayed"
RECIPE = "DelayedScaling(HYBRID, history 1024)"
BLOCKWISE = "Float8BlockScaling(E4M3, w 128 x 128, powers of two)"
#: Tensor parallelism, with sequence parallelism, of ranks with other blocks than one process.
IN_HALVES = ("parallel.tensor=2", "launcher.num_processes=2", "parallel.unaligned=accept")

REFUSED: dict[tuple[str, ...], str] = {
    (
        "quant=bf16",
        NATIVE,
        "model.qkv_bias=true",
    ): f"{NATIVE} has no model.qkv_bias: Transformer Engine adds the bias "
    "inside its product, where neither proof nor captures see it apart; take quant.backend=emulated",
    (
        "quant=linear_mxfp8",
        NATIVE,
        "training.seq_length=40",
    ): f"{NATIVE}: layer 0 qkv has 80 tokens, and "
    "MXFP8BlockScaling(E4M3) takes multiples of 32; keep it in bf16 by a rule",
    (
        "quant=linear_mxfp8",
        NATIVE,
        "model.ffn_hidden_size=208",
    ): f"{NATIVE}: layer 0 fc2 has 208 columns of x, and "
    "MXFP8BlockScaling(E4M3) takes multiples of 32; keep it in bf16 by a rule",
    (
        "quant=more/te_nvfp4",
        "model.ffn_hidden_size=200",
    ): f"{NATIVE}: layer 0 fc2 has 200 columns of x, and "
    "NVFP4BlockScaling(w 16 x 16, random Hadamard in wgrad, g stochastic) takes multiples of 16; keep it in bf16 by a "
    "rule",
    (
        "quant=more/te_nvfp4",
        "training.precision=fp32",
    ): f"{NATIVE}: NVFP4BlockScaling(w 16 x 16, random Hadamard in "
    "wgrad, g stochastic) transforms bfloat16 alone, got training.precision=fp32; take bf16",
    (
        "quant=more/te_fp8_blockwise",
        *IN_HALVES,
    ): f"{NATIVE}: layer 0 qkv has 64 tokens on a rank, and {BLOCKWISE} gathers multiples of 128 under sequence "
    "parallelism, which parallel.sequence=false turns off; keep it in bf16 by a rule",
    (
        "quant=more/te_fp8_blockwise",
        *IN_HALVES,
        "training.seq_length=128",
        "model.hidden_size=144",
    ): f"{NATIVE}: layer 0 qkv has 144 columns of x on a rank, and {BLOCKWISE} gathers multiples of 128 under "
    "sequence parallelism, which parallel.sequence=false turns off; keep it in bf16 by a rule",
    (
        "quant=linear_mxfp8",
        "quant.recipe=delayed",
    ): "quant.recipe=delayed is for quant.backend=transformer_engine, got emulated; drop it",
    (
        "quant=linear_mxfp8",
        NATIVE,
        "quant.recipe=delayed",
    ): "quant.recipe=delayed scales slots with scaling=delayed, and "
    "none has it; set quant.linear.scaling=delayed, or drop it",
    (
        DELAYED,
        "training.recompute=full",
    ): f"{NATIVE}: {RECIPE} would scale a recomputed forward pass otherwise, got "
    "training.recompute=full; take none or selective",
    (
        DELAYED,
        "model.num_layers=4",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "launcher.num_processes=2",
    ): f"{NATIVE}: {RECIPE} would update its scales after each chunk of a stage, got "
    "parallel.virtual_pipeline=2; take 1",
    (
        DELAYED,
        "evaluation.every=1",
    ): f"{NATIVE}: {RECIPE} would take the amaxes of an evaluation into its history, got "
    "evaluation.every; leave it out",
    (
        DELAYED,
        "checkpoint.at_end=true",
        "checkpoint.optimizer=true",
    ): f"{NATIVE}: {RECIPE} keeps its history in "
    "Transformer Engine, and no checkpoint has it, got checkpoint.optimizer=true; set it to false",
    (
        DELAYED,
        "quant.rules=[{layers: [0], sites: [linear], window: 8}]",
    ): f"{NATIVE}: delayed scaling updates all scales "
    "at the end of a forward pass, and no module may have another recipe, got DelayedScaling(HYBRID, history 1024) and "
    "DelayedScaling(HYBRID, history 8)",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_a_backend_cannot_run_is_refused_in_one_line(
    tiny: Make, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(*words)
    assert str(caught.value) == REFUSED[words]


def test_a_module_of_another_shape_runs_in_bf16_by_a_rule(tiny: Make) -> None:
    rule = "quant.rules=[{modules: [fc*], format: bf16}]"
    tiny("quant=linear_mxfp8", NATIVE, "model.ffn_hidden_size=200", rule)


def test_blocks_of_128_that_are_not_gathered_may_be_short(tiny: Make) -> None:
    tiny("quant=more/te_fp8_blockwise", *IN_HALVES, "parallel.sequence=false")


def test_routed_experts_are_refused_and_run_in_bf16(
    tiny: Make, tiny_models: dict[str, list[str]]
) -> None:
    words = [*tiny_models["qwen3_moe"], "quant=linear_mxfp8", NATIVE]
    message = (
        f"{NATIVE}: layer 1 expert0-fc1 has any number of tokens, and Transformer Engine's kernels take multiples; "
        "keep routed experts in bf16: quant.rules=[{modules: [expert*], format: bf16}]"
    )
    with pytest.raises(ConfigError) as caught:
        tiny(*words)
    assert str(caught.value) == message
    tiny(*words, "quant.rules=[{modules: [expert*], format: bf16}]")


def test_a_clipped_derivative_is_refused_of_own_formats(tiny: Make) -> None:
    clipped = "quant.linear.fprop.x.clip_gradient=true"
    with pytest.raises(ConfigError) as caught:
        tiny("quant=linear_mxfp4", "quant.backend=te_emulated", clipped)
    assert str(caught.value) == (
        "quant.backend=te_emulated: layer 0 qkv linear.fprop.x has clip_gradient, which needs x where Transformer "
        "Engine multiplies g and w alone; remove it, or take quant.backend=emulated"
    )


def test_an_estimated_derivative_is_refused_of_own_formats(tiny: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny("quant=linear_mxfp4", "quant.backend=te_emulated", "quant.linear.fprop.w.dge=5")
    assert str(caught.value) == (
        "quant.backend=te_emulated: layer 0 qkv linear.fprop.w has dge, which multiplies a weight's gradient, and "
        "Transformer Engine adds it up by itself; remove it, or take quant.backend=emulated"
    )


def test_a_comparison_of_gradients_is_refused(tiny: Make) -> None:
    experiment = tiny("quant=linear_mxfp8", NATIVE)
    experiment.gradient.only = True
    with pytest.raises(ConfigError, match="has no comparison of gradients, which turns single"):
        check_backend(experiment)
