"""What Transformer Engine does in silence, and does not here: settings, variables, quantizers, weights, histories."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantexp.errors import EngagementError, RunError
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe, native_recipes
from quantexp.quant.precision import ModuleId
from tests.extras.transformer_engine.rank.child import B200, H100, Child, slots_of_module

NAME = ModuleId(0, "fc1")
ALL = [*native_recipes(None), *native_recipes(16)]
#: Variables that change the defaults of recipes, each to the other value.
VARIABLES = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_BACKWARD_OVERRIDE": "high_precision",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_NVFP4_4OVER6": "all",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
}


def layer(recipe: Recipe, width: int = 128) -> Any:
    """A linear layer of Transformer Engine, initialised by a forward pass under a recipe."""
    import transformer_engine.pytorch as te

    from quantexp.extras.transformer_engine.rank.recipes import te_recipe

    module = te.Linear(width, width, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with te.autocast(enabled=True, recipe=te_recipe(recipe)):
        module.init_fp8_metadata()
    return module


def all_quantizers() -> list[str]:
    """The recipes whose quantizers are other ones, of all."""

    return [str(each) for each in ALL if slots_of_module(layer(each)) != each.slots()]


def test_every_recipe_makes_its_slots_whatever_the_variables_say(te: Child) -> None:
    assert len(ALL) == 24
    assert te.run(all_quantizers) == []


@pytest.mark.slow
def test_variables_change_no_recipe(te: Child) -> None:
    with te.fresh(VARIABLES) as child:
        assert child.run(all_quantizers) == []


def all_settings() -> dict[str, str]:
    """Every field of every recipe's object, in words."""
    from quantexp.extras.transformer_engine.rank.recipes import te_recipe

    return {str(each): repr(sorted(vars(te_recipe(each)).items())) for each in ALL}


@pytest.mark.slow
def test_variables_change_no_setting_of_a_recipe_in_the_newest_version(later_te: Child) -> None:
    with later_te.fresh(VARIABLES) as child:
        assert child.run(all_settings) == later_te.run(all_settings)


def unknown_setting() -> None:
    from quantexp.extras.transformer_engine.rank.recipes import make_recipe

    make_recipe(Kind.MXFP8, {"fp8_formt": "HYBRID"})


def test_a_setting_that_would_be_dropped_is_refused(each_te: Child) -> None:
    with pytest.raises(RunError) as caught:
        each_te.run(unknown_setting)
    assert str(caught.value) == (
        f"Transformer Engine {each_te.version} does not keep MXFP8BlockScaling(fp8_formt=HYBRID), and drops it without "
        "a message; use another version"
    )


def kept_quantizers() -> None:
    """A layer that has had another recipe of the same class, as Transformer Engine leaves it."""
    import transformer_engine.pytorch as te

    from quantexp.extras.transformer_engine.rank.linear import require_quantizers
    from quantexp.extras.transformer_engine.rank.recipes import te_recipe

    other = Recipe(Kind.MXFP8, hybrid=True)
    module = layer(Recipe(Kind.MXFP8))
    with te.autocast(enabled=True, recipe=te_recipe(other)):
        module.init_fp8_metadata()
    require_quantizers(module, NAME, other)


def test_quantizers_of_another_recipe_end_the_run(each_te: Child) -> None:
    with pytest.raises(EngagementError) as caught:
        each_te.run(kept_quantizers)
    assert str(caught.value) == (
        "layer 0 fc1 linear.dgrad.g: Transformer Engine's quantizer has element e4m3, and MXFP8BlockScaling(HYBRID) "
        "has e5m2"
    )


def require_here(recipe: Recipe) -> None:
    from quantexp.extras.transformer_engine.rank.support import require_support

    require_support(recipe)


def test_a_gpu_that_cannot_run_a_recipe_is_refused_with_the_reason(each_te: Child) -> None:
    each_te.run(require_here, Recipe(Kind.MXFP8), capability=B200)
    each_te.run(require_here, Recipe(Kind.BLOCK, power_of_two=True), capability=H100)
    with pytest.raises(RunError) as caught:
        each_te.run(require_here, Recipe(Kind.MXFP8), capability=H100)
    assert str(caught.value) == (
        f"Transformer Engine {each_te.version} cannot run MXFP8BlockScaling(E4M3) here: Device compute capability 10.0 "
        "or higher required for MXFP8 execution."
    )


def words_of_doctor(has_gpu: bool, version: str | None) -> str:
    from unittest import mock

    from quantexp.extras.transformer_engine.rank import support

    with mock.patch("torch.cuda.is_available", return_value=has_gpu):
        if version is None:
            return support.support_in_words()
        with mock.patch.object(support, "te_version", return_value=version):
            return support.support_in_words()


def test_doctor_says_what_this_machine_can_run(te: Child) -> None:
    assert te.run(words_of_doctor, True, None, capability=H100) == (
        "2.11.0: Float8CurrentScaling, DelayedScaling, Float8BlockScaling; not MXFP8BlockScaling (Device compute "
        "capability 10.0 or higher required for MXFP8 execution.); not NVFP4BlockScaling (Device compute capability "
        "10.0 or higher required for NVFP4 execution.)"
    )
    assert (
        te.run(words_of_doctor, False, None) == "2.11.0 is installed, and there is no GPU to run it"
    )
    assert te.run(words_of_doctor, True, "2.8.0") == (
        "2.8.0, which is too old: quantexp needs Transformer Engine 2.9 or newer, got 2.8.0; pip install 'quantexp[te]'"
    )


def weights_seen(keeps: bool) -> list[bool]:
    """Whether the second forward pass multiplies the changed weight, in training and in an evaluation."""
    from tests.extras.transformer_engine.rank import kernels
    from tests.extras.transformer_engine.rank.test_linear import built

    kernels.install()
    seen = []
    for is_training in (True, False):
        with built("quant=more/te_mxfp8") as (modules, config):
            assert config.disable_parameter_transpose_cache
            module = modules[NAME].train(is_training)
            module.disable_parameter_transpose_cache = not keeps
            torch.nn.init.normal_(module.weight)
            x = torch.randn(32, 1, module.in_features).to(torch.bfloat16)
            with torch.set_grad_enabled(is_training):
                before = module(x)[0].detach().clone()
                with torch.no_grad():
                    module.weight.mul_(2)
                seen.append(torch.equal(module(x)[0], 2 * before))
    return seen


def test_a_changed_weight_is_multiplied_at_once_also_in_an_evaluation(each_te: Child) -> None:
    assert each_te.run(weights_seen, False) == [True, True]
    assert each_te.run(weights_seen, True) == [False, False], "what Transformer Engine does"


def updates(encloses: bool) -> dict[str, set[tuple[int, ...]]]:
    from tests.extras.transformer_engine.rank import kernels
    from tests.extras.transformer_engine.rank.test_linear import trained_twice

    kernels.install()
    return trained_twice("quant=more/te_fp8_delayed", encloses=encloses)


def test_delayed_scales_are_updated_once_a_micro_batch(each_te: Child) -> None:
    """An update moves the history by a row: the two last rows have the amaxes of the two micro-batches."""
    assert list(each_te.run(updates, True).values()) == [{(-2, -1)}] * 8
    by_modules = each_te.run(updates, False)
    assert {(-2, -1)} not in by_modules.values(), "what Transformer Engine does"
