"""The layout in a plan."""

from __future__ import annotations

import pytest

from quantexp.cli.plan import record
from quantexp.cli.plan_record import Plan

from .plans import planned, text_of

JOB = (
    "launcher=slurm",
    "launcher.nodes=2",
    "launcher.num_processes=16",
    "launcher.gpus_per_node=8",
)


@pytest.fixture(scope="module")
def stages() -> Plan:
    return planned(
        *("model=llama31-8b", *JOB, "parallel.tensor=2", "parallel.pipeline=4"),
        *("parallel.virtual_pipeline=2", "training.attention=tiled", "memory=40"),
    )


def test_plan_has_the_layout_and_what_its_fullest_rank_holds(stages: Plan) -> None:
    layout = record(stages)["layout"]
    sizes = {"data": 2, "tensor": 2, "sequence": True, "pipeline": 4, "virtual_pipeline": 2}
    assert sizes.items() <= layout.items()
    assert layout["fullest_rank"] == 0
    assert layout["parameters_a_rank"] == 8 * 218_112_000 // 2 + 8 * 2 * 4096 // 2 + 128256 * 2048
    assert layout["micro_batches_in_flight"] == 5.5
    assert set(layout["communication_bytes"]) == {"tensor", "pipeline", "data"}
    assert stages.memory == "40"
    assert stages.room_gb == 40


def test_printed_plan_says_who_holds_and_sends_what(stages: Plan) -> None:
    text = text_of(stages, 400)
    assert (
        "16: data 2 x tensor 2 (sequence) x pipeline 4 (2 chunks each); 64 micro-batches each"
        in text
    )
    assert (
        "0 (stage 0 of 4, 8 layers, the embedding): 1,135,149,056 parameters, 5.5 micro-batches"
        in text
    )
    assert (
        "sends         tensor 89.1 GB, pipeline 4.3 GB, data 3.4 GB a rank and step, at most"
        in text
    )
    assert "GB a process" in text


def test_experts_are_named_with_their_own_sizes() -> None:
    plan = planned("model=deepseek2_lite", *JOB, "parallel.expert=8", "memory=ignore")
    text = text_of(plan, 400)
    assert "16: data 16; experts: expert 8 x expert_tensor 1; 8 micro-batches each" in text
    assert "0 (all ranks alike)" in text


def test_group_that_spans_nodes_and_slots_that_differ_are_noted() -> None:
    plan = planned(
        "model=deepseek2_lite",
        *JOB,
        "parallel.tensor=16",
        "parallel.unaligned=accept",
        "quant=linear_mxfp8",
    )
    assert plan.layout.notes[0] == (
        "parallel.tensor=16: its groups span nodes of 8 processes, so every layer waits for the network"
    )
    assert (
        "linear.dgrad.g, linear.dgrad.w of kv-down (blocks of 32, 36 to a rank)"
        in plan.layout.notes[-1]
    )
    assert "note" in text_of(plan)
    assert planned("training=fast").layout.notes == []
