"""The values of a plan, from the configuration alone."""

from __future__ import annotations

import json

import pytest
from quantexp_launchers.local import slots

from quantexp.cli.plan import record
from quantexp.cli.plan_record import Plan, make_plan
from quantexp.config.compose import compose
from quantexp.model.sizes import flops_per_iteration
from quantexp.schema import Experiment

from .plans import FULL, planned, text_of


@pytest.fixture(scope="module")
def full() -> Plan:
    return planned("quant=FA_linear_mxfp4", *FULL)


def test_json_has_the_contracts_keys_for_the_whole_model_without_data(full: Plan) -> None:
    content = json.loads(json.dumps(record(full)))
    assert content["parameters"] == 1_235_814_400
    assert content["memory_gb_per_gpu"] > 1.2358144 * 18, "weights, gradients, master, two moments"
    assert content["commands"][0][1:3] == ["-m", "quantexp.training.worker"]
    assert content["commands"][0][3].endswith("runs/llama32-1b_wikipedia_FA_linear_mxfp4-<hash8>")
    assert "dataset=wikipedia has no data: give dataset.path=PREFIX" in content["missing"]
    assert len(content["precision_map"]) == 16 * (4 * 6 + 2 * 6)
    assert content["precision_map"][0] == {
        "layer": 0,
        "module": "qkv",
        "site": "linear",
        "product": "fprop",
        "operand": "x",
        "format": "mxfp4_e2m1",
        "axis": "input_width",
        "block": 32,
        "scale_rule": "floor",
        "rounding": "even",
        "scaling": None,
        "saturate": None,
        "amax_target": None,
        "reuse": False,
    }


def test_training_state_is_exact(full: Plan) -> None:
    parts = full.memory_parts_gb
    assert parts["weights"] == round(1.2358144 * 2, 3)
    assert parts["main_gradients"] == round(1.2358144 * 4, 3)
    assert parts["optimizer"] == round(1.2358144 * 12, 3)
    assert full.memory_gb_per_gpu == pytest.approx(sum(parts.values()), abs=0.003)


def test_checkpoints_are_the_published_tensors_in_the_working_dtype(full: Plan) -> None:
    plan = planned("checkpoint.every=400", "checkpoint.at_end=true", *FULL)
    assert (plan.checkpoints, plan.checkpoint_bytes) == (3, 3 * 2 * 1_235_814_400)
    assert "checkpoints  7.4 GB in 3 of them" in text_of(plan)
    with_state = planned("checkpoint.at_end=true", "checkpoint.optimizer=true", *FULL)
    assert with_state.checkpoint_bytes == (2 + 12) * 1_235_814_400
    assert full.checkpoint_bytes == 0
    assert "checkpoints" not in text_of(full)


def test_capture_bytes_are_the_tensors_by_hand(full: Plan) -> None:
    T, H, F, query, kv = 4096, 2048, 8192, 2048, 512
    inputs = outputs = weights = 0
    for width_out, width_in in ((query + 2 * kv, H), (H, query), (2 * F, H), (H, F)):
        inputs += T * width_in
        outputs += T * width_out
        weights += width_out * width_in
    attention = 2 * T * (query + 2 * kv) + 2 * T * query  # q k v and theirs, o and dO
    assert full.capture_bytes == 16 * 2 * (2 * inputs + 2 * outputs + weights + attention)


@pytest.mark.parametrize("level", ["off", "stats"])
def test_no_full_tensors_take_no_bytes(level: str) -> None:
    assert planned(f"capture={level}").capture_bytes == 0


def test_work_is_that_of_the_whole_training(full: Plan) -> None:
    flop = flops_per_iteration(compose(FULL, None, {}).model, 4096, 128)
    assert full.tflop_per_iteration == flop / 1e12
    assert full.tflop == 1000 * flop / 1e12
    assert full.tokens == 1000 * 128 * 4096
    text = " ".join(text_of(full).split())
    assert "TFLOP an iteration; 1,000 iterations: " in text
    assert " PFLOP, 524,288,000 tokens" in text


def test_packed_weights_are_four_bits_and_a_scale_a_block(full: Plan) -> None:
    count = full.linear_weight_bytes // 2
    assert full.packed_weight_bytes == count * (4 + 8 / 32) / 8


def test_packed_weights_of_the_working_precision_are_the_weights() -> None:
    plan = planned("quant=FA_mxfp8")
    assert plan.packed_weight_bytes == plan.linear_weight_bytes


def test_fp32_keeps_no_second_master_weights() -> None:
    parts = planned("training.precision=fp32").memory_parts_gb
    assert parts["weights"] == round(1.2358144 * 4, 3)
    assert parts["optimizer"] == round(1.2358144 * 8, 3)


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        (["quant=linear_mxfp8"], 2),
        (["quant=linear_hifp8"], 1),
        (["quant=linear_mxfp8", "training.global_batch_size=1"], 1),
        (["quant=linear_mxfp8", "training.weight_cache=false"], 0),
        (["quant=linear_mxfp8", "quant.rules=[{format:bf16,iterations:[1,10]}]"], 2),
        (["quant=FA_mxfp8"], 0),
    ],
    ids=str,
)
def test_cached_quantised_weights_take_memory(words: list[str], copies: int) -> None:
    plan = planned("training=default", *words)
    assert plan.memory_parts_gb["weight_copies"] == round(
        copies * plan.linear_weight_bytes / 1e9, 3
    )
    line = f"weight copies {plan.memory_parts_gb['weight_copies']:.2f}"
    assert (line in text_of(plan, 400)) == (copies > 0), "nothing is said of what takes nothing"
    assert (line[:13] in text_of(plan, 400)) == (copies > 0)


def test_recomputing_takes_less_memory_for_activations() -> None:
    activations = planned().memory_parts_gb["activations"]
    assert planned("training.recompute=full").memory_parts_gb["activations"] < activations


def test_sample_needs_nothing_else_and_the_command_names_the_folder() -> None:
    plan = planned("training=fast", "paths.root=/somewhere")
    assert plan.missing is None
    assert plan.dataset == "wikipedia (built-in sample)"
    assert plan.commands[0][3].startswith("/somewhere/llama32-1b_wikipedia_bf16-")
    assert "<" not in plan.commands[0][3]


def test_fused_attention_keeps_no_scores() -> None:
    words = [*FULL, "training.seq_length=4096", "training.micro_batch_size=2"]
    plain = planned(*words).memory_parts_gb["activations"]
    fused = planned(*words, "training.attention=fused").memory_parts_gb["activations"]
    layers, heads, T, sequences = 16, 32, 4096, 2
    scores = layers * T**2 * (heads * (4 + 2) * sequences + 1)  # and a mask
    operands = layers * T * (3072 + 2048 + 512 + 2048) * 2 * sequences
    saved_bytes = layers * heads * T * (4 * 64 * 2 + 4) * sequences
    assert plain - fused == pytest.approx((scores + operands - saved_bytes) / 1e9, abs=0.002)


def test_attention_in_tiles_keeps_no_scores() -> None:
    words = [*FULL, "training.seq_length=4096", "training.micro_batch_size=2"]
    plain, tiled = (
        planned(*words, f"training.attention={path}").memory_parts_gb["activations"]
        for path in ("plain", "tiled")
    )
    scores_and_mask = 4096**2 * (32 * (4 + 2) * 2 + 1)
    assert plain - tiled == pytest.approx(16 * scores_and_mask / 1e9, abs=0.002)


def test_experts_count_with_all_weights_and_the_activations_of_the_chosen_ones() -> None:
    """By hand: all experts are in memory, and a token passes through six of them."""
    words = ("model=deepseek2_lite", "model.num_layers=2", "training.seq_length=1024")
    plan = planned(*words, "quant=linear_mxfp4")
    attention = 3072 * 2048 + 576 * 2048 + 4096 * 512 + 2048 * 2048
    weights = 2 * attention + 3 * 10944 * 2048 + (64 + 2) * 3 * 1408 * 2048
    assert plan.linear_weight_bytes == 2 * weights
    assert plan.packed_weight_bytes == weights * (4 + 8 / 32) / 8
    heads = 16 * (2 * 192 + 128) + 16 * 128  # q, k and v; the input of proj; then scores and a mask
    attention = 2 * (2048 + 512 + heads) + 16 * 1024 * (4 + 2) + 1024 + 512 * 8
    norms = 2 * 2048 * 8
    dense = 2 * (2048 + 5 * 10944)
    routed = 2 * (2048 + 5 * 2 * 1408 + 6 * (2 * 2048 + 6 * 1408))
    last = 2048 * (8 + 2)
    activations = 1024 * (2 * (attention + norms) + dense + routed + last)
    assert plan.memory_parts_gb["activations"] == round(activations / 1e9, 3)


def test_packed_nvfp4_is_four_bits_and_a_scale_of_eight_bits_for_sixteen_values() -> None:
    plan = planned("quant=more/linear_nvfp4")
    assert plan.packed_weight_bytes == plan.linear_weight_bytes * (4 + 8 / 16) / 16


def test_plan_does_not_change_the_experiment() -> None:
    experiment: Experiment = compose(["training=fast"], None, {})
    before = repr(experiment)
    make_plan(experiment)
    assert repr(experiment) == before


def test_several_processes_share_the_batch_under_torchrun() -> None:
    one = planned("training=fast", "training.global_batch_size=8")
    two = planned("training=fast", "training.global_batch_size=8", "launcher.num_processes=2")
    assert (one.num_micro_batches_each, two.num_micro_batches_each) == (4, 2)
    states = {plan.memory_parts_gb["optimizer"] for plan in (one, two)}
    assert max(states) == pytest.approx(2 * min(states), abs=0.001), "each keeps half of the state"
    whole = planned(
        "training=fast",
        "training.global_batch_size=8",
        "launcher.num_processes=2",
        "training.distributed_optimizer=false",
    )
    assert whole.memory_gb_per_gpu == one.memory_gb_per_gpu, "each holds the whole model"
    (command,) = two.commands
    assert command[1:4] == ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert command[-3:-1] == ["-m", "quantexp.training.worker"]
    assert command[-1] != one.commands[0][-1], "another identity, another folder"
    assert "2, data parallel: each holds the whole model" in text_of(two)
    assert "2 micro-batches of every iteration" in text_of(two)


def test_simultaneous_runs_are_listed_with_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "visible_gpus", list)
    monkeypatch.setattr(slots, "allowed_cores", lambda: [0, 1, 2, 3])
    plan = planned("training=fast", "launcher.max_parallel=2")
    assert plan.slots == ["core 0-1", "core 2-3"]
    assert plan.missing is None
    assert "at once" in text_of(plan)
    assert "2 runs of a sweep: core 0-1; core 2-3" in text_of(plan)
    assert "at once" not in text_of(planned("training=fast"))


def test_machine_that_is_too_small_for_the_runs_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "visible_gpus", list)
    monkeypatch.setattr(slots, "allowed_cores", lambda: [0])
    plan = planned("training=fast", "launcher.max_parallel=2")
    assert plan.slots == []
    assert plan.missing == (
        "launcher.max_parallel=2 needs a core for each run, and this process may use 1; lower it"
    )
    assert "will not start: launcher.max_parallel=2 needs" in text_of(plan)


def test_slots_of_this_machine_say_nothing_about_slurm() -> None:
    assert planned("training=fast", "launcher=slurm", "launcher.max_parallel=500").slots == []
