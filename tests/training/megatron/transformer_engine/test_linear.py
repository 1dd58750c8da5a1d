"""Models built through the real spec with Transformer Engine's linear layers: each module's recipe and quantizers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.megatron.transformer_engine.child import Child


def tiny(*words: str) -> Any:
    """A tiny experiment, with micro-batches of one sequence."""
    from quantexp.config.compose import compose
    from tests.conftest import TINY

    return compose([*TINY, "training.micro_batch_size=1", *words], None, {})


def held(*words: str) -> dict[str, dict[str, str]]:
    """Module -> slot -> what its quantizer makes of the operand, of the model in the first iteration."""
    return at_iterations([1], *words)[0]


def at_iterations(iterations: list[int], *words: str) -> list[dict[str, dict[str, str]]]:
    """The same at each iteration, after a forward pass."""
    from quantexp.quant.precision import precision_map
    from quantexp.training.megatron.backend import scheme_spec
    from quantexp.training.megatron.model import build_model, scheme_modules, set_precision
    from quantexp.training.megatron.session import session
    from quantexp.training.megatron.transformer_engine.autocast import autocast
    from quantexp.training.megatron.transformer_engine.linear import NativeLinear
    from quantexp.training.megatron.transformer_engine.quantizers import slots_of_module
    from quantexp.training.megatron.transformer_engine.recipes import te_recipe

    experiment = tiny(*words)
    quant = experiment.quant
    with session(experiment.training):
        spec = scheme_spec(experiment.model, quant.backend)
        model, _ = build_model(experiment.model, experiment.training, spec, quant)
        results = []
        for iteration in iterations:
            set_precision(model, precision_map(experiment.model, quant, iteration))
            seen: dict[str, dict[str, str]] = {}
            for name, module in scheme_modules(model).items():
                if not isinstance(module, NativeLinear):
                    continue
                if module.recipe is None:
                    seen[str(name)] = {}
                    continue
                with autocast(te_recipe(module.recipe)):
                    module.init_fp8_metadata()
                slots = slots_of_module(module).items()
                seen[str(name)] = {str(slot): repr(value) for slot, value in slots}
            results.append(seen)
    return results


def declared(*words: str, iteration: int = 1) -> dict[str, dict[str, str]]:
    from quantexp.quant.precision import precision_map
    from quantexp.quant.transformer_engine.operands import held

    experiment = tiny(*words)
    return {
        str(name): {str(slot): repr(held(spec)) for slot, spec in module.slots.items()}
        if module.is_quantised
        else {}
        for name, module in precision_map(experiment.model, experiment.quant, iteration).items()
        if module.is_linear
    }


@pytest.mark.parametrize(
    "scheme",
    [
        *(
            "te_mxfp8",
            "te_mxfp8_hybrid",
            "te_fp8_current",
            "te_fp8_delayed",
            "te_fp8_blockwise",
            "te_nvfp4",
        )
    ],
)
def test_every_modules_quantizers_are_the_declared_slots(each_te: Child, scheme: str) -> None:
    words = (f"quant=more/{scheme}",)
    assert each_te.run(held, *words) == declared(*words)


def test_rules_by_layer_and_iteration_change_a_modules_quantizers(te: Child) -> None:
    """E4M3, then E5M2 for gradients by a recipe of the same class, then bf16, then E4M3 again."""
    rules = (
        "quant.rules=[{layers: [0], operands: [g], iterations: [2, 2], format: mxfp8_e5m2}, "
        "{layers: [1], sites: [linear], iterations: [3, 3], format: bf16}]"
    )
    words = ("quant=more/te_mxfp8", rules)
    iterations = [1, 2, 3, 4]
    assert te.run(at_iterations, iterations, *words) == [
        declared(*words, iteration=iteration) for iteration in iterations
    ]
