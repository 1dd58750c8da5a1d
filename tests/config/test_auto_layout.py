"""`parallel=auto`: what it chooses from, in which order, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from quantexp.cli.plan import record
from quantexp.cli.plan_record import make_plan
from quantexp.config.auto_layout import BETWEEN, PRODUCTS, WITHIN, candidates
from quantexp.config.compose import compose
from quantexp.config.load import read, save
from quantexp.errors import ConfigError
from quantexp.memory.communication import communication_bytes
from quantexp.memory.footprint import fullest_rank
from quantexp.model.layout import Layout
from quantexp.model.sizes import flops_per_iteration
from quantexp.quant.alignment import unaligned_slots
from quantexp.schema import Experiment
from tests.cli.plans import text_of

NODE = ("launcher=slurm", "launcher.num_processes=8", "launcher.gpus_per_node=8")
NODES = (
    "launcher=slurm",
    "launcher.num_processes=64",
    "launcher.nodes=8",
    "launcher.gpus_per_node=8",
)
WORDS = ("parallel=auto", "memory=80", "training.attention=tiled", "quant=linear_mxfp4")


@cache
def composed(*words: str) -> Experiment:
    return compose([*WORDS, *words], None, {})


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    return str(caught.value)


CASES = [(model, where) for model in ("llama31-8b", "deepseek2_lite") for where in (NODE, NODES)]


@pytest.mark.parametrize(("model", "where"), CASES, ids=str)
def test_every_candidate_fits_is_aligned_and_stays_in_a_node(
    model: str, where: tuple[str, ...]
) -> None:
    experiment = composed(f"model={model}", *where)
    for one in candidates(experiment)[:20]:
        possible = replace(experiment, parallel=one.parallel)
        assert one.memory_gb == fullest_rank(possible).gb <= 80
        assert unaligned_slots(possible) == []
        assert 8 % one.parallel.tensor == 0


def test_first_candidate_has_the_least_cost_by_hand() -> None:
    experiment = composed("model=llama31-8b", *NODES)
    chosen = Layout.of(experiment)
    model, training = experiment.model, experiment.training
    sent = communication_bytes(experiment)
    micro_batches = training.global_batch_size // chosen.data
    idle = (chosen.pipeline - 1) / chosen.chunks / micro_batches
    seconds = idle * flops_per_iteration(model, 4096, 128) / 64 / PRODUCTS
    for kind, ranks in {
        "tensor": chosen.tensor,
        "context": chosen.tensor * chosen.context,
        "pipeline": 64,
        "data": 64 // chosen.pipeline,
    }.items():
        seconds += sent.get(kind, 0) / (WITHIN if ranks <= 8 else BETWEEN)
    listed = candidates(experiment)
    assert listed[0].parallel == experiment.parallel
    assert listed[0].cost_s == pytest.approx(seconds)
    assert [one.cost_s for one in listed] == sorted(one.cost_s for one in listed)


def test_less_memory_leaves_fewer_layouts() -> None:
    experiment = composed("model=llama31-8b", *NODE)
    all_of_them = {str(one.parallel) for one in candidates(experiment)}
    fewer = {str(one.parallel) for one in candidates(replace(experiment, memory=60.0))}
    assert fewer < all_of_them


def test_chosen_sizes_are_numbers_in_the_configuration_of_the_run(tmp_path: Path) -> None:
    experiment = composed("model=llama31-8b", *NODE)
    assert not experiment.parallel.auto
    assert Layout.of(experiment).num_processes == 8
    save(experiment, tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml") == experiment


def test_plan_lists_the_layouts_with_the_chosen_one_first() -> None:
    plan = make_plan(composed("model=llama31-8b", *NODE))
    first = record(plan)["layout"]["candidates"][0]
    assert first["pipeline"] == plan.layout.pipeline
    assert first["memory_gb"] == pytest.approx(plan.memory_gb_per_gpu, abs=0.001)
    text = text_of(plan)
    assert f"layouts that fit: 10 of {len(plan.layout.candidates)}" in text
    row = next(line for line in text.splitlines() if f"{first['cost_s']:.3g} s" in line)
    assert f"{first['memory_gb']:.1f} GB" in row


def test_other_layouts_list_nothing() -> None:
    experiment = compose(
        ["training=fast", "launcher.num_processes=2", "parallel.tensor=2"], None, {}
    )
    assert make_plan(experiment).layout.candidates == []


def test_sizes_beside_auto_are_refused() -> None:
    assert refusal("model=llama31-8b", *NODE, "parallel.tensor=2") == (
        "parallel.tensor follows from parallel=auto and cannot be set, got 2; drop one of them"
    )


def test_unknown_memory_is_refused() -> None:
    assert refusal("model=llama31-8b", *NODE, "memory=check") == (
        "parallel=auto needs the memory of each process, which the request does not state; give memory=80 (GB)"
    )


def test_too_little_memory_is_refused_with_the_least_that_a_layout_needs() -> None:
    words = refusal("model=llama31-8b", *NODE, "memory=20")
    assert words.startswith(
        "parallel=auto: no layout of launcher.num_processes=8 fits in 20 GB (memory=20), the smallest takes "
    )
    assert words.endswith(
        " GB; take more processes, or training.recompute=full, training.attention=tiled or training.weight_cache=false"
    )
    smallest = float(words.partition("smallest takes ")[2].split()[0])
    fitting = composed("model=llama31-8b", *NODE, f"memory={smallest + 0.1:.1f}")
    assert fullest_rank(fitting).gb == pytest.approx(smallest, abs=0.1)


def test_processes_that_no_layout_uses_are_refused() -> None:
    words = ("model=llama31-8b", "launcher=slurm", "launcher.num_processes=29", "launcher.nodes=29")
    assert refusal(*words) == (
        "parallel=auto: no layout of 29 processes runs llama31-8b with aligned blocks and "
        "training.global_batch_size=128; choose another launcher.num_processes or batch"
    )


def test_any_other_mistake_is_named_as_without_auto() -> None:
    assert refusal("model=llama31-8b", *NODE, "training.min_lr=1") == (
        "training.min_lr must be at most training.lr=0.0003, got 1; take training.min_lr=3e-05"
    )
    assert "launcher.num_processes must be at least 0" in refusal(
        "model=llama31-8b", "launcher.num_processes=-1"
    )
