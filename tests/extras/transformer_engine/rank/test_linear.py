"""Models built through the real spec with Transformer Engine's linear layers: each module's recipe and quantizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.extras.transformer_engine.rank.child import Child, slots_of_module


def tiny(*words: str) -> Any:
    """A tiny experiment, with micro-batches of one sequence."""
    from quantexp.config.compose import compose
    from tests.conftest import TINY

    return compose([*TINY, "training.micro_batch_size=1", *words], None, {})


@contextmanager
def built(*words: str) -> Iterator[tuple[dict[Any, Any], Any]]:
    """The linear modules of the model, by name, under the map of the first iteration; and Megatron's configuration."""
    with model_of(*words) as (gpt, experiment, config):
        yield use_map(gpt, experiment, 1), config


@contextmanager
def model_of(*words: str) -> Iterator[tuple[Any, Any, Any]]:
    from quantexp.training.megatron.model import build_model, scheme_spec
    from quantexp.training.megatron.session import session

    experiment = tiny(*words)
    quant = experiment.quant
    with session(experiment.training):
        spec = scheme_spec(experiment.model, quant.backend)
        gpt, config = build_model(experiment.model, experiment.training, spec, quant)
        yield gpt, experiment, config


def use_map(gpt: Any, experiment: Any, iteration: int) -> dict[Any, Any]:
    """Declare the map of an iteration; the modules of Transformer Engine."""
    from quantexp.extras.transformer_engine.rank.linear import TransformerEngineLinear
    from quantexp.quant.precision import precision_map
    from quantexp.training.megatron.model import scheme_modules, set_precision

    set_precision(gpt, precision_map(experiment.model, experiment.quant, iteration))
    modules = scheme_modules(gpt).items()
    return {name: each for name, each in modules if isinstance(each, TransformerEngineLinear)}


def at_iterations(iterations: list[int], *words: str) -> list[dict[str, dict[str, str]]]:
    """At each iteration module -> slot -> what its quantizer makes of the operand."""
    with model_of(*words) as (gpt, experiment, _):
        return [
            {str(name): held_by(each) for name, each in use_map(gpt, experiment, i).items()}
            for i in iterations
        ]


def held_by(module: Any) -> dict[str, str]:
    from quantexp.extras.transformer_engine.rank.recipes import autocast, te_recipe

    if module.recipe is None:
        return {}
    with autocast(te_recipe(module.recipe)):
        module.init_fp8_metadata()
    return {str(slot): repr(value) for slot, value in slots_of_module(module).items()}


def trained_twice(*words: str, encloses: bool) -> dict[str, set[tuple[int, ...]]]:
    """Module -> rows of its amax histories with a value, from the end, after two micro-batches.

    Without `encloses` the decoder enters no autocast.
    """
    with model_of(*words) as (gpt, experiment, _):
        modules = use_map(gpt, experiment, 1)
        for parameter in gpt.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        if not encloses:
            gpt.decoder.use_recipes([])
        tokens = torch.arange(64).unsqueeze(0)
        for _ in range(2):
            gpt(tokens, tokens, None, labels=tokens).sum().backward()
        return {
            str(name): {*map(rows_with_values, histories(each))} for name, each in modules.items()
        }


def histories(module: Any) -> list[torch.Tensor]:
    """Of x and w, and of g."""
    forward, backward = (module.fp8_meta[f"scaling_{key}"] for key in ("fwd", "bwd"))
    return [forward.amax_history[:, :2].amin(1), backward.amax_history[:, 0]]


def rows_with_values(history: torch.Tensor) -> tuple[int, ...]:
    return tuple((history.nonzero().flatten() - len(history)).tolist())


def declared(*words: str, iteration: int = 1) -> dict[str, dict[str, str]]:
    from quantexp.extras.transformer_engine.scheme.operands import held
    from quantexp.quant.precision import precision_map

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
    assert each_te.run(at_iterations, [1], *words) == [declared(*words)]


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
