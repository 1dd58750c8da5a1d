from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quantexp.errors import ConfigError
from quantexp.formats.definitions.python import python_definition
from quantexp.launch.identity import identity
from quantexp.quant.alignment import check_alignment
from quantexp.quant.outside_products import state_records, state_slots
from quantexp.quant.scheme import content_hash
from quantexp.schema import Experiment, QuantConfig, Unaligned

Tiny = Callable[..., Experiment]
FIRST = "quant.optimizer.exp_avg.format"
SECOND = "quant.optimizer.exp_avg_sq.format"
MASTER = "quant.optimizer.master.format"
REDUCE = "quant.grad_reduce.format"
RANKS = ["launcher.num_processes=2", "training.micro_batch_size=1"]


def test_a_scheme_that_rounds_nothing_else_says_nothing_of_it() -> None:
    assert state_records(QuantConfig()) == []
    # That of bf16 before there were moments and gradients in a scheme.
    assert content_hash(QuantConfig()).startswith("ddc74ca373c5")


def test_entries_of_the_map_say_what_is_rounded_and_where(tiny: Tiny) -> None:
    words = [f"{FIRST}=fp8_e4m3", "quant.grad_reduce.at=each_hop", f"{REDUCE}=mxfp8"]
    quant = tiny("quant=bf16", *words, *RANKS).quant
    assert list(map(str, state_slots(quant))) == [
        "optimizer.adam.exp_avg",
        "grad_reduce.each_hop.dw",
    ]
    first, reduced = state_records(quant)
    assert (first["layer"], first["module"]) == (None, "all parameters")
    assert (first["format"], first["scaling"]) == ("fp8_e4m3", "exact")
    kept = ("format", "axis", "block", "scale_rule", "rounding")
    assert [reduced[key] for key in kept] == ["mxfp8_e4m3", "input_width", 32, "rceil", "even"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([f"{FIRST}=mxfp8"], "exp_avg_mxfp8"),
        ([f"{FIRST}=mxfp8", f"{SECOND}=mxfp8"], "adam_mxfp8"),
        ([f"{FIRST}=fp8_e4m3", f"{SECOND}=mxfp8"], "exp_avg_fp8_e4m3+exp_avg_sq_mxfp8"),
        (["quant/linear=mxfp8", f"{SECOND}=mxfp8"], "linear_mxfp8+exp_avg_sq_mxfp8"),
        ([f"{REDUCE}=mxfp8"], "grad_reduce_mxfp8"),
        ([f"{REDUCE}=mxfp8", "quant.grad_reduce.at=each_hop"], "grad_reduce_mxfp8~"),
        ([f"{FIRST}=mxfp8", "quant.optimizer.exp_avg.rounding=stochastic"], "exp_avg_mxfp8~"),
        ([f"{FIRST}=fp8_1x128"], "exp_avg_fp8_1x128~"),
        ([f"{FIRST}=mxfp8", "quant.optimizer.exp_avg.scale_rule=rceil"], "exp_avg_mxfp8"),
        ([f"{MASTER}=mxfp8"], "master_mxfp8"),
        ([f"{MASTER}=mxfp8", "quant.optimizer.master.feedback=true"], "master_mxfp8~"),
        ([f"{MASTER}=mxfp8", f"{FIRST}=mxfp8"], "master_mxfp8+exp_avg_mxfp8"),
        (["quant=more/adam_fp8_eco", "quant/linear=mxfp8"], "linear_mxfp8+master_fp8_e4m3~"),
        (["quant=more/adam_fp8_eco"], "adam_fp8_eco"),
        (["quant=more/adam_fp8_block"], "adam_fp8_block"),
        (["quant=more/adam_fp8_fp16"], "adam_fp8_fp16"),
    ],
)
def test_names_say_what_is_rounded(tiny: Tiny, words: list[str], name: str) -> None:
    found = str(tiny("quant=bf16", *words, *RANKS).quant.name)
    assert found.startswith(name) if name.endswith("~") else found == name


def test_what_is_rounded_is_part_of_the_identity(tiny: Tiny) -> None:
    plain, rounded = tiny("quant=bf16"), tiny("quant=bf16", f"{FIRST}=mxfp8")
    without = tiny("quant=bf16", f"{FIRST}=null")

    def scheme(experiment: Experiment) -> Any:
        return identity(experiment, "cpu")["scheme"]

    assert scheme(plain) == scheme(without) != scheme(rounded)
    assert scheme(rounded)[0][1][-1] == state_records(rounded.quant)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [f"{FIRST}=bf16"],
            "exp_avg.format must be one of bfloat16, fp16_scaled, .* null for float32",
        ),
        ([f"{FIRST}=reuse"], "exp_avg.format must be one of .*, got 'reuse'"),
        (
            ["quant.optimizer.exp_avg.block=32"],
            "exp_avg.block is set and quant.optimizer.exp_avg.format is not; set the format, or remove",
        ),
        (
            ["quant.grad_reduce.at=each_hop"],
            "grad_reduce.at is set and quant.grad_reduce.format is",
        ),
        (
            [f"{FIRST}=fp8_128x128"],
            "fp8_128x128 has blocks of several rows, and ranks divide param",
        ),
        (
            [f"{FIRST}=fp8_e4m3", "quant.optimizer.exp_avg.scaling=delayed"],
            "exp_avg.scaling must not be delayed, .* take current or exact",
        ),
        (
            [f"{FIRST}=fp8_e4m3", "quant.optimizer.exp_avg.block=32"],
            r"exp_avg.block does not apply to fp8_e4m3, got 32; remove it$",
        ),
        ([f"{REDUCE}=mxfp8"], "got one rank, which sends none; take launcher.num_processes=2"),
        (
            [f"{REDUCE}=mxfp8", "launcher.num_processes=2", "parallel.tensor=2"],
            "which sends none; take launcher.num_processes=4 or more",
        ),
    ],
)
def test_refusals(tiny: Tiny, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny("quant=bf16", *words)


def test_format_in_python_is_refused() -> None:
    quant = QuantConfig()
    quant.formats["mine"] = python_definition("colorsys:ONE_THIRD")
    quant.optimizer.exp_avg.format = "mine"
    with pytest.raises(ConfigError, match="is a class of yours, and ranks divide parameters"):
        state_slots(quant)


def test_a_layout_that_divides_blocks_must_be_accepted(tiny: Tiny) -> None:
    layout = ["parallel.tensor=2", "launcher.num_processes=2", "quant=bf16", f"{FIRST}=fp8_1x128"]
    with pytest.raises(ConfigError, match=r"optimizer.adam.exp_avg of proj.*\(blocks of 128, "):
        check_alignment(tiny(*layout))
    check_alignment(tiny(*layout, "parallel.unaligned=accept"))
    check_alignment(tiny(*layout, f"{FIRST}=fp8_e4m3"))
    evaluation = tiny(*layout, "parallel.unaligned=accept")
    evaluation.parallel.unaligned, evaluation.evaluate.only = Unaligned.refuse, True
    check_alignment(evaluation)


KEPT, RESET, PULL, SMOOTH = (
    f"quant.optimizer.{key}" for key in ("master", "reset", "pull", "smooth")
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{KEPT}.feedback=true"], "master.feedback is set and .*master.format is not; set the"),
        ([f"{KEPT}.parameters=all"], "master.parameters is set and .*master.format is not"),
        ([f"{KEPT}.format=fp8_128x128"], "fp8_128x128 has blocks of several rows"),
        (
            [f"{KEPT}={{format: mxfp8, feedback: true}}", "training.optimizer=muon"],
            "Muon orthogonalises its momentum, .* take training.optimizer=adam, or remove it",
        ),
        (
            [f"{KEPT}={{format: mxfp8, feedback: true}}", "training.adam_beta1=0"],
            "training.adam_beta1=0 keeps nothing; take a larger one, or remove it",
        ),
        ([f"{RESET}.every=9"], "reset.every is set and quant.optimizer.reset.format is not; set"),
        (
            [f"{RESET}={{format: mxfp8, every: 5, over: 4}}"],
            r"reset.every must be above quant.optimizer.reset.over \+ 1, .* got 5 and 4",
        ),
        ([f"{RESET}={{format: mxfp8, start: 1}}"], "start must be at least 0 and below 1, got 1"),
        (
            [f"{RESET}={{format: mxfp8, rounding: stochastic}}"],
            "would seem to oscillate; take even or away",
        ),
        (
            [f"{PULL}.strength=3"],
            "pull.strength is set and quant.optimizer.pull.format is not; set",
        ),
        ([f"{PULL}={{format: mxfp8, strength: 0}}"], "strength must be a positive number, got 0"),
        ([f"{PULL}={{format: mxfp8, start: -0.1}}"], "start must be at least 0 and below 1, got -"),
        (
            [f"{SMOOTH}.strength=3"],
            "smooth.strength is set and quant.optimizer.smooth.format is not",
        ),
        ([f"{SMOOTH}.format=nvfp4_four_over_six"], "has more than a scale that follows from a"),
        (
            [f"{SMOOTH}={{format: mxfp8, rounding: stochastic}}"],
            "the term is that of stochastic rounding, and draws nothing; remove it",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(words: list[str], message: str, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny("quant=bf16", *words)
