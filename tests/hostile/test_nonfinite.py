"""A NaN or Inf in a gradient, a loss or a weight reaches no later weight, moment or checkpoint."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from quantexp.formats.torch_internals import TCPStore
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from quantexp.training.megatron.state_shards import RankState
from quantexp.training.megatron.step import Stepper
from quantexp.training.observer import RunObserver

from .poisoned_training import Plant, Trace, poisoned

Tiny = Callable[..., Experiment]

SMALL = [
    *("model.hidden_size=64", "model.ffn_hidden_size=96", "training.seq_length=32"),
    *("training.micro_batch_size=1", "training.global_batch_size=2"),
    *("training.initial_loss_scale=128", "capture=off"),
]
SCHEMES = [
    *("bf16", "FA_linear_mxfp8", "linear_mxfp4", "FA_linear_hifp8", "more/linear_mxfp4_sr_rht"),
    *("FA_mxfp8 quant/pv=hifp8", "more/linear_hifp8_delayed", "more/linear_fp8_delayed"),
]
EXPERTS = [
    *("model=deepseek2_lite", "model.num_query_groups=4", "model.head_dim=40"),
    "model.mla.kv_lora_rank=48",
    *("model.mla.qk_head_dim=24", "model.mla.qk_pos_emb_head_dim=16", "model.mla.v_head_dim=20"),
    *("model.moe.num_experts=2", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=40"),
]
DENSE_PARAMETERS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
]
EXPERT_PARAMETERS = [
    *DENSE_PARAMETERS[:2],
    "decoder.layers.1.self_attention.linear_kv_up_proj.weight",
    "decoder.layers.1.self_attention.kv_layernorm.weight",
    "decoder.layers.1.mlp.router.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]
#: Cases of one training.
EACH = 13
VALUES = (math.nan, math.inf, -math.inf)


def setting(random: Random) -> tuple[list[str], list[str]]:
    """Overrides of one experiment, and its parameters."""
    experts = random.random() < 0.3
    precision = random.choice(["bf16", "fp16", "fp32"])
    scheme = random.choice(SCHEMES).split()
    words = [*(EXPERTS if experts else []), *SMALL, f"training.precision={precision}"]
    words += [f"quant={scheme[0]}", *scheme[1:]]
    words += [f"training.clip_grad={random.choice([0, 1])}"]
    return words, EXPERT_PARAMETERS if experts else DENSE_PARAMETERS


def plant(random: Random, parameters: list[str], iteration: int, ranks: int = 1) -> Plant:
    kind = random.choice(["gradient", "gradient", "loss"])
    return Plant(
        kind,
        random.choice(VALUES),
        iteration,
        random.randrange(2 if ranks == 1 else 1),
        random.randrange(ranks),
        random.choice(parameters) if kind == "gradient" else "",
        random.randrange(1 << 20),
    )


def check(trace: Trace, plants: list[Plant]) -> None:
    """The planted steps, and they alone, changed no weight and no moment; the message names what was planted."""
    assert trace.poisoned == []
    assert trace.error == ""
    planted = {each.iteration: each for each in plants}
    for before, metrics in enumerate(trace.metrics[1:]):
        each = planted.get(metrics.iteration)
        assert metrics.skipped is (each is not None), metrics
        assert (trace.states[before] == trace.states[before + 1]) is metrics.skipped
        if each is None:
            assert math.isfinite(metrics.loss)
            assert math.isfinite(metrics.grad_norm)
            continue
        assert metrics.nonfinite is not None
        if each.kind == "gradient":
            assert each.parameter in metrics.nonfinite
        else:
            named = f"the loss of micro-batch {each.micro_batch} on rank {each.rank} is "
            assert metrics.nonfinite.startswith(named)
        if metrics.loss_scale is None:
            assert trace.histories[before] == trace.histories[before + 1]


def trainings(cases: Iterator[Random]) -> Iterator[list[Random]]:
    """The cases in groups, each planted into one training."""
    while group := list(islice(cases, EACH)):
        yield group


def test_poisoned_step_changes_nothing_in_any_precision_or_scheme(
    tiny: Tiny, cases: Iterator[Random]
) -> None:
    for group in trainings(cases):
        words, parameters = setting(group[0])
        plants = [plant(random, parameters, 2 * i + 2) for i, random in enumerate(group)]
        trace = poisoned(tiny(*words, f"training.iterations={2 * len(plants) + 1}"), plants)
        check(trace, plants)


@pytest.mark.slow
def test_ranks_leave_out_the_same_steps(
    tiny_words: list[str], cases: Iterator[Random], tmp_path: Path
) -> None:
    """The gradient of one rank is planted before the ranks reduce it, or its loss."""
    for number, group in enumerate(trainings(islice(cases, EACH))):
        words, parameters = setting(group[0])
        plants = [plant(random, parameters, 2 * i + 2, ranks=2) for i, random in enumerate(group)]
        words += ["launcher.num_processes=2", f"training.iterations={2 * len(plants) + 1}"]
        is_divided = number % 2 == 1  # then each rank has moments of its own
        words.append(f"training.distributed_optimizer={str(is_divided).lower()}")
        job = tmp_path / str(number) / "job.json"
        job.parent.mkdir()
        job.write_text(
            json.dumps({"words": [*tiny_words, *words], "plants": [asdict(p) for p in plants]})
        )
        traces = both_ranks(job)
        for trace in traces:
            check(trace, plants)
        assert is_divided or traces[0].states == traces[1].states
        assert [m.nonfinite for m in traces[0].metrics] == [m.nonfinite for m in traces[1].metrics]


def both_ranks(job: Path) -> list[Trace]:
    """Train two ranks in processes of their own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = Path(__file__).with_name("poisoned_training.py")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is hosted here
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(job)],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "PYTHONHASHSEED": "0"},
        )
        for rank in "01"
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    records = [json.loads(job.with_name(f"rank{rank}.json").read_text()) for rank in "01"]
    return [
        Trace(**{**record, "metrics": [Metrics(**line) for line in record["metrics"]]})
        for record in records
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weight_that_is_not_finite_ends_the_run_at_its_limit(tiny: Tiny, precision: str) -> None:
    words = [*SMALL, f"training.precision={precision}", "training.iterations=20"]
    planted = [Plant("weight", math.inf, 3, parameter="decoder.layers.0.mlp.linear_fc1.weight")]
    trace = poisoned(tiny(*words, "training.max_nonfinite_iterations=4"), planted)
    assert [m.skipped for m in trace.metrics] == [False, False, True, True, True, True]
    assert trace.error.startswith("stopped at iteration 6: loss nan, gradient norm ")
    assert (
        "in 4 iterations in a row (training.max_nonfinite_iterations); the loss of " in trace.error
    )


def test_stop_ends_the_run_at_the_first_step_that_is_left_out(tiny: Tiny) -> None:
    planted = [Plant("gradient", math.nan, 2, parameter="decoder.final_layernorm.weight")]
    trace = poisoned(tiny(*SMALL, "training.iterations=5", "training.nonfinite=stop"), planted)
    assert [m.iteration for m in trace.metrics] == [1, 2]
    assert trace.error == (
        "stopped at iteration 2: the gradient of decoder.final_layernorm.weight is the first in the order of the "
        "backward pass that is not finite: 1 of 64 values are NaN or Inf (training.nonfinite=stop)"
    )


def test_finite_gradient_whose_norm_exceeds_float32_is_left_out(tiny: Tiny) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for clip in (0, 1):
        words = [*SMALL, f"training.clip_grad={clip}", "training.iterations=3"]
        plants = [Plant("gradient", 3e38, 2, parameter=name, element=i) for i in range(2)]
        trace = poisoned(tiny(*words), plants)
        assert trace.metrics[1].nonfinite == "the norm of a finite gradient exceeds float32"
        assert trace.states[0] == trace.states[1]
        assert trace.poisoned == []


@pytest.mark.parametrize(
    "poison",
    [
        ("weight", "decoder.layers.0.mlp.linear_fc2.weight"),
        ("main", "decoder.layers.0.mlp.linear_fc2.weight"),
        ("optimizer", "exp_avg/decoder.layers.0.mlp.linear_fc1.weight"),
        ("amax", "amax_histories.layer 0 fc1 linear.fprop.x.amaxes.0"),
    ],
    ids=lambda poison: poison[0],
)
def test_checkpoint_with_a_value_that_is_not_finite_is_never_published(
    run_tiny: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, poison: tuple[str, str]
) -> None:
    """The values become NaN after the last step, where no gradient shows them."""
    kind, name = poison
    plain = Stepper.state

    def state(stepper: Stepper) -> RankState:
        content = plain(stepper)
        if kind in ("main", "optimizer"):
            key = f"main/{name}" if kind == "main" else name
            dict(content.named_tensors())[key].view(-1)[5] = math.nan
        elif kind == "amax":
            history = {"window": 4, "amaxes": [math.inf]}
            content.amax_histories["layer 0 fc1 linear.fprop.x"] = history
        return content

    def planted(observer: RunObserver, metrics: Metrics) -> bool:
        continues = iteration(observer, metrics)
        if kind == "weight" and metrics.iteration == 2:
            weight = observer.watched.decoder["layer 0"].get_parameter("mlp.linear_fc2.weight")
            weight.data.view(-1)[7] = -math.inf
        return continues

    iteration = RunObserver.iteration
    monkeypatch.setattr(RunObserver, "iteration", planted)
    monkeypatch.setattr(Stepper, "state", state)
    optimizer = f"checkpoint.optimizer={str(kind != 'weight').lower()}"
    words = [*SMALL, "training.iterations=6", "checkpoint.every=2", optimizer]
    run = run_tiny(*words, expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "iteration_00000002 is not written: 1 of " in status.reason
    assert f" values are NaN or Inf in {name}; start from an earlier checkpoint" in status.reason
    assert not any(run.checkpoints.glob("*"))
