"""Quantising weights once per step leaves training bit-identical in every configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.memory.footprint import memory_parts_gb
from quantexp.quant import multiply
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.quant.weight_cache import weights
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.schema import Experiment
from quantexp.training.megatron import trainer
from quantexp.training.megatron.model import (
    build_model,
    scheme_modules,
    set_precision,
    share_weight_copies,
)
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec
from quantexp.training.megatron.step import Stepper

from .test_trainer import RecordingObserver, tokens
from .whole_models import draw

Tiny = Callable[..., Experiment]
STEPS = ("training.iterations=3", "training.global_batch_size=4", "training.micro_batch_size=1")
ONE_STEP = ("training.iterations=1", "training.warmup_iterations=0")


def record_training(experiment: Experiment) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """The loss, gradient norm and held-out loss of each step, and its gradients."""
    observer = RecordingObserver()

    def held_out() -> Iterator[dict[str, Tensor]]:
        batches = tokens(experiment)
        return (next(batches) for _ in range(2))

    with session(experiment.training) as device:
        trainer.train(experiment, tokens(experiment), observer, device, held_out=held_out)
    steps = [(m.loss, m.grad_norm, m.validation_loss) for m in observer.metrics]
    return steps, observer.gradients_by_name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("llama32-1b", ["quant=FA_linear_mxfp8", "evaluation.every=1", "evaluation.samples=2"]),
        pytest.param(
            "llama32-1b", ["quant=linear_mxfp8", "training.recompute=full"], marks=pytest.mark.slow
        ),
        pytest.param(
            "llama32-1b",
            ["quant=linear_hifp8", "training.global_batch_size=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama32-1b",
            ["quant=linear_mxfp4", "quant.linear.dgrad.w.format=reuse"],
            marks=pytest.mark.slow,
        ),
        ("llama32-1b", ["quant=more/linear_hifp8_delayed", "evaluation.every=1"]),
        pytest.param("deepseek2_lite", ["quant=linear_mxfp4"], marks=pytest.mark.slow),
        (
            "deepseek2_lite",
            ["quant=linear_hifp8", "training.recompute=full", "training.micro_batch_size=2"],
        ),
    ],
    ids=str,
)
def test_training_is_the_same_to_the_last_bit(
    tiny: Tiny, tiny_models: dict[str, list[str]], model: str, overrides: list[str]
) -> None:
    common = [*tiny_models[model], *STEPS, *overrides]
    cached, gradients = record_training(tiny(*common))
    plain, plain_gradients = record_training(tiny(*common, "training.weight_cache=false"))
    assert cached == plain
    assert len({loss for loss, _, _ in cached}) == 3, "the weights change, and the copies with them"
    assert len(gradients) == 3
    for one, other in zip(gradients, plain_gradients, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_rule_may_change_slots_between_steps(tiny: Tiny) -> None:
    rule = "quant.rules=[{iterations:[2,2],format:mxfp4,sites:[linear]}]"
    overrides = [*STEPS, "quant=linear_mxfp8"]
    cached, _ = record_training(tiny(*overrides, rule))
    plain, _ = record_training(tiny(*overrides, rule, "training.weight_cache=false"))
    assert cached == plain
    without, _ = record_training(tiny(*overrides))
    assert cached[0] == without[0]
    assert cached[1] != without[1]


@pytest.mark.parametrize(
    ("overrides", "each"),
    [([], 1), (["training.weight_cache=false"], 8)],
    ids=["once", "each time"],
)
def test_each_weight_is_read_once_a_step(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, overrides: list[str], each: int
) -> None:
    reads: dict[int, int] = {}

    def count_reads(of: Callable[..., Any]) -> Callable[..., Any]:
        def count(x: Tensor, *rest: Any, **out: Any) -> Any:
            reads[x.data_ptr()] = reads.get(x.data_ptr(), 0) + 1
            return of(x, *rest, **out)

        return count

    for name in ("quantise_operand", "quantise_pair"):
        monkeypatch.setattr(weights, name, count_reads(getattr(multiply, name)))
    record_training(tiny(*STEPS, "quant=linear_mxfp8", *ONE_STEP, *overrides))
    assert set(reads.values()) == {each}, "two products of four micro-batches, or one read"
    assert len(reads) == 2 * 4


def test_an_optimizer_step_before_copies_are_dropped_ends_the_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies outlive the step; the optimizer writes to storage whose version torch does not increment."""
    step = Stepper.step

    def too_long(self: Any, *args: Any, **options: Any) -> Any:
        with self.copies.step(several=True):
            return step(self, *args, **options)

    monkeypatch.setattr(Stepper, "step", too_long)
    monkeypatch.setattr(Stepper, "_keep_weight_copies", lambda *_, **__: contextlib.nullcontext())
    message = "the weight of layer 0 (qkv|proj|fc1|fc2) changed within a step"
    with pytest.raises(RuntimeError, match=message):
        record_training(tiny(*STEPS, "quant=linear_mxfp8", "training.lr=0.001"))


def test_loaded_weights_drop_the_copies(tiny: Tiny) -> None:
    experiment = tiny("quant=linear_mxfp8")
    copies = WeightCopies()
    with session(experiment.training):
        gpt, _ = build_model(
            experiment.model, experiment.training, inject(stock_spec(experiment.model))
        )
        draw(gpt, experiment.model)
        set_precision(gpt, precision_map(experiment.model, experiment.quant))
        share_weight_copies(gpt, copies)
        module: Any = scheme_modules(gpt)[ModuleId(0, "fc1")]
        state = {
            name: 2 * x if x is not None and x.is_floating_point() else x
            for name, x in gpt.state_dict().items()
        }
        with torch.no_grad(), copies.step(several=True):
            before = copies.for_fprop(module.precision, module.weight, True)
            gpt.load_state_dict(state)
            assert copies.num_bytes() == 0
            after = copies.for_fprop(module.precision, module.weight, True)
    assert torch.equal(after, 2 * before)


@pytest.mark.parametrize(
    "overrides",
    [
        ["quant=linear_mxfp8"],
        ["quant=linear_hifp8"],
        ["quant=linear_mxfp8", "training.global_batch_size=1"],
        ["quant=linear_mxfp4", "training.recompute=full", "training.global_batch_size=1"],
        ["quant=linear_mxfp8", "training.weight_cache=false"],
        ["quant=FA_mxfp8"],
        ["quant=linear_mxfp8", "quant/output=mxfp8"],
        ["quant=bf16", "quant/output=hifp8", "model.tie_embeddings=false"],
        ["quant/output=mxfp4", "training.recompute=full", "training.global_batch_size=1"],
    ],
    ids=str,
)
def test_the_plan_counts_the_kept_copies(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    """Compares with the peak size of the copies within a step."""
    peak = [0]
    keep = WeightCopies._keep

    def keep_and_measure(self: WeightCopies, *args: Any) -> None:
        keep(self, *args)
        peak[0] = max(peak[0], self.num_bytes())

    monkeypatch.setattr(WeightCopies, "_keep", keep_and_measure)
    experiment = tiny(*STEPS, *ONE_STEP, *overrides)
    record_training(experiment)
    assert memory_parts_gb(experiment)["weight_copies"] == pytest.approx(peak[0] / 1e9, rel=1e-12)


def test_the_weight_cache_is_on_by_default() -> None:
    assert compose([], None, {}).training.weight_cache
    assert not compose(["training.weight_cache=false"], None, {}).training.weight_cache
