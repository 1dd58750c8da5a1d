"""Suggestions that make a run fit, each verified with the prediction."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.errors import ConfigError, RunError
from quantexp.memory import room
from quantexp.memory.room import Misfit, Room, misfit, needed_gb, room_here, room_of
from quantexp.schema import Experiment

LARGE = ["training=default", "model=llama32-1b", "training.micro_batch_size=2", "quant=FA_mxfp8"]


def composed(*words: str) -> Experiment:
    return compose([*LARGE, *words], None, {})


def needed(*words: str) -> float:
    return needed_gb(composed(*words))


def misfit_of(room_gb: float, *words: str) -> Misfit | None:
    return misfit(composed(*words), Room(room_gb, "this machine"))


def ways(room_gb: float, *words: str) -> tuple[str, ...]:
    misfit_ = misfit_of(room_gb, *words)
    assert misfit_ is not None
    return misfit_.ways


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("quantexp.memory.room", "quantexp.memory.footprint"):
        monkeypatch.setattr(f"{module}.device_class", lambda _: "cpu")


def test_run_that_fits_is_no_misfit() -> None:
    assert misfit_of(needed() + 0.01) is None


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.2, 0.15])
def test_suggested_words_make_the_run_fit(share: float) -> None:
    room_gb = share * needed()
    for way in ways(room_gb):
        matched = re.fullmatch(r"(.*) takes ([\d.]+) GB", way)
        assert matched, way
        assert needed(*matched[1].split()) <= room_gb
        assert needed(*matched[1].split()) == pytest.approx(float(matched[2]), abs=0.051)


def test_misfit_is_one_line_with_the_need_the_room_and_every_way() -> None:
    too_large = Misfit(
        286.44, Room(25.3, "this machine"), ("a=1 takes 25.1 GB", "b=2 takes 20.0 GB")
    )
    assert str(too_large) == (
        "286.4 GB do not fit in 25.3 GB (this machine): a=1 takes 25.1 GB, or b=2 takes 20.0 GB"
    )


def test_one_change_is_advised_if_it_is_enough() -> None:
    (way,) = ways(needed("training.attention=fused") + 0.01)
    assert way.startswith("training.attention=fused takes")
    room_gb = needed("training.recompute=full") + 0.01
    stochastic = "quant.qk.dgrad_q.dS={format: mxfp4, rounding: stochastic}"
    (way,) = ways(room_gb, stochastic)
    assert way.startswith("training.recompute=full takes"), "no other way takes it"


def test_tiled_attention_is_advised_where_the_fused_kernel_cannot_run() -> None:
    room_gb = needed("training.attention=tiled") + 0.01
    (way,) = ways(room_gb, "quant=more/FA_full_mxfp8")
    assert way.startswith("training.attention=tiled takes")


def test_sequence_and_layers_are_cut_last_and_a_run_that_never_fits_is_reported() -> None:
    all_ = ["training.attention=fused", "training.recompute=full", "training.micro_batch_size=1"]
    shorter, fewer = ways(needed(*all_) - 0.5)
    assert shorter.startswith(f"{' '.join(all_)} training.seq_length=2048 takes")
    assert fewer.startswith(f"{' '.join(all_)} model.num_layers=1")
    assert ways(1.0) == (
        f"{' '.join(all_)} model.num_layers=1 still takes {needed(*all_, 'model.num_layers=1'):.1f} GB; take a "
        "smaller model or another machine",
    )


@pytest.mark.parametrize(
    ("rules", "layers"),
    [
        (["quant.rules=[{layers: [9], modules: [fc1], format: mxfp8_e4m3}]"], 10),
        (["quant.rules=[{layers: [-7], modules: [fc1], format: mxfp8_e4m3}]"], 7),
        (["capture.rules=[{layers: [0, 12], level: off}]"], 13),
    ],
)
def test_no_fewer_layers_are_advised_than_rules_name(rules: list[str], layers: int) -> None:
    assert room._fewest_layers(composed(*rules)) == layers
    composed(*rules, f"model.num_layers={layers}")
    with pytest.raises(ConfigError, match="layers must"):
        composed(*rules, f"model.num_layers={layers - 1}")


def test_run_that_starts_from_weights_keeps_its_depth() -> None:
    started, weights = composed(), composed()
    started.training.start_from, weights.model.init_from = "earlier@6", "folder"
    quick = compose(["training=fast"], None, {})
    for experiment in (started, weights):
        assert room._fewest_layers(experiment) == experiment.model.num_layers
        assert not list(room._quick_test(experiment, 4.0, lambda: quick))


def test_run_that_starts_from_a_run_keeps_its_sequence_length() -> None:
    """The start's position in the data is counted in sequences of that run's length."""
    all_ = ["training.attention=fused", "training.recompute=full", "training.micro_batch_size=1"]
    room_gb = needed(*all_) - 0.5
    assert any("training.seq_length=" in way for way in ways(room_gb))
    started = composed()
    started.training.start_from = "earlier@6"
    too_large = misfit(started, Room(room_gb, "this machine"))
    assert too_large is not None
    (way,) = too_large.ways
    assert way.endswith("GB; take a smaller model or another machine")
    assert "seq_length" not in way


def test_float32_may_become_bf16_and_a_queue_of_captures_shorter() -> None:
    assert "training.precision=bf16" in ways(1.0, "training.precision=fp32")[0]
    captures = ["capture=tensors", "capture.iterations=[3]"]
    (way,) = ways(needed("capture.queue_gb=0.1", *captures) + 0.01, *captures)
    assert way.startswith("capture.queue_gb=0.1 takes"), "it changes no number, so it comes first"


def test_dropping_the_weight_cache_is_the_first_advice() -> None:
    scheme = ["quant=linear_mxfp8", "training.global_batch_size=4"]
    room_gb = needed("training.weight_cache=false", *scheme) + 0.01
    assert ways(room_gb, *scheme)[0].startswith("training.weight_cache=false takes")
    assert "weight_cache" not in ways(1.0)[0], "attention alone keeps no weights"


def test_fewer_processes_are_advised_on_one_machine() -> None:
    words = ["launcher.num_processes=4"]
    (way,) = [way for way in ways(needed() / 2 + 0.01, *words) if "num_processes" in way]
    assert way == f"launcher.num_processes=2 takes {needed('launcher.num_processes=2'):.1f} GB"


def test_quick_test_is_advised_if_it_fits_and_is_not_chosen_yet() -> None:
    quick = compose(["training=fast"], None, {})
    advice = f"training=fast (the quick test) takes {needed_gb(quick):.1f} GB"
    there = Room(4.0, "this machine")
    assert advice in str(misfit(composed(), there, fast=lambda: quick))
    assert "training=fast" not in str(misfit(composed(), Room(1.0, ""), fast=lambda: quick))
    assert "training=fast" not in str(misfit(composed(), there, fast=lambda: None))
    assert "training=fast" not in str(misfit(quick, Room(2.0, ""), fast=lambda: quick))


# The available memory.


def test_room_is_the_machines_share_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "host_memory_gb", lambda: 24.0)
    assert room_of(composed()) == Room(24.0, "this machine")
    shared = Room(12.0, "this machine, for each of 2 processes")
    assert room_of(composed("launcher.num_processes=2")) == shared


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ([], None),
        (["launcher.mem_gb=0"], None),
        (["launcher.mem_gb=16"], Room(16, "launcher.mem_gb=16")),
        (
            ["launcher.mem_gb=16", "launcher.num_processes=4", "launcher.nodes=2"],
            Room(8, "launcher.mem_gb=16, for each of 2 processes"),
        ),
        (["launcher.gpus_per_node=1"], None),
        (["launcher.gpus_per_node=1", "launcher.gpu_type=strange"], None),
        (["launcher.gpus_per_node=1", "launcher.mem_gb=16"], None),
        (
            ["launcher.gpus_per_node=1", "launcher.gpu_type=l4"],
            Room(24 * 2**30 / 1e9, "launcher.gpu_type=l4"),
        ),
        (
            ["launcher.gpus_per_node=1", "launcher.gpu_type=nvidia_a100_1g.10gb"],
            Room(10 * 2**30 / 1e9, "launcher.gpu_type=nvidia_a100_1g.10gb"),
        ),
    ],
    ids=str,
)
def test_room_of_a_job_is_the_request_to_slurm(
    monkeypatch: pytest.MonkeyPatch, words: list[str], there: Room | None
) -> None:
    on_gpu = any("gpus_per_node" in word for word in words)
    monkeypatch.setattr(room, "device_class", lambda _: "cuda" if on_gpu else "cpu")
    assert room_of(composed("launcher=slurm", *words)) == there


def test_more_memory_from_slurm_is_advised_in_whole_gigabytes_a_node() -> None:
    words = ["launcher=slurm", "launcher.mem_gb=16", "launcher.num_processes=2"]
    experiment = composed(*words)
    asks = math.ceil(2 * needed_gb(experiment))
    assert f"launcher.mem_gb={asks} requests enough" in misfit_ways(experiment)


def misfit_ways(experiment: Experiment) -> tuple[str, ...]:
    too_large = misfit(experiment, room_of(experiment))
    assert too_large is not None
    return too_large.ways


def test_started_job_has_the_room_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "host_memory_gb", lambda: 8.0)
    job = composed("launcher=slurm", "launcher.mem_gb=100", "launcher.num_processes=2")
    assert room_here(job) == Room(4.0, "this machine, for each of 2 processes")


def test_job_whose_node_shows_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "device_class", lambda _: "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = (
        "launcher.gpus_per_node=1 was requested, and this node shows no GPU: run quantexp doctor there, or choose "
        "other nodes (launcher.partition), or its CPU (launcher.gpus_per_node=0)"
    )
    with pytest.raises(RunError, match=re.escape(message)):
        room_here(composed("launcher=slurm", "launcher.gpus_per_node=1"))


def test_room_on_gpus_is_the_smallest_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(room, "device_class", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    sizes = [80e9, 40e9, 10e9]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i])
    )
    two = composed("launcher.num_processes=2")
    assert room_of(two) == Room(40.0, "its NVIDIA H100")


def test_plan_has_the_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "host_memory_gb", lambda: 2.0)
    plan = make_plan(compose(["training=fast"], None, {}))
    assert plan.room_gb == 2.0
    assert plan.to_fit is not None
    # 16-bit products through fp32, on a CPU without kernels for them, take 0.1 GB more.
    assert plan.to_fit.startswith(
        (
            "3.1 GB do not fit in 2.0 GB (this machine): ",
            "3.2 GB do not fit in 2.0 GB (this machine): ",
        )
    )
