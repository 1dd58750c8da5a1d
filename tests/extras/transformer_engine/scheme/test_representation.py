"""Which recipe holds a scheme, how near, or which slot prevents it: the table of docs/backends.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.scheme.assignment import Assignment, assignments
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.extras.transformer_engine.scheme.representation import Nearness
from quantexp.quant.precision import precision_map
from quantexp.schema import Backend, Experiment, Rule
from tests.extras.transformer_engine.scheme.schemes import scheme

NATIVE = Backend.transformer_engine
EQUAL, NEAR, STATISTICAL = Nearness.BIT_EQUAL, Nearness.NEAR_EQUAL, Nearness.STATISTICAL

#: Words of a scheme -> its recipe and nearness. Written out from Transformer Engine's sources (2.11.0), not computed.
REPRESENTED: dict[str, tuple[Recipe | None, Nearness]] = {
    "bf16": (None, EQUAL),
    "FA_mxfp4": (None, EQUAL),
    "linear_mxfp8": (Recipe(Kind.MXFP8), EQUAL),
    "FA_linear_mxfp8": (Recipe(Kind.MXFP8), EQUAL),
    "more/te_mxfp8": (Recipe(Kind.MXFP8), EQUAL),
    "more/linear_mxfp8_hybrid": (Recipe(Kind.MXFP8, hybrid=True), EQUAL),
    "more/te_mxfp8_hybrid": (Recipe(Kind.MXFP8, hybrid=True), EQUAL),
    "more/linear_fp8": (Recipe(Kind.CURRENT, hybrid=True), NEAR),
    "more/te_fp8_current": (Recipe(Kind.CURRENT, hybrid=True), NEAR),
    "more/FA_linear_fp8": (Recipe(Kind.CURRENT, hybrid=True), NEAR),
    "more/linear_fp8_e4m3": (Recipe(Kind.CURRENT), NEAR),
    "more/linear_fp8 linear.scaling=current linear.dgrad.g.scaling=current linear.wgrad.g.scaling=current": (
        Recipe(Kind.CURRENT, hybrid=True, power_of_two=True),
        EQUAL,
    ),
    "linear_mxfp8 linear.block=128": (Recipe(Kind.BLOCK, power_of_two=True), EQUAL),
    "more/linear_fp8_block_pow2": (
        Recipe(Kind.BLOCK, power_of_two=True, weight_rows=128),
        EQUAL,
    ),
    "more/te_fp8_blockwise": (
        Recipe(Kind.BLOCK, power_of_two=True, weight_rows=128),
        EQUAL,
    ),
    "more/linear_fp8_block": (Recipe(Kind.BLOCK, weight_rows=128), NEAR),
    "more/linear_nvfp4": (Recipe(Kind.NVFP4), NEAR),
    "more/te_nvfp4": (
        Recipe(Kind.NVFP4, weight_rows=16, hadamard=True, stochastic=True),
        STATISTICAL,
    ),
    "more/te_fp8_delayed": (Recipe(Kind.DELAYED, hybrid=True, history=1024), STATISTICAL),
    # One scale a tensor is that of the forward copy, whatever the axis.
    "more/linear_fp8 linear.dgrad.w.format=reuse": (
        Recipe(Kind.CURRENT, hybrid=True),
        NEAR,
    ),
}
#: Words of a scheme -> the slot and why; HOLDS and ELSE are words of several messages.
HOLDS, ELSE = (
    ", which holds the module's other operands,",
    "; take quant.backend=te_emulated, or emulated",
)
E4M3 = "MXFP8BlockScaling(E4M3)"
REFUSED = {
    "linear_mxfp4": "layer 0 qkv linear.fprop.x has block 32, and NVFP4BlockScaling(w 16 x 16, no Hadamard, all to "
    "nearest) has 16",
    "linear_hifp8": "layer 0 qkv linear.fprop.x has element hif8, and no recipe of Transformer Engine has it",
    "more/linear_mxfp6": "layer 0 qkv linear.fprop.x has element e2m3, and no recipe of Transformer Engine has it",
    "more/linear_mxint8": "layer 0 qkv linear.fprop.x has element int8*2^-6, and no recipe of Transformer Engine has "
    "it",
    "more/linear_mxfp8_floor": f"layer 0 qkv linear.fprop.x has scale powers of two by floor, and {E4M3} has powers of "
    "two by rceil",
    "linear_mxfp8 linear.fprop.w.scale_rule=floor": "layer 0 qkv linear.fprop.w has scale powers of two "
    f"by floor, and {E4M3}{HOLDS} has powers of two by rceil",
    "linear_mxfp8 linear.wgrad.g.format=bf16": "layer 0 qkv linear.wgrad.g has element bf16, and "
    f"{E4M3}{HOLDS} has e4m3",
    "linear_mxfp8 linear.dgrad.w.format=reuse": "layer 0 qkv linear.dgrad.w has copy the forward "
    f"product's, and {E4M3}{HOLDS} has of its own",
    "linear_mxfp8 linear.rounding=stochastic": "layer 0 qkv linear.fprop.x has rounding stochastic, and "
    f"{E4M3} has even",
    "linear_mxfp8 'rules=[{layers: [1], modules: [fc2], operands: [g], format: mxfp4}]'": "layer 1 fc2 linear.dgrad.g "
    f"has element e2m1, and {E4M3}{HOLDS} has e4m3",
    "more/linear_fp8 linear.saturate=false": "layer 0 qkv linear.fprop.x has options saturate=false, and "
    f"Float8CurrentScaling(HYBRID, float32 scales){HOLDS} has none",
}


@pytest.fixture(scope="module")
def base(tiny_words: list[str]) -> Experiment:
    """Micro-batches of one sequence, in one process."""
    return compose([*tiny_words, "training.micro_batch_size=1"], None, {})


def under(base: Experiment, words: str, backend: Backend = NATIVE) -> Experiment:
    """The experiment with a scheme under a backend."""
    return replace(base, quant=replace(scheme(words), backend=backend))


def assigned(experiment: Experiment, iteration: int = 1) -> list[Assignment]:
    return assignments(experiment, precision_map(experiment.model, experiment.quant, iteration))


@pytest.mark.parametrize("words", REPRESENTED)
def test_a_scheme_is_held_by_its_recipe(base: Experiment, words: str) -> None:
    recipe, nearness = REPRESENTED[words]
    (one,) = assigned(under(base, words))
    assert (one.recipe, one.nearness) == (recipe, nearness)
    assert len(one.modules) == 8, "qkv, proj, fc1 and fc2 of two layers"
    is_fast = recipe is not None and recipe.kind is Kind.CURRENT
    assert len(one.notes) == (nearness is not EQUAL) + is_fast, "what is not equal says why"


@pytest.mark.parametrize("words", REFUSED)
def test_a_slot_that_no_recipe_holds_is_named(base: Experiment, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assigned(under(base, words))
    assert str(caught.value) == f"quant.backend=transformer_engine: {REFUSED[words]}{ELSE}"


def test_delayed_scaling_of_ours_names_the_scheme_with_theirs(base: Experiment) -> None:
    with pytest.raises(ConfigError) as caught:
        assigned(under(base, "more/linear_fp8_delayed"))
    assert str(caught.value) == (
        "quant.backend=transformer_engine: layer 0 qkv linear.fprop.x has scaling delayed, by powers of two and "
        "iterations, and Transformer Engine's has neither; take quant=more/te_fp8_delayed, which scales as it does"
    )


def test_rules_by_layer_module_and_iteration_give_modules_their_own_recipes(
    base: Experiment,
) -> None:
    experiment = under(base, "FA_linear_mxfp8")
    experiment.quant.rules = [
        Rule(modules=["fc2"], operands=["g"], format="mxfp8_e5m2"),
        Rule(layers=[0], sites=["linear"], format="bf16"),
        Rule(iterations=[1, 1], sites=["linear"], format="bf16"),
    ]
    assert [each.recipe for each in assigned(experiment)] == [None], "a warm-up in bf16"
    by_recipe = {each.recipe: [str(m) for m in each.modules] for each in assigned(experiment, 2)}
    assert by_recipe == {
        None: ["layer 0 qkv", "layer 0 proj", "layer 0 fc1", "layer 0 fc2"],
        Recipe(Kind.MXFP8): ["layer 1 qkv", "layer 1 proj", "layer 1 fc1"],
        Recipe(Kind.MXFP8, hybrid=True): ["layer 1 fc2"],
    }


def test_blocks_along_tokens_of_several_sequences_are_said(base: Experiment) -> None:
    base = replace(base, training=replace(base.training, micro_batch_size=2))
    (one,) = assigned(under(base, "linear_mxfp8"))
    assert one.nearness is STATISTICAL
    assert one.notes == (
        "wgrad's blocks along tokens hold tokens of all 2 sequences of a micro-batch, where the emulation's lie within "
        "one (training.micro_batch_size=1)",
    )
    (scaled,) = assigned(under(base, "more/linear_fp8"))
    assert scaled.nearness is NEAR, "a scale of the tensor has no blocks"


def on_two(base: Experiment, **sizes: Any) -> Experiment:
    launcher = replace(base.launcher, num_processes=2)
    return replace(base, launcher=launcher, parallel=replace(base.parallel, **sizes))


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        (
            {"tensor": 2},
            "each tensor-parallel rank scales its own shard of w, of x in proj and fc2, and of g in the other modules",
        ),
        ({"context": 2}, "each context-parallel rank scales its own tokens of x and g"),
    ],
)
def test_scales_of_parts_are_said(base: Experiment, sizes: dict[str, int], note: str) -> None:
    base = on_two(base, **sizes)
    (one,) = assigned(under(base, "more/linear_fp8"))
    assert one.nearness is STATISTICAL
    assert note in one.notes
    (blocks,) = assigned(under(base, "linear_mxfp8"))
    assert blocks.nearness is EQUAL


def test_a_scale_of_each_part_is_not_said_of_whole_tensors(base: Experiment) -> None:
    for layout in (on_two(base), on_two(base, pipeline=2)):
        (one,) = assigned(under(layout, "more/linear_fp8"))
        assert one.nearness is NEAR


def test_a_history_of_all_ranks_is_said(base: Experiment) -> None:
    note = "a micro-batch enters the history with the largest amax of all tensor-, context- and data-parallel ranks"
    for layout in (on_two(base), on_two(base, tensor=2), on_two(base, context=2)):
        (one,) = assigned(under(layout, "more/te_fp8_delayed"))
        assert note in one.notes
    for layout in (base, on_two(base, pipeline=2)):
        (one,) = assigned(under(layout, "more/te_fp8_delayed"))
        assert note not in one.notes


@pytest.mark.parametrize("words", ["linear_mxfp4", "linear_hifp8", "more/linear_mxfp4_sr_rht"])
def test_own_formats_take_any_scheme(base: Experiment, words: str) -> None:
    (one,) = assigned(under(base, words, Backend.te_emulated))
    assert (one.recipe, one.nearness, one.notes) == (Recipe(Kind.CUSTOM), EQUAL, ())
