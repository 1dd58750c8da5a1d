"""Whose turn it is in the iterations that are proved in parts, and runs in which a lie begins later."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quantexp.quant.linear
import quantexp.quant.multiply
from quantexp.config.compose import compose
from quantexp.model.decoder import is_routed
from quantexp.proof.turns import KINDS, MODULES, THOROUGH, Turns
from quantexp.quant.precision import PrecisionMap, precision_map
from quantexp.quant.step_state import current_state
from quantexp.runs.paths import RunDir
from tests.conftest import TINY_MODELS
from tests.recorded import failure

RunTiny = Callable[..., RunDir]


def declared(*words: str) -> PrecisionMap:
    experiment = compose(["training=fast", *words])
    return precision_map(experiment.model, experiment.quant)


@pytest.mark.parametrize("looks", [0, 1, 3])
@pytest.mark.parametrize("words", [("model=tiny",), ("model=deepseek2_lite",)])
def test_every_product_has_its_turn_and_each_kind_at_least_every_sixth(
    words: tuple[str, ...], looks: int
) -> None:
    of_run = declared(*words, "quant=FA_linear_mxfp8")
    turns = Turns(of_run, seed=1, looks=looks, num_micro_batches=3)
    seen: set[Any] = set()
    units = {(name, (slot.site, slot.product)) for name, m in of_run.items() for slot in m.slots}
    indices = set()
    for iteration in range(1, 1 + THOROUGH if not looks else 1):
        assert turns.of(iteration) == {n: {u: None for m, u in units if m == n} for n in of_run}
    last = dict.fromkeys(KINDS, THOROUGH)
    for iteration in range(1 + THOROUGH, 5 * len(units)):
        chosen = turns.of(iteration)
        now = {(name, unit) for name, looks in chosen.items() for unit in looks}
        indices |= {index for looks in chosen.values() for index in looks.values()}
        shared = {unit for name, unit in now if not is_routed(name.name)}
        if looks:
            assert shared == {unit for kind in MODULES for unit in kind}
        else:
            assert len(shared) == 1
            (kind,) = (kind for kind in KINDS if shared <= set(kind))
            assert iteration - last[kind] <= 1 + len(KINDS)
            last[kind] = iteration
        seen |= now
    assert seen == units
    assert indices == {0, 1, 2}


@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("every", [2, 5, 8, 10, 24, 25, 100, 1000])
def test_iterations_at_equal_distances_look_at_every_product(every: int, looks: int) -> None:
    """A lie in each tenth iteration, or each hundredth, has no product in which nobody ever sees it."""
    of_run = declared("model=tiny", "quant=FA_linear_mxfp8")
    turns = Turns(of_run, seed=1, looks=looks, num_micro_batches=0)
    units = {(name, (slot.site, slot.product)) for name, m in of_run.items() for slot in m.slots}
    seen: set[Any] = set()
    # 20 times as many looks as there are products: one is missed with a probability of 45 e^-20.
    for iteration in range(every * THOROUGH, every * 20 * len(units), every):
        seen |= {(name, unit) for name, looks in turns.of(iteration).items() for unit in looks}
    assert seen == units


def test_ranks_with_other_experts_look_at_the_same_shared_modules_together() -> None:
    whole = declared("model=deepseek2_lite", "quant=linear_mxfp4")
    parts = [
        {n: m for n, m in whole.items() if not is_routed(n.name) or hash(n.name) % 2 == rank}
        for rank in range(2)
    ]
    of_ranks = [Turns(part, seed=7, looks=1, num_micro_batches=2) for part in parts]
    for iteration in range(1, 50):
        shared = [
            {n: looks for n, looks in turns.of(iteration).items() if not is_routed(n.name)}
            for turns in of_ranks
        ]
        assert shared[0] == shared[1]


def test_each_product_is_looked_at_by_hooks_and_in_forward_and_some_of_attention_beside_alternatives() -> (
    None
):
    of_run = declared("model=tiny", "quant=FA_linear_mxfp8")
    turns = Turns(of_run, seed=3, looks=0, num_micro_batches=1)
    looks: dict[tuple[Any, Any, bool], int] = {}
    contrasts = 0
    for iteration in range(1, 2001):
        assert turns.are_in_forward(iteration) is not turns.are_in_forward(iteration ^ 1)
        contrasts += turns.has_contrasts(iteration)
        for name, units in turns.of(iteration).items():
            for unit in units:
                key = name, unit, turns.are_in_forward(iteration)
                looks[key] = looks.get(key, 0) + 1
    products = {(name, (slot.site, slot.product)) for name, m in of_run.items() for slot in m.slots}
    assert len(looks) == 2 * len(products)
    # 2000 iterations with one product of 45 each, one in two of them in forward: 22 are expected, 5 are 3.6 sigma less.
    assert min(looks.values()) >= 5
    assert 400 < contrasts < 600
    assert all(turns.has_contrasts(iteration) for iteration in range(1, 1 + THOROUGH))


def later(first: int, how: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A `quantise_operand` that lies from an iteration on."""
    honest = quantexp.quant.multiply.quantise_operand

    def quantise_operand(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = honest(x, *args, **kwargs)
        return how(y) if current_state().iteration >= first else y

    return quantise_operand


def test_a_lie_that_begins_later_ends_the_run_before_the_optimizer_steps(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = later(7, lambda y: torch.where(y == 0, y, y * 2))
    for module in ("quantexp.quant.multiply", "quantexp.quant.linear"):
        monkeypatch.setattr(f"{module}.quantise_operand", lie)
    monkeypatch.setattr("quantexp.quant.weight_cache.weights.quantise_operand", lie)
    words = ("quant=linear_mxfp4", "training.iterations=12", "capture=off")
    run = run_tiny(*words, "training.weight_cache=false", expect=1)
    reason = failure(run)
    found = re.search(r"what ran is not what was declared, in iteration (\d+): layer", reason)
    assert found is not None
    iteration = int(found[1])
    assert 7 <= iteration < 7 + len(KINDS)
    assert "drawn elements are not those of its source, in micro-batch 0" in reason
    assert len(run.metrics.read_text().splitlines()) == iteration - 1
    record = json.loads(run.precision.read_text())
    assert not record["proved"]
    assert record["drawn"]["last"] == iteration
    assert record["drawn"]["iterations"] == iteration - 1


def test_an_input_that_changes_between_the_products_of_a_layer_is_named(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = quantexp.quant.linear.wgrad

    def wgrad(*args: Any, quantised_x: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = args[2] if quantised_x is None else quantised_x
        if current_state().iteration >= 7:
            x.mul_(2)
        return honest(*args, quantised_x=quantised_x, **kwargs)

    monkeypatch.setattr("quantexp.training.megatron.linear.wgrad", wgrad)
    run = run_tiny("quant=bf16", "training.iterations=12", "capture=off", expect=1)
    found = re.search(
        r"in iteration (\d+): layer \d \S+ linear.wgrad.x: declared bf16", failure(run)
    )
    assert found is not None
    assert 7 <= int(found[1]) < 7 + len(KINDS)


def test_an_honest_run_says_how_much_was_compared(run_tiny: RunTiny) -> None:
    run = run_tiny("quant=FA_linear_mxfp8", "training.iterations=4", "capture=off")
    record = json.loads(run.precision.read_text())
    assert record["proved"]
    drawn = record["drawn"]
    assert (drawn["first"], drawn["last"], drawn["iterations"]) == (2, 4, 3)
    assert drawn["operands"] > 1000
    assert drawn["products"] > 100
    linear = [e for e in record["entries"] if e["site"] == "linear"]
    assert all(entry["product_elements"] >= 16 * 64 for entry in linear)
    assert all(entry["product_rows"] > 0 for entry in linear)


@pytest.mark.slow
@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("model", TINY_MODELS)
def test_no_honest_run_of_long_iterations_is_refused(
    model: str, looks: int, run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn checks then look at some modules of a layer, and at what lies between all of them.

    A norm before several modules, as that of latent attention, has a gradient from each, some of them not watched.
    """
    monkeypatch.setattr("quantexp.proof.turns.number_of_looks", lambda flops: looks)
    words = [*TINY_MODELS[model], "quant=FA_linear_mxfp8", "capture=off", "training.iterations=12"]
    run = run_tiny(*words)
    drawn = json.loads(run.precision.read_text())["drawn"]
    assert drawn["iterations"] == 11
