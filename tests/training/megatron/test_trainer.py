from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from idle_observer import IdleObserver
from torch import Tensor

from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from quantexp.training.megatron import step, watched_step
from quantexp.training.megatron.finite import step_if_finite
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import stock_spec
from quantexp.training.megatron.trainer import train

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]


class RecordingObserver(IdleObserver):
    """Records the metrics of each iteration and its main gradients after the backward pass."""

    def __init__(self) -> None:
        self.metrics: list[Metrics] = []
        self.gradients_by_name: list[dict[str, Tensor]] = []

    def built(self, chunks: list[Any]) -> None:
        (self.model,) = chunks

    def needs_gradients(self, iteration: int) -> bool:
        return True

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        named = self.model.named_parameters()
        self.gradients_by_name.append({name: p.main_grad.clone() for name, p in named})

    def iteration(self, metrics: Metrics) -> bool:
        self.metrics.append(metrics)
        return True


def tokens(experiment: Experiment) -> Iterator[dict[str, Tensor]]:
    B, T = experiment.training.micro_batch_size, experiment.training.seq_length
    generator = torch.Generator().manual_seed(7)
    while True:
        ids = torch.randint(0, 257, (B, T + 1), generator=generator)
        yield {
            "tokens": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].contiguous(),
            "loss_mask": torch.ones(B, T),
            "position_ids": torch.arange(T).expand(B, T),
        }


def record_training(experiment: Experiment, stock: bool = False) -> RecordingObserver:
    observer = RecordingObserver()
    with session(experiment.training) as device:
        spec = stock_spec(experiment.model) if stock else None
        train(experiment, tokens(experiment), observer, device, spec)
    return observer


@pytest.mark.parametrize(
    ("precision", "recompute"),
    [
        ("bf16", "none"),
        ("fp16", "full"),
        pytest.param("bf16", "full", marks=pytest.mark.slow),
        pytest.param("fp16", "none", marks=pytest.mark.slow),
        pytest.param("fp32", "none", marks=pytest.mark.slow),
        pytest.param("fp32", "full", marks=pytest.mark.slow),
    ],
)
def test_injected_bf16_equals_the_stock_classes_to_the_last_bit(
    tiny: Tiny, precision: str, recompute: str
) -> None:
    experiment = tiny(
        f"training.precision={precision}",
        f"training.recompute={recompute}",
        "training.iterations=3",
        "training.global_batch_size=4",
        "training.initial_loss_scale=1024",
    )
    stock, ours = record_training(experiment, stock=True), record_training(experiment)
    for a, b in zip(stock.metrics, ours.metrics, strict=True):
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    assert len(ours.gradients_by_name) == len(ours.metrics) > 0
    for theirs, own in zip(stock.gradients_by_name, ours.gradients_by_name, strict=True):
        assert theirs.keys() == own.keys()
        assert all(torch.equal(theirs[name], own[name]) for name in theirs)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.recompute=full"],
        ["model.mla.q_lora_rank=24", "model.mla.yarn=null", "model.moe.num_shared_experts=0"],
    ],
    ids=str,
)
def test_latent_attention_and_experts_equal_the_stock_classes(
    tiny: Tiny, tiny_models: dict[str, list[str]], overrides: list[str]
) -> None:
    """The stock core attention is `LatentCoreAttention`, which accepts different widths of keys and values."""
    experiment = tiny(*tiny_models["deepseek2_lite"], "training.global_batch_size=4", *overrides)
    stock, ours = record_training(experiment, stock=True), record_training(experiment)
    for a, b in zip(stock.metrics, ours.metrics, strict=True):
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
    assert len(ours.gradients_by_name) == len(ours.metrics) > 0
    for theirs, own in zip(stock.gradients_by_name, ours.gradients_by_name, strict=True):
        assert theirs.keys() == own.keys()
        assert all(torch.equal(theirs[name], own[name]) for name in theirs)


@pytest.mark.slow
def test_the_widths_of_a_real_model_equal_the_stock_classes(tiny: Tiny) -> None:
    experiment = tiny(
        "model.num_layers=1",
        "model.hidden_size=2048",
        "model.ffn_hidden_size=8192",
        "model.num_attention_heads=32",
        "model.num_query_groups=8",
        "model.head_dim=64",
    )
    stock, ours = record_training(experiment, stock=True), record_training(experiment)
    assert [(m.loss, m.grad_norm) for m in stock.metrics] == [
        (m.loss, m.grad_norm) for m in ours.metrics
    ]


def losses(run: RunDir) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.parametrize(
    "scheme",
    [
        "FA_linear_mxfp4",
        pytest.param("bf16", marks=pytest.mark.slow),
        pytest.param("FA_linear_hifp8", marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_gives_the_same_losses_to_the_last_bit(
    run_tiny: RunTiny, scheme: str
) -> None:
    first = losses(run_tiny(f"quant={scheme}"))
    again = losses(run_tiny(f"quant={scheme}", "force=true"))
    assert first == again


@pytest.mark.slow
def test_another_seed_gives_other_losses(run_tiny: RunTiny) -> None:
    assert losses(run_tiny()) != losses(run_tiny("training.seed=1"))


@pytest.mark.slow
def test_runs_of_different_schemes_in_one_process_do_not_affect_each_other(
    run_tiny: RunTiny,
) -> None:
    schemes = ("bf16", "FA_linear_mxfp4", "linear_hifp8")
    forwards = {s: losses(run_tiny(f"quant={s}")) for s in schemes}
    backwards = {s: losses(run_tiny(f"quant={s}", "force=true")) for s in reversed(schemes)}
    assert forwards == backwards
    assert len({tuple(v) for v in forwards.values()}) == len(schemes)


@pytest.mark.slow
def test_runs_of_different_schemes_side_by_side_do_not_affect_each_other(
    tiny: Tiny, run_tiny: RunTiny
) -> None:
    from quantexp.launch.attempt import open_run
    from quantexp.runs.snapshot import environment

    schemes = ("bf16", "FA_linear_mxfp4")
    alone = {s: losses(run_tiny(f"quant={s}")) for s in schemes}
    with contextlib.ExitStack() as stack:
        folders, workers = {}, []
        for scheme in schemes:
            experiment = tiny(f"quant={scheme}", "force=true")
            folder, _ = stack.enter_context(open_run(experiment, "cpu", ["test"]))
            folders[scheme] = folder.run
            command = [sys.executable, "-m", "quantexp.training.worker", str(folder.run.root)]
            variables = {**os.environ, **environment(folder.snapshot)}
            workers.append(
                stack.enter_context(
                    subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
                )
            )
        for worker in workers:
            _, errors = worker.communicate(timeout=240)
            assert worker.returncode == 0, errors
    assert {s: losses(run) for s, run in folders.items()} == alone


@pytest.mark.slow
def test_fp16_halves_its_scale_and_skips_the_step_when_a_gradient_overflows(
    run_tiny: RunTiny,
) -> None:
    run = run_tiny(
        "training.precision=fp16", f"training.initial_loss_scale={2.0**40}", "training.iterations=4"
    )
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert lines[0]["skipped"]
    assert lines[0]["loss_scale"] == 2.0**40
    scales = [line["loss_scale"] for line in lines]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] < scales[0]


def test_a_loss_that_is_not_finite_stops_the_run_with_its_iteration(run_tiny: RunTiny) -> None:
    run = run_tiny(
        "training.lr=1e30",
        "training.iterations=9",
        "training.max_nonfinite_iterations=2",
        "training.clip_grad=0",
        "capture=off",
        expect=1,
    )
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "in 2 iterations in a row (training.max_nonfinite_iterations)" in status.reason
    assert f"stopped at iteration {status.iteration}: loss" in status.reason


@pytest.mark.parametrize(
    "precision",
    [
        "bf16",
        pytest.param("fp16", marks=pytest.mark.slow),
        pytest.param("fp32", marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_the_mean_over_all_micro_batches(tiny: Tiny, precision: str) -> None:
    """The split of the same sequences changes the order of fp32 sums; 16-bit losses agree to a relative 1e-3."""
    reported = []
    for micro_batch_size in (1, 2, 8):
        experiment = tiny(
            "training.global_batch_size=8",
            f"training.micro_batch_size={micro_batch_size}",
            f"training.precision={precision}",
        )
        whole = tiny("training.global_batch_size=8", "training.micro_batch_size=8")
        batch = next(tokens(whole))
        parts = (
            {key: value[i : i + micro_batch_size] for key, value in batch.items()}
            for i in range(0, 8, micro_batch_size)
        )
        observer = RecordingObserver()
        observer.iteration = lambda metrics, o=observer: o.metrics.append(metrics)  # type: ignore[method-assign,misc]
        with session(experiment.training) as device:
            train(experiment, parts, observer, device)
        reported.append(observer.metrics[0].loss)
    assert reported == pytest.approx([reported[-1]] * 3, rel=1e-3)
    assert 5.5 < reported[0] < 6.5  # about log(384) for fresh weights over the padded vocabulary


def test_a_skipped_step_does_not_advance_the_learning_rate(tiny: Tiny) -> None:
    experiment = tiny(
        "training.precision=fp16",
        f"training.initial_loss_scale={2.0**40}",
        "training.iterations=3",
        "training.warmup_iterations=0",
        "training.lr_schedule=linear",
    )
    metrics = record_training(experiment).metrics
    assert metrics[0].skipped
    assert metrics[1].lr == metrics[0].lr


def test_the_learning_rate_warms_up_from_the_first_iteration_and_ends_at_its_minimum(
    tiny: Tiny,
) -> None:
    experiment = tiny(
        "training.iterations=4",
        "training.warmup_iterations=2",
        "training.lr=1e-3",
        "training.min_lr=1e-4",
        "training.lr_schedule=linear",
    )
    rates = [m.lr for m in record_training(experiment).metrics]
    assert rates == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])


def _inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer])]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_held_iterations_fill_the_moments_and_leave_the_weights(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    weights: list[list[Tensor]] = []
    moments: list[list[Tensor]] = []

    def record(own: Any, *others: Any) -> Any:
        result = step_if_finite(own, *others)
        parameters = [p for group in own.param_groups for p in group["params"]]
        weights.append([p.detach().clone() for p in parameters])
        states = [s for each in _inner(own) for s in each.state.values()]
        moments.append([x.clone() for s in states for x in s.values() if x.dim()])
        return result

    monkeypatch.setattr(watched_step, "step_if_finite", record)
    words = (
        "training.iterations=4",
        "training.warmup_iterations=0",
        f"training.optimizer={optimizer}",
    )
    held = record_training(tiny(*words, "training.held_iterations=2")).metrics
    free = record_training(tiny(*words)).metrics
    assert [m.lr for m in held] == [0, 0, *(m.lr for m in free[2:])]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True))
    assert all(x.any() for x in moments[0])
    assert not any(torch.equal(a, b) for a, b in zip(moments[0], moments[1], strict=True))
    # The weights of the first iteration, on the second batch.
    assert held[0].loss == free[0].loss
    assert held[1].loss != free[1].loss


def test_norms_have_no_weight_decay(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    get_optimizer = step.get_megatron_optimizer  # type: ignore[attr-defined]
    groups: list[tuple[float, set[int]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        optimizer = get_optimizer(*args, **kwargs)
        for group in optimizer.param_groups:
            groups.append((group["wd_mult"], {p.dim() for p in group["params"]}))
        return optimizer

    monkeypatch.setattr(step, "get_megatron_optimizer", record)
    record_training(tiny("training.iterations=2"))
    assert sorted(groups) == [(0.0, {1}), (1.0, {2})]


def test_mfu_is_the_share_of_the_peak(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantexp.training.megatron.step.peak_tflops", lambda name, precision: 0.5)
    metrics = record_training(tiny()).metrics[-1]
    assert metrics.mfu == pytest.approx(metrics.tflops / 0.5)
    monkeypatch.undo()
    assert record_training(tiny()).metrics[-1].mfu is None or torch.cuda.is_available()


def test_every_required_metric_is_positive(tiny: Tiny) -> None:
    metrics = asdict(record_training(tiny()).metrics[-1])
    required = [
        "iteration",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "step_time_s",
        "tokens_per_s",
        "tflops",
        "memory_gb",
    ]
    assert all(metrics[name] > 0 for name in required)
    assert metrics["tokens"] == 2 * 64
