"""Runs in which processes share one model: proved on every rank, captured in parts, saved whole.

They train in fp32, where sums of ranks in another order move results by 1e-7; in bf16 each rank's part of a sum is
rounded by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantexp_launchers.local import processes
from quantexp_launchers.local.execute import execute
from rich.console import Console

from quantexp.capture import open_capture
from quantexp.capture.select.budget import price
from quantexp.config.compose import compose
from quantexp.launch.outcome import Outcome
from quantexp.model.huggingface.weights import open_weights
from quantexp.runs.status import State
from tests.recompute.bounds import share_outside
from tests.recompute.captured import read_capture
from tests.recompute.oracle import ATTENTION, LINEAR
from tests.recorded import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUIET = Console(quiet=True)
SHARED = [
    *("training.precision=fp32", "training.micro_batch_size=1", "training.global_batch_size=2"),
    *("training.iterations=2", "training.seq_length=128", "model.ffn_hidden_size=256"),
    *("capture.attn_weights=true", "capture.residual=true", "checkpoint.at_end=true"),
    *("evaluation.every=1", "evaluation.samples=4", "launcher.num_threads=1"),
    "launcher.timeout_min=2",
]
EXPERTS = [
    *("model=deepseek2_lite", "model.num_query_groups=4", "model.head_dim=48"),
    *("model.mla.kv_lora_rank=112", "model.mla.qk_head_dim=32"),
    *("model.mla.qk_pos_emb_head_dim=16", "model.mla.v_head_dim=32"),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=64"),
]
#: Processes and words; each with the words of the model that one process has, too.
RUNS = {
    "tp2 pp2": (
        4,
        ["parallel.tensor=2", "parallel.pipeline=2"],
        ["quant=FA_linear_mxfp8", "quant/output=mxfp8"],
    ),
    "cp2": (
        2,
        ["parallel.context=2"],
        ["quant=FA_linear_mxfp4", "training.attention=tiled", "quant.qk.rounding=stochastic"],
    ),
    "tp2 ep2": (
        4,
        ["parallel.tensor=2", "parallel.expert=2", "parallel.dispatcher=alltoall"],
        [*EXPERTS, "quant=linear_mxfp4", "quant/output=hifp8"],
    ),
    "ep2": (2, ["parallel.expert=2"], [*EXPERTS, "quant=more/linear_mxfp4_sr_rht"]),
}


def run(words: list[str], num_processes: int, root: Path) -> Outcome:
    outcome = execute(
        compose([*words, f"launcher.num_processes={num_processes}", f"paths.root={root}"]), QUIET
    )
    assert outcome.state is State.COMPLETED, outcome.reason
    return outcome


@pytest.fixture(scope="module", params=RUNS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    name: str, tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Outcome]:
    return trained(name, tiny_words, tmp_path_factory.mktemp("runs"))


def trained(name: str, words: list[str], root: Path) -> tuple[Outcome, Outcome]:
    """One process, and a layout."""
    number, layout, model = RUNS[name]
    words = [*words, *SHARED, *model]
    return run(words, 1, root / "one"), run([*words, *layout], number, root / "layout")


def test_metrics_are_those_of_one_process(
    name: str, pair: tuple[Outcome, Outcome], tiny_words: list[str], tmp_path: Path
) -> None:
    """To 1e-5: after the first step a weight's update is in the order of the learning rate whatever its gradient.

    On some processors a last bit tips one rounding to a grid, 5e-5 of the gradient's norm: not with every seed.
    """
    if metrics_apart(pair):
        assert metrics_apart(trained(name, [*tiny_words, "training.seed=4321"], tmp_path)) == []


def metrics_apart(pair: tuple[Outcome, Outcome]) -> list[str]:
    one, other = (json_lines(outcome.run.metrics) for outcome in pair)
    assert len(one) == len(other) == 2
    names = ["loss", "grad_norm", "validation_loss", "tokens", "lr"]
    names += ["aux_loss"] * (one[0].get("aux_loss") is not None)
    return [
        name
        for name in names
        if [m[name] for m in other] != pytest.approx([m[name] for m in one], rel=1e-5)
    ]


def test_means_over_tokens_are_those_of_one_process(tiny_words: list[str], tmp_path: Path) -> None:
    """Ranks gather all tokens before an operand is divided into its mean and the rest."""
    words = [*tiny_words, *SHARED, "quant=more/linear_nvfp4_averis"]
    one = run(words, 1, tmp_path / "one")
    other = run([*words, "parallel.tensor=2"], 2, tmp_path / "two")
    assert other.precision is not None
    assert other.precision["proved"]
    metrics = (json_lines(outcome.run.metrics) for outcome in (one, other))
    for a, b in zip(*metrics, strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-4)


def test_ranks_with_parts_of_their_own_are_proved(tiny_words: list[str], tmp_path: Path) -> None:
    """Channels and low ranks of the own width, and means of the own tokens, if the run accepts it."""
    words = [*tiny_words, *SHARED, "parallel.unaligned=accept"]
    ways = ("hot_channels", "tensor"), ("metis", "tensor"), ("averis", "context")
    for scheme, layout in ways:
        own = [f"quant=more/linear_nvfp4_{scheme}", f"parallel.{layout}=2"]
        precision = run([*words, *own], 2, tmp_path / scheme).precision
        assert precision is not None
        assert precision["proved"]


def test_whole_map_is_proved(pair: tuple[Outcome, Outcome]) -> None:
    one, other = (outcome.precision for outcome in pair)
    assert one is not None
    assert other is not None
    assert other["proved"]

    def what(record: Any) -> list[tuple[object, ...]]:
        keys = ("layer", "module", "site", "product", "operand", "format", "status")
        return [tuple(entry[key] for key in keys) for entry in record["entries"]]

    assert what(other) == what(one)
    assert all(entry["calls"] > 0 for entry in other["entries"])


def test_captured_tensors_are_whole(pair: tuple[Outcome, Outcome]) -> None:
    """Those of the first micro-batch, forward: the same values, apart from the order of sums."""
    one, other = (open_capture(outcome.run.tensors) for outcome in pair)
    number = 0
    for entry in one.select(micro_batch=0, operation="forward"):
        line = entry.metadata
        if line["module"].startswith("expert"):  # of several micro-batches at once, by rank
            continue
        (same,) = other.select(
            **{key: line[key] for key in ("layer", "module", "operation", "tensor", "phase")},
            micro_batch=0,
            data_rank=0,
        )
        whole = same.torch()
        assert whole.shape == entry.torch().shape
        torch.testing.assert_close(whole, entry.torch(), rtol=1e-3, atol=1e-4)
        number += 1
    assert number > 20


def test_results_follow_from_the_reassembled_operands(pair: tuple[Outcome, Outcome]) -> None:
    modules = read_capture(pair[1].run.tensors)
    assert len(modules) >= 10
    for module in modules:
        for key, recompute in (LINEAR if module.layer_type == "linear" else ATTENTION).items():
            if key in module.tensors:
                right = recompute(module, module.formats)
                assert share_outside(module.tensors[key], right, module.dtype) == 0, (module, key)


def test_predicted_bytes_are_those_stored(pair: tuple[Outcome, Outcome]) -> None:
    for outcome in pair:
        stored = {
            line["file"]: line["bytes"]
            for line in json_lines(outcome.run.tensors / "manifest.jsonl")
        }
        assert outcome.num_bytes == sum(stored.values())


def test_checkpoint_is_a_whole_published_model(pair: tuple[Outcome, Outcome]) -> None:
    one, other = (
        open_weights(outcome.run.checkpoints / "iteration_00000002").tensors for outcome in pair
    )
    assert {name: stored.shape for name, stored in one.items()} == {
        name: stored.shape for name, stored in other.items()
    }


def test_predicted_price_counts_replicas_once(tiny_words: list[str]) -> None:
    """A sharded run stores what one process stores, whatever the number of ranks."""
    words = [*tiny_words, *SHARED, "quant=FA_linear_mxfp8"]
    one = price(compose(words)).num_bytes
    number, layout, _ = RUNS["tp2 pp2"]
    assert price(compose([*words, *layout, f"launcher.num_processes={number}"])).num_bytes == one


DEFECTIVE = """\
import os, sys
import quantexp.quant.linear as linear
from quantexp.training.worker import main
if os.environ["RANK"] == "3":
    linear.quantise_operand = lambda x, *_, **__: x
    linear.quantise_pair = lambda x, *_, **__: (x, x)
sys.exit(main(sys.argv[1:]))
"""


def test_fault_on_one_rank_of_four_is_named_with_its_rank(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "defective.py"
    script.write_text(DEFECTIVE)
    number, layout, model = RUNS["tp2 pp2"]
    words = [*tiny_words, *SHARED, *model, *layout, f"paths.root={tmp_path / 'runs'}"]
    experiment = compose([*words, f"launcher.num_processes={number}"])
    command = processes.command

    def defective(run_dir: Path, num_processes: int) -> list[str]:
        return [*command(run_dir, num_processes)[:-3], str(script), str(run_dir)]

    monkeypatch.setattr(processes, "command", defective)
    outcome = execute(experiment, QUIET)
    assert outcome.state is State.FAILED
    assert "what ran is not what was declared, in iteration 1: rank 3: layer 1 " in outcome.reason
    assert not outcome.run.metrics.exists(), "no step was taken"
