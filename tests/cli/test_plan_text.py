"""The printed text of a plan."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.cli.plan import record
from quantexp.cli.plan_record import Plan, make_plan, with_time
from quantexp.cli.plan_text import show, tflop
from quantexp.config.compose import compose
from quantexp.folders import quoted
from tests.pasting import words_of

from .plans import FULL, planned, text_of


@pytest.fixture(scope="module")
def full() -> Plan:
    return planned("quant=FA_linear_mxfp4", *FULL)


@pytest.mark.parametrize(
    ("store", "words"), [("pt", "tensors (.pt files), st"), ("safetensors", "(safetensors shards)")]
)
def test_the_plan_has_the_storage_of_captured_values(store: str, words: str) -> None:
    plan = planned("capture=tensors", f"capture.store={store}")
    assert words in text_of(plan, 200)
    assert record(plan)["capture_store"] == store


def test_the_plan_has_the_memory_of_a_ring() -> None:
    plan = planned("capture=off", "capture.ring=20")
    assert (plan.ring, plan.ring_bytes > 0, plan.dossier_bytes > 0) == (20, True, True)
    shown = replace(plan, ring_bytes=128_700_000, dossier_bytes=13_200_000_000)
    assert (
        "statistics of 20 iterations, 128.7 MB of host memory; a dossier has 13.2 GB of values"
        in text_of(shown, 200)
    )
    assert "ring" not in text_of(planned("capture=off"), 200)


def test_time_is_printed_with_the_measured_rate(full: Plan) -> None:
    plan = replace(full, time_s=11_000.0, product_gflop_per_s=95.2)
    assert (
        "about 3.1 h of training on this machine (measured: 95.2 GFLOP/s in bf16 products)"
        in text_of(plan)
    )
    fast = planned("training=fast", "model.num_layers=1")
    assert fast.time_s is not None
    assert set(record(fast)) >= {
        "iterations",
        "tokens",
        "tflop",
        "time_s",
        "product_gflop_per_s",
    }


def test_the_map_is_printed_before_the_machine_is_measured(full: Plan) -> None:
    out = io.StringIO()

    def complete(plan: Plan) -> Plan:
        assert "precision map" in out.getvalue()
        assert "time " not in out.getvalue()
        return replace(plan, time_s=60.0, product_gflop_per_s=95.2)

    show(full, Console(file=out, width=160), complete)
    assert "about 60 s of training on this machine" in out.getvalue()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0.0, "0.00 MFLOP"),
        (0.0000002, "0.20 MFLOP"),
        (0.004, "4.0 GFLOP"),
        (0.19, "0.19 TFLOP"),
        (1234.5, "1,234.5 TFLOP"),
        (12_345.0, "12 PFLOP"),
    ],
)
def test_work_has_a_unit_in_which_it_is_not_zero(number: float, words: str) -> None:
    assert tflop(number) == words


def test_a_run_that_does_not_fit_has_no_time(full: Plan) -> None:
    plan = replace(full, to_fit="9.0 GB do not fit", time_s=None, product_gflop_per_s=None)
    assert with_time(plan, compose(["training=fast"], None, {})) == plan
    assert "not known: it does not fit on this machine" in text_of(plan)


def test_variables_of_the_old_scripts_are_printed_below_the_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp8")
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "0")
    plan = make_plan(compose(["training=fast"]))
    lines = [line.strip() for line in text_of(plan).splitlines()]
    scheme = next(i for i, line in enumerate(lines) if line.startswith("scheme "))
    assert lines[scheme + 1 : scheme + 3] == record(plan)["from_environment"]
    assert lines[scheme + 1] == "CUSTOM_QUANT_TYPE=mxfp8 stands for quant=FA_linear_mxfp8"
    assert lines[scheme + 2] == "TENSOR_SAVE_ENABLED=0 stands for capture=off"


def test_time_of_a_job_is_unknown() -> None:
    plan = planned("training=fast", "launcher=slurm")
    assert (plan.time_s, plan.product_gflop_per_s) == (None, None)
    assert "not known: it does not run on this machine" in text_of(plan)
    on_full_gpu = replace(plan, script=None)
    assert "not known: the GPU has no memory free for a measurement" in text_of(on_full_gpu)


def test_reasons_why_a_run_cannot_start_are_first_and_the_map_follows(full: Plan) -> None:
    plan = replace(full, to_fit="9.0 GB do not fit in 1.0 GB (this machine): take another")
    data, memory, title, *_ = text_of(plan, 400).splitlines()
    assert data.startswith("will not start: dataset=wikipedia has no data")
    assert memory == f"will not start: {plan.to_fit}"
    assert title.strip() == "precision map"
    anyway = text_of(replace(plan, memory="ignore"), 400).splitlines()[1]
    assert anyway == f"starts although it does not fit (memory=ignore): {plan.to_fit}"


def test_map_changes_within_the_run_are_listed() -> None:
    rules = "quant.rules=[{iterations:[1,4],format:bf16},{iterations:[900,null],format:bf16}]"
    plan = planned("quant=linear_mxfp8", "training=fast", rules)
    assert plan.map_changes_at == [1, 5]
    assert "rules change this map at iterations [5]" in text_of(plan)


def test_printed_plan_says_that_emulation_saves_nothing(full: Plan) -> None:
    text = text_of(full)
    assert "llama32-1b, 1.24B parameters (1,235,814,400)" in text
    assert "emulation: quantised operands are held in the working dtype" in text
    assert "will not start: dataset=wikipedia has no data" in text
    assert "mxfp4_e2m1, blocks of 32 along input_width, floor" in text
    assert "mxfp4_e2m1, the forward copy" in text
    assert "high (bf16)" in text


def test_layers_that_are_alike_share_a_row() -> None:
    rule = "quant.rules=[{layers:[0,5],sites:[linear],format:bf16}]"
    text = text_of(planned("quant=linear_hifp8", rule))
    assert "0,5" in text
    assert "hifp8, one scale a tensor (current), amax to 224" in text


def test_output_layer_has_no_number_and_the_embedding_is_explained() -> None:
    words = ("quant=bf16", "quant/output=mxfp8")
    text = " ".join(text_of(planned(*words), 200).split())
    assert "output embedding output.lookup.w mxfp8_e4m3, blocks of 32 along input_width" in text
    assert "embedding tied to the output layer's weight: it looks up the quantised weight" in text
    untied = " ".join(text_of(planned(*words, "model.tie_embeddings=false"), 200).split())
    assert "not tied to the output layer's weight: it stays in high precision" in untied
    assert "output output output.wgrad.x" in untied
    assert "embedding" not in text_of(planned("quant=linear_mxfp8"))


def test_experts_that_are_alike_share_a_row() -> None:
    rule = "quant.rules=[{modules: ['expert1?-fc2'], format: bf16}]"
    words = ("model=deepseek2_lite", "model.num_layers=3", "quant=linear_mxfp8", rule)
    text = " ".join(text_of(planned(*words), 200).split())
    assert "shared-fc1 shared-fc2 expert[0-63]-fc1" in text
    assert "expert[0,1,2,3,4,5,6,7,8,9,20," in text
    assert "expert[10-19]-fc2" in text


@pytest.mark.parametrize(
    ("path", "words"),
    [("plain", "T x T of scores"), ("fused", "torch's kernel"), ("tiled", "a tile of queries")],
)
def test_attention_path_is_printed(path: str, words: str) -> None:
    plan = planned("training=fast", f"training.attention={path}")
    assert record(plan)["attention"] == path
    assert words in next(
        line for line in text_of(plan).splitlines() if line.startswith("attention  ")
    )


def test_unscaled_hifp8_is_marked() -> None:
    text = text_of(planned("quant=linear_hifp8", "quant.linear.scaling=none"))
    assert "hifp8, unscaled" in text


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("linear_nvfp4", "nvfp4_e2m1, blocks of 16 along tokens, one scale a tensor (exact)"),
        (
            "linear_mxint8 quant.linear.rounding=zero",
            "rounded towards zero",
        ),
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
        (
            "adam_fp8_eco",
            "amax to 448, rounded stochastically, what it takes away added to the first moment",
        ),
        (
            "FA_bf16_flash_raised_max",
            "exp(S - m), the product divided by its row's sum, m 2 times a repeated maximum, delta from dO and o",
        ),
        ("smooth_int4", "100000 times the loss of random rounding in the gradient"),
        (
            "linear_mxfp4_cage",
            "weights pulled towards it, strength 10, after 80% of the training",
        ),
        (
            "linear_nvfp4_tetrajet_v2_reset",
            "weights that oscillate reset to it, ratio 8, 50 of 200 iterations observed, after 64% of the training",
        ),
    ],
)
def test_other_formats_and_options_are_printed_in_full(scheme: str, words: str) -> None:
    text = text_of(planned(*f"quant=more/{scheme}".split())).replace("│", " ")
    assert words in " ".join(text.split())


def test_the_size_of_packed_master_weights_is_printed() -> None:
    """8 bits in place of 32 for each weight of a linear layer."""
    plan = planned("quant=more/adam_fp8_eco")
    linear = plan.linear_weight_bytes // 2
    assert plan.master_bytes - plan.packed_master_bytes == 3 * linear
    assert "; master weights " in " ".join(text_of(plan, 300).split())


@pytest.mark.parametrize("name", ["new\nline", "a\ttab", "left\u202e", "it's here"])
def test_a_shell_reads_the_command_of_a_plan_back_from_its_one_line(
    name: str, tmp_path: Path
) -> None:
    plan = planned("training=fast", f"paths.root={quoted(str(tmp_path / name))}")
    assert name in plan.commands[0][-1]
    (line,) = [line for line in text_of(plan, 800).splitlines() if line.startswith("command ")]
    assert words_of(line.removeprefix("command")) == plan.commands[0]


def test_plan_lists_the_trackers_and_their_destinations() -> None:
    plan = planned("training=fast", "paths.root=/somewhere", "tracking.wandb.enabled=true")
    folder = plan.commands[0][3]
    assert plan.tracking["tensorboard"] == f"{folder}/tensorboard"
    assert plan.tracking["wandb"].startswith(f"project quantexp, run {Path(folder).name}, ")
    assert set(json.loads(json.dumps(record(plan)))["tracking"]) == {"tensorboard", "wandb"}
    text = text_of(plan, 300)
    assert plan.tracking["tensorboard"] in text
    assert plan.tracking["wandb"] in text


def test_plan_counts_the_curves_of_statistics_and_says_what_a_limit_leaves() -> None:
    words = ("training=fast", "model.num_layers=2", "tracking.statistics=[amax]")
    assert record(planned("training=fast"))["curves"] == 0
    assert "curves" not in text_of(planned("training=fast"))
    whole = planned(*words)
    assert (whole.curves, whole.curves_left_out, whole.curve_layers) == (56, 0, [0, 1])
    assert "56 curves of captured statistics\n" in "\n".join(
        line.rstrip() for line in text_of(whole).splitlines()
    )
    bf16 = planned("training=fast", "quant=bf16", "tracking.statistics=[sqnr]")
    assert record(bf16)["curves_missing"] == ["sqnr"]
    assert "no curves of sqnr: nothing is quantised" in text_of(bf16)
    limited = planned(*words, "tracking.most_curves=30")
    assert "28 of 56 curves of captured statistics, of layer 0: tracking.most_curves" in text_of(
        limited, 300
    )
