"""Every layout computes what one process computes; each fault of a layout is noticed.

In fp32 the ranks of a layout add the same products as one process, in another order. A sum of n terms in another order
differs by some n 2^-24 of the sum of magnitudes at most, which leaves errors of some 1e-7 in a parameter's gradient,
relative in the 2-norm. Wrong operands of a 4- or 8-bit format differ by 1e-2 and more. An element within 1e-7 of the
boundary between two grid points may be rounded to the other one, though, and quantised layers enlarge that: such a
seed tells nothing. A sound layout therefore agrees in at least one of three seeds, or of six where random numbers give
every element such a boundary of its own; a faulty one in none. Products of mxfp4 are exact in fp32, so that one seed is
enough there.

Micro-batches and stages change no order: a pipeline is equal bit for bit if its embeddings are untied. Tied ones get
their two uses added in another order.
"""

from __future__ import annotations

from pathlib import Path

import layouts
import pytest
from layout_runs import Case, Result, run_all
from layouts import LAYOUTS, MODELS, Difference, difference, differences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Of the first step: see above.
LOSS = NORM = 1e-6
GRADIENT = 2e-6
#: Every layout under a scheme whose sums are exact.
EXACT = [
    (model, "linear_mxfp4", name)
    for model in ("llama", "deepseek", "latent")
    for name in LAYOUTS
    if layouts.exists(model, "linear_mxfp4", name)
    and (model != "latent" or name in ("tp2", "tp2 sp"))
]
#: Biases, norms of heads, experts without latent attention.
FAMILIES = [
    *(("qwen2", "linear_mxfp4", name) for name in ("dp2", "tp2", "tp2 sp", "pp2", "cp2")),
    *(("qwen3", "linear_mxfp4", name) for name in ("tp2", "tp2 sp", "pp2", "cp2")),
    *(("mixtral", "linear_mxfp4", name) for name in ("ep2 allgather", "tp2 sp", "pp2")),
    *(("qwen3-moe", "linear_mxfp4", name) for name in ("ep2 alltoall", "tp2 sp ep2")),
]
#: Attention with its gradients, one scale a tensor, such a scale from earlier iterations, random numbers; experts.
SOME = [
    *(("llama", "more/FA_full_mxfp8", name) for name in ("tp2 sp", "cp2")),
    *(("llama", "linear_hifp8", name) for name in ("tp2 sp", "cp2", "pp2")),
    *(("llama", "more/linear_mxfp4_sr_rht", name) for name in ("tp2 sp", "cp2")),
    *(("deepseek", "linear_hifp8", name) for name in ("tp2 sp", "ep2 alltoall", "tp2 sp ep2")),
    ("deepseek", "FA_mxfp8", "cp2"),
    ("llama", "more/linear_hifp8_delayed", "tp2 sp"),
    *(("llama", "more/linear_mxfp4_quartet", name) for name in ("tp2 sp", "pp2")),
    ("deepseek", "more/linear_mxfp4_quartet", "ep2 alltoall"),
    ("llama", "more/linear_mxfp4_quest", "tp2 sp"),
    ("deepseek", "more/linear_mxfp4_quest", "ep2 alltoall"),
    ("llama", "more/linear_nvfp4_tetrajet_v2", "tp2 sp"),
    *(("llama", "more/linear_nvfp4_quartet2", name) for name in ("tp2 sp", "pp2")),
    *(("llama", "more/linear_hifloat4", name) for name in ("tp2 sp", "cp2")),
    *(("llama", "more/linear_sfp4_fprop", name) for name in ("tp2 sp", "pp2")),
    ("llama", "more/linear_nvfp4_metis", "pp2"),
    ("llama", "more/linear_fp8_block_stored_mxfp4", "pp2"),
    ("deepseek", "more/linear_fp8_block_stored_mxfp4", "ep2 alltoall"),
    *(("qwen3", "more/linear_mxfp8_floor_norms", name) for name in ("tp2 sp", "cp2", "pp2")),
    ("latent", "more/linear_mxfp8_floor_norms", "tp2 sp"),
]
#: Random numbers in every slot; random signs, and so a weight of its own for each micro-batch.
DRAWN = [
    *(("llama", "FA_pv_linear_mxfp4_sr", name) for name in ("tp2", "tp2 sp", "cp2")),
    ("llama", "FA_pv_linear_mxfp4_sr_tiled", "tp2 cp2"),
    *(("deepseek", "FA_pv_linear_mxfp4_sr", f"ep2 {name}") for name in ("allgather", "alltoall")),
    ("deepseek", "FA_pv_linear_mxfp4_sr", "tp2 sp ep2"),
    ("deepseek", "more/linear_mxfp4_sr_rht", "ep2 alltoall"),
]
#: A fault, and where it shows.
FAULTS = {
    "amax_of_own_part": ("llama", "linear_hifp8", "tp2"),
    "rows_without_source": ("deepseek", "linear_mxfp4", "ep2 allgather"),
    "rotary_gradient_in_parts": ("deepseek", "linear_mxfp4", "tp2 sp"),
    "rotary_gradient_of_own_heads": ("latent", "linear_mxfp4", "tp2"),
    "query_norm_added_over_ranks": ("latent", "bf16", "tp2"),
    "head_norms_not_added": ("qwen3", "bf16", "tp2"),
    "context_in_plain_order": ("llama", "linear_mxfp4", "cp2"),
    "latest_micro_batch_in_backward": ("llama", "more/linear_mxfp4_sr_rht", "pp2"),
    "experts_drawn_by_local_name": ("deepseek", "linear_mxfp4", "ep2 alltoall"),
    "parameters_not_marked_as_divided": ("llama", "bf16", "tp2"),
    "norm_weights_not_reduced": ("llama", "linear_mxfp4", "tp2 sp"),
    "positions_in_own_part": ("llama", "more/linear_mxfp4_sr_rht", "tp2 sp"),
    "heads_in_own_part": ("llama", "FA_pv_linear_mxfp4_sr", "tp2"),
    "rows_of_own_micro_batch": ("deepseek", "FA_pv_linear_mxfp4_sr", "ep2 allgather"),
    "weight_of_own_micro_batch": ("deepseek", "more/linear_mxfp4_sr_rht", "ep2 alltoall"),
}
_SUM = "the main gradient are not the sum of the ranks' own"
#: Faults that the proof names, and what it says.
NAMED = {
    "parameters_not_marked_as_divided": "the norm of the gradient is ",
    "query_norm_added_over_ranks": _SUM,
    "head_norms_not_added": _SUM,
    "norm_weights_not_reduced": _SUM,
}
FP32 = ["training.precision=fp32"]


def agrees(each: Difference | str) -> bool:
    assert isinstance(each, Difference), each
    return each.first_loss <= LOSS and each.grad_norm <= NORM and each.gradient <= GRADIENT


def test_every_layout_takes_the_first_step_of_one_process(tmp_path: Path) -> None:
    table = differences(EXACT, tmp_path / "cases", FP32, seeds=(1,))
    assert len(table) == len(EXACT) >= 22
    assert {row: each for row, (each,) in table.items() if not agrees(each)} == {}


def test_layouts_of_the_other_families_take_the_step_of_one_process(tmp_path: Path) -> None:
    table = differences(FAMILIES, tmp_path / "cases", FP32, seeds=(1,))
    assert {row: each for row, (each,) in table.items() if not agrees(each)} == {}


def test_layouts_agree_under_every_kind_of_operand(tmp_path: Path) -> None:
    drawn = [
        row for row in SOME if row[1].endswith(("_sr_rht", "_quartet", "_tetrajet_v2", "_quartet2"))
    ]
    table = differences([row for row in SOME if row not in drawn], tmp_path / "cases", FP32)
    table |= differences(drawn, tmp_path / "drawn", FP32, seeds=tuple(range(1, 7)))
    assert {row: by_seed for row, by_seed in table.items() if not any(map(agrees, by_seed))} == {}


def test_layouts_draw_the_random_numbers_of_one_process(tmp_path: Path) -> None:
    """On some processors a last bit of a sum tips a drawn rounding, 1e-4 of a gradient: not with every seed."""
    table = differences(DRAWN, tmp_path / "cases", FP32, seeds=(1,))
    apart = [row for row, (each,) in table.items() if not agrees(each)]
    again = differences(apart, tmp_path / "again", FP32, seeds=(2, 3)) if apart else {}
    assert {row: by_seed for row, by_seed in again.items() if not any(map(agrees, by_seed))} == {}
    assert len(apart) <= 1


def test_pipeline_of_untied_embeddings_is_equal_bit_for_bit(tmp_path: Path) -> None:
    base = [*MODELS["llama-untied"], "quant=more/linear_mxfp4_sr_rht", "training.iterations=3"]
    base += ["model.num_layers=4", "training.global_batch_size=4"]
    cases = []
    for precision in ("fp32", "bf16"):
        words = [*base, f"training.precision={precision}"]
        pipelines = [Case([*words, *LAYOUTS[n][1]], 2) for n in ("pp2", "pp2 interleaved")]
        norm = "tests.training.megatron.layout_faults:norm_in_float32"
        cases += [Case(words, 1), *pipelines, Case([*words, *LAYOUTS["pp2"][1]], 2, norm)]
    results = []
    for each in run_all(cases, tmp_path / "cases"):
        assert isinstance(each, Result), each
        results.append(each)
    for one, *others, with_other_norm in (results[:4], results[4:]):
        for other in others:
            assert (other.losses, other.grad_norms) == (one.losses, one.grad_norms)
            assert difference(other, one).weight == 0
        assert with_other_norm.grad_norms != one.grad_norms


def test_overlapped_collectives_leave_the_same_weights(tmp_path: Path) -> None:
    """Bit for bit; and parameters that nobody gathered differ, so that the comparison would notice."""
    module = "tests.training.megatron.layout_faults"
    base = [*MODELS["llama"], "quant=linear_mxfp4", *FP32, "training.iterations=3"]
    spread = [*base, *LAYOUTS["dp2 distributed optimizer"][1]]
    stages = [*base, *LAYOUTS["pp2 interleaved"][1]]
    four = [*base, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4"]
    four += ["training.global_batch_size=4", "training.distributed_optimizer=true"]
    plants = ["", f"{module}:overlapping"]
    cases = [
        Case(words, n, p) for words, n in ((spread, 2), (stages, 2), (four, 4)) for p in plants
    ]
    cases.append(Case(spread, 2, f"{module}:parameters_not_gathered"))
    results = []
    for each in run_all(cases, tmp_path / "cases"):
        assert isinstance(each, Result), each
        results.append(each)
    for plain, overlapped in (results[:2], results[2:4], results[4:6]):
        assert overlapped.losses == plain.losses
        assert difference(overlapped, plain).weight == 0
    assert difference(results[6], results[0]).weight > 0


@pytest.fixture(scope="module")
def faulty(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str, str], list[Difference | str]]:
    """Layouts with a fault, for two seeds: one in which nothing else differs would do."""
    module = "tests.training.megatron.layout_faults"
    plants = {row: f"{module}:{fault}" for fault, row in FAULTS.items()}
    assert len(plants) == len(FAULTS)
    folder = tmp_path_factory.mktemp("faults") / "cases"
    return differences(list(plants), folder, FP32, (1, 2), plants)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_layout_is_noticed(
    fault: str, faulty: dict[tuple[str, str, str], list[Difference | str]]
) -> None:
    for each in faulty[FAULTS[fault]]:
        if fault in NAMED:
            assert NAMED[fault] in str(each)
        else:
            assert not agrees(each)


def test_missing_part_is_no_difference_of_zero() -> None:
    import torch

    whole = Result([1.0], [1.0], {"w": torch.ones(2)}, {"w": torch.ones(2)})
    cut = Result([1.0], [1.0], {"w": torch.tensor([1.0, torch.nan])}, {"w": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"a part of these is missing: \['w'\]"):
        difference(cut, whole)
