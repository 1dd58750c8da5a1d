"""What `plan` says, from the configuration alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from quantexp_launchers.local import slots
from rich.console import Console

from quantexp.cli.plan import Plan, make_plan, plan_json, print_plan
from quantexp.config.compose import compose
from quantexp.model.sizes import flops_per_iteration
from quantexp.schema import Experiment

FULL = ["training=default", "capture=tensors"]


def planned(*words: str) -> Plan:
    return make_plan(compose(list(words), None, {}))


@pytest.fixture(scope="module")
def full() -> Plan:
    return planned("quant=FA_linear_mxfp4", *FULL)


def shown(plan: Plan, width: int = 160) -> str:
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=width))
    return out.getvalue()


def test_json_has_the_contracts_keys_for_the_whole_model_without_data(full: Plan) -> None:
    content = json.loads(json.dumps(plan_json(full)))
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


@pytest.mark.parametrize(
    ("store", "words"), [("pt", "tensors (.pt files), st"), ("safetensors", "(safetensors shards)")]
)
def test_the_plan_says_what_values_are_kept_in(store: str, words: str) -> None:
    plan = planned("capture=tensors", f"capture.store={store}")
    assert words in shown(plan, 200)
    assert plan_json(plan)["capture_store"] == store


def test_checkpoints_are_the_published_tensors_in_the_working_dtype(full: Plan) -> None:
    plan = planned("checkpoint.every=400", "checkpoint.at_end=true", *FULL)
    assert (plan.checkpoints, plan.checkpoint_bytes) == (3, 3 * 2 * 1_235_814_400)
    assert "checkpoints  7.4 GB in 3 of them" in shown(plan)
    assert full.checkpoint_bytes == 0
    assert "checkpoints" not in shown(full)


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
    text = " ".join(shown(full).split())
    assert "TFLOP an iteration; 1,000 iterations: " in text
    assert " PFLOP, 524,288,000 tokens" in text


def test_time_is_said_with_the_rate_it_follows_from(full: Plan) -> None:
    plan = replace(full, time_s=11_000.0, product_gflop_per_s=95.2)
    assert (
        "about 3.1 h of training on this machine (measured: 95.2 GFLOP/s in bf16 products)"
        in shown(plan)
    )
    assert full.time_s is not None
    assert set(plan_json(full)) >= {
        "iterations",
        "tokens",
        "tflop",
        "time_s",
        "product_gflop_per_s",
    }


def test_time_of_a_job_is_not_known() -> None:
    plan = planned("training=fast", "launcher=slurm")
    assert (plan.time_s, plan.product_gflop_per_s) == (None, None)
    assert "not known: it does not run on this machine" in shown(plan)
    on_full_gpu = replace(plan, script=None)
    assert "not known: the GPU has no memory free for a measurement" in shown(on_full_gpu)


def test_what_keeps_a_run_from_starting_is_said_last(full: Plan) -> None:
    plan = replace(full, to_fit="9.0 GB do not fit in 1.0 GB (this machine): take another")
    *_, data, memory = shown(plan, 400).splitlines()
    assert data.startswith("will not start: dataset=wikipedia has no data")
    assert memory == f"will not start: {plan.to_fit}"
    anyway = shown(replace(plan, memory="ignore"), 400).splitlines()[-1]
    assert anyway == f"starts although it does not fit (memory=ignore): {plan.to_fit}"


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
def test_quantised_weights_that_are_kept_take_memory(words: list[str], copies: int) -> None:
    plan = planned("training=default", *words)
    assert plan.memory_parts_gb["weight_copies"] == round(
        copies * plan.linear_weight_bytes / 1e9, 3
    )
    told = f"weight copies {plan.memory_parts_gb['weight_copies']:.2f}"
    assert (told in shown(plan, 400)) == (copies > 0), "nothing is said of what takes nothing"
    assert (told[:13] in shown(plan, 400)) == (copies > 0)


def test_recomputing_takes_less_memory_for_activations() -> None:
    kept = planned().memory_parts_gb["activations"]
    assert planned("training.recompute=full").memory_parts_gb["activations"] < kept


def test_sample_lacks_nothing_and_the_command_names_the_folder() -> None:
    plan = planned("training=fast", "paths.root=/somewhere")
    assert plan.missing is None
    assert plan.dataset == "wikipedia (built-in sample)"
    assert plan.commands[0][3].startswith("/somewhere/llama32-1b_wikipedia_bf16-")
    assert "<" not in plan.commands[0][3]


def test_map_changes_within_the_run_are_listed() -> None:
    rules = "quant.rules=[{iterations:[1,4],format:bf16},{iterations:[900,null],format:bf16}]"
    plan = planned("quant=linear_mxfp8", "training=fast", rules)
    assert plan.map_changes_at == [1, 5]
    assert "rules change this map at iterations [5]" in shown(plan)


def test_printed_plan_says_that_emulation_saves_nothing(full: Plan) -> None:
    text = shown(full)
    assert "llama32-1b, 1.24B parameters (1,235,814,400)" in text
    assert "emulation: quantised operands are held in the working dtype" in text
    assert "will not start: dataset=wikipedia has no data" in text
    assert "mxfp4_e2m1, blocks of 32 along input_width, floor" in text
    assert "mxfp4_e2m1, the forward copy" in text
    assert "high (bf16)" in text


def test_layers_that_are_alike_share_a_row() -> None:
    rule = "quant.rules=[{layers:[0,5],sites:[linear],format:bf16}]"
    text = shown(planned("quant=linear_hifp8", rule))
    assert "0,5" in text
    assert "hifp8, one scale a tensor (current), amax to 224" in text


def test_experts_that_are_alike_share_a_row() -> None:
    rule = "quant.rules=[{modules: ['expert1?-fc2'], format: bf16}]"
    words = ("model=deepseek2_lite", "model.num_layers=3", "quant=linear_mxfp8", rule)
    text = " ".join(shown(planned(*words), 200).split())
    assert "shared-fc1 shared-fc2 expert[0-63]-fc1" in text
    assert "expert[0,1,2,3,4,5,6,7,8,9,20," in text
    assert "expert[10-19]-fc2" in text


def test_fused_attention_keeps_no_scores() -> None:
    words = [*FULL, "training.seq_length=4096", "training.micro_batch_size=2"]
    plain = planned(*words).memory_parts_gb["activations"]
    fused = planned(*words, "training.attention=fused").memory_parts_gb["activations"]
    layers, heads, T, sequences = 16, 32, 4096, 2
    scores = layers * heads * T**2 * (4 + 2) * sequences
    operands = layers * T * (3072 + 2048 + 512 + 2048) * 2 * sequences
    kept = layers * heads * T * (4 * 64 * 2 + 4) * sequences
    assert plain - fused == pytest.approx((scores + operands - kept) / 1e9, abs=0.002)


def test_attention_in_tiles_keeps_no_scores() -> None:
    words = [*FULL, "training.seq_length=4096", "training.micro_batch_size=2"]
    plain, tiled = (
        planned(*words, f"training.attention={path}").memory_parts_gb["activations"]
        for path in ("plain", "tiled")
    )
    assert plain - tiled == pytest.approx(16 * 32 * 4096**2 * (4 + 2) * 2 / 1e9, abs=0.002)


@pytest.mark.parametrize(
    ("path", "words"),
    [("plain", "T x T of scores"), ("fused", "torch's kernel"), ("tiled", "a tile of queries")],
)
def test_way_of_attention_is_said(path: str, words: str) -> None:
    plan = planned("training=fast", f"training.attention={path}")
    assert plan_json(plan)["attention"] == path
    assert words in next(line for line in shown(plan).splitlines() if "attention  " in line)


def test_experts_weights_and_activations_are_counted_where_they_are() -> None:
    """By hand: all experts are held, and a token passes six of them."""
    words = ("model=deepseek2_lite", "model.num_layers=2", "training.seq_length=1024")
    plan = planned(*words, "quant=linear_mxfp4")
    attention = 3072 * 2048 + 576 * 2048 + 4096 * 512 + 2048 * 2048
    weights = 2 * attention + 3 * 10944 * 2048 + (64 + 2) * 3 * 1408 * 2048
    assert plan.linear_weight_bytes == 2 * weights
    assert plan.packed_weight_bytes == weights * (4 + 8 / 32) / 8
    heads = 16 * (2 * 192 + 128) + 16 * 128  # q, k and v; what proj multiplies
    attention = 2 * (2048 + 512 + heads) + 16 * 1024 * (4 + 2) + 512 * 8
    norms = 2 * 2048 * 8
    dense = 2 * (2048 + 5 * 10944)
    routed = 2 * (2048 + 5 * 2 * 1408 + 6 * (2 * 2048 + 6 * 1408))
    last = 2048 * (8 + 2)
    activations = 1024 * (2 * (attention + norms) + dense + routed + last)
    assert plan.memory_parts_gb["activations"] == round(activations / 1e9, 3)


def test_unscaled_hifp8_says_so() -> None:
    text = shown(planned("quant=linear_hifp8", "quant.linear.scaling=none"))
    assert "hifp8, unscaled" in text


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("linear_nvfp4", "nvfp4_e2m1, blocks of 16 along tokens, one scale a tensor (exact)"),
        ("linear_fp8", "fp8_e5m2, one scale a tensor (exact), amax to 57344"),
        (
            "linear_hifp8_delayed",
            "hifp8, one scale a tensor (delayed over 16 iterations), amax to 15",
        ),
        (
            "linear_mxfp4_sr_rht",
            "mxfp4_e2m1, blocks of 32 along tokens, floor, rounded stochastically, 3/4 before and 4/3 after, random "
            "Hadamard in blocks of 64",
        ),
    ],
)
def test_other_formats_and_options_are_told_in_full(scheme: str, words: str) -> None:
    text = shown(planned(f"quant=more/{scheme}")).replace("│", " ")
    assert words in " ".join(text.split())


def test_packed_nvfp4_holds_four_bits_and_a_scale_of_eight_for_sixteen() -> None:
    plan = planned("quant=more/linear_nvfp4")
    assert plan.packed_weight_bytes == plan.linear_weight_bytes * (4 + 8 / 16) / 16


def test_plan_does_not_change_the_experiment() -> None:
    experiment: Experiment = compose(["training=fast"], None, {})
    before = repr(experiment)
    make_plan(experiment)
    assert repr(experiment) == before


def test_plan_says_who_will_be_told_what_where() -> None:
    plan = planned("training=fast", "paths.root=/somewhere", "tracking.wandb.enabled=true")
    folder = plan.commands[0][3]
    assert plan.tracking["tensorboard"] == f"{folder}/tensorboard"
    assert plan.tracking["wandb"].startswith(f"project quantexp, run {Path(folder).name}, ")
    assert set(json.loads(json.dumps(plan_json(plan)))["tracking"]) == {"tensorboard", "wandb"}
    text = shown(plan, 300)
    assert plan.tracking["tensorboard"] in text
    assert plan.tracking["wandb"] in text


def test_several_processes_share_the_batch_under_torchrun() -> None:
    one = planned("training=fast", "training.global_batch_size=8")
    two = planned("training=fast", "training.global_batch_size=8", "launcher.num_processes=2")
    assert (one.num_micro_batches_each, two.num_micro_batches_each) == (4, 2)
    assert two.memory_gb_per_gpu == one.memory_gb_per_gpu, "each holds the whole model"
    (command,) = two.commands
    assert command[1:4] == ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert command[-3:-1] == ["-m", "quantexp.training.worker"]
    assert command[-1] != one.commands[0][-1], "another identity, another folder"
    assert "2, data parallel: each holds the whole model" in shown(two)
    assert "2 micro-batches of every iteration" in shown(two)


def test_runs_at_once_are_told_with_what_each_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "visible_gpus", list)
    monkeypatch.setattr(slots, "allowed_cores", lambda: [0, 1, 2, 3])
    plan = planned("training=fast", "launcher.max_parallel=2")
    assert plan.slots == ["core 0-1", "core 2-3"]
    assert plan.missing is None
    assert "at once" in shown(plan)
    assert "2 runs of a sweep: core 0-1; core 2-3" in shown(plan)
    assert "at once" not in shown(planned("training=fast"))


def test_machine_that_is_too_small_for_so_many_runs_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "visible_gpus", list)
    monkeypatch.setattr(slots, "allowed_cores", lambda: [0])
    plan = planned("training=fast", "launcher.max_parallel=2")
    assert plan.slots == []
    assert plan.missing == (
        "launcher.max_parallel=2 needs a core for each run, and this process may use 1; lower it"
    )
    assert "will not start: launcher.max_parallel=2 needs" in shown(plan)


def test_slots_of_this_machine_say_nothing_about_slurm() -> None:
    assert planned("training=fast", "launcher=slurm", "launcher.max_parallel=500").slots == []
