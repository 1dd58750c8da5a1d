"""Every layout computes what one process computes; each fault of a layout is noticed.

In fp32 the ranks of a layout add the same products as one process, in another order. A sum of n terms in another order
differs by some n 2^-24 of the sum of magnitudes; four layers of width 128 leave errors of up to 1e-6 in a parameter's
gradient, relative in the 2-norm. A wrong operand of a 4- or 8-bit format differs by 1e-2 and more. Micro-batches and
stages change no order, so a pipeline is equal bit for bit if its embeddings are untied; tied ones get their two uses
added in another order.
"""

from __future__ import annotations

from pathlib import Path

import layouts
import pytest
from layouts import LAYOUTS, MODELS, Case, Difference, Result, difference, exists, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Of the first step: see above.
LOSS = NORM = 1e-6
GRADIENT = 2e-6
#: Schemes whose operands differ most if a layout is wrong: blocks in each direction with random numbers, attention with
#: gradients, one scale a tensor, and such a scale from earlier iterations.
CASES = [
    ("llama", "more/linear_mxfp4_sr_rht"),
    ("llama", "more/FA_full_mxfp8"),
    ("llama", "linear_hifp8"),
    ("deepseek", "linear_mxfp4"),
    ("deepseek", "more/linear_hifp8_delayed"),
]
#: What the layouts of a pipeline change: nothing.
PIPELINES = ("pp2", "pp2 interleaved")


def words(model: str, scheme: str) -> list[str]:
    return [*MODELS[model], f"quant={scheme}", "training.precision=fp32"]


def results_of(cases: list[Case], folder: Path) -> list[Result]:
    results = run_all(cases, folder)
    failures = [each for each in results if isinstance(each, str)]
    assert not failures, failures[0]
    return [each for each in results if isinstance(each, Result)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case).replace("/", "."))
def table(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Difference]:
    """Every layout of a model under a scheme beside one process."""
    model, scheme = request.param
    names = [name for name in LAYOUTS if name != "one" and exists(model, name)]
    cases = [Case(words(model, scheme), 1)]
    cases += [Case([*words(model, scheme), *LAYOUTS[n][1]], LAYOUTS[n][0]) for n in names]
    one, *others = results_of(cases, tmp_path_factory.mktemp("layouts") / "cases")
    return {name: difference(other, one) for name, other in zip(names, others, strict=True)}


def test_first_step_is_that_of_one_process(table: dict[str, Difference]) -> None:
    far = {
        name: each
        for name, each in table.items()
        if each.first_loss > LOSS or each.grad_norm > NORM or each.gradient > GRADIENT
    }
    assert not far
    assert len(table) >= 10


def test_three_steps_stay_close(table: dict[str, Difference]) -> None:
    """Later steps may cross a boundary between two grid points, so that their difference is a quantum of the format."""
    assert {name: each for name, each in table.items() if each.weight > 1e-2} == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pipeline_of_untied_embeddings_is_equal_bit_for_bit(precision: str, tmp_path: Path) -> None:
    base = [*MODELS["llama-untied"], "quant=more/linear_mxfp4_sr_rht"]
    base.append(f"training.precision={precision}")
    cases = [Case(base, 1), *(Case([*base, *LAYOUTS[n][1]], 2) for n in PIPELINES)]
    one, *others = results_of(cases, tmp_path / "cases")
    for other in others:
        assert (other.losses, other.grad_norms) == (one.losses, one.grad_norms)
        assert difference(other, one).weight == 0


FAULTS = [
    ("amax_of_own_part", "llama", "linear_hifp8", "tp2"),
    ("rows_without_source", "deepseek", "linear_mxfp4", "ep2 allgather"),
    ("rotary_gradient_in_parts", "deepseek", "linear_mxfp4", "tp2 sp"),
    ("context_in_plain_order", "llama", "linear_mxfp4", "cp2"),
    ("latest_micro_batch_in_backward", "llama", "more/linear_mxfp4_sr_rht", "pp2"),
    ("experts_drawn_by_local_name", "deepseek", "linear_mxfp4", "ep2 allgather"),
    ("parameters_not_marked_as_divided", "llama", "linear_mxfp4", "tp2"),
    ("norm_weights_not_reduced", "llama", "linear_mxfp4", "tp2 sp"),
    ("norm_in_float32", "llama-untied", "linear_mxfp4", "pp2"),
]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Difference]:
    """One process, and a layout with each fault."""
    pairs = dict.fromkeys((model, scheme) for _, model, scheme, _ in FAULTS)
    cases = [Case(words(*pair), 1) for pair in pairs]
    for fault, model, scheme, name in FAULTS:
        number, more = LAYOUTS[name]
        plant = f"tests.training.megatron.layout_faults:{fault}"
        cases.append(Case([*words(model, scheme), *more], number, plant))
    results = results_of(cases, tmp_path_factory.mktemp("faults") / "cases")
    sound = dict(zip(pairs, results[: len(pairs)], strict=True))
    return {
        fault: difference(result, sound[model, scheme])
        for (fault, model, scheme, _), result in zip(FAULTS, results[len(pairs) :], strict=True)
    }


@pytest.mark.parametrize("fault", [fault for fault, *_ in FAULTS])
def test_fault_of_a_layout_is_noticed(fault: str, faulty: dict[str, Difference]) -> None:
    each = faulty[fault]
    if fault == "norm_in_float32":  # a difference of bits
        assert each.grad_norm > 0
    else:
        assert each.first_loss > LOSS or each.grad_norm > NORM or each.gradient > GRADIENT


def test_a_missing_part_is_no_difference_of_zero() -> None:
    import torch

    whole = Result([1.0], [1.0], {"w": torch.ones(2)}, {"w": torch.ones(2)})
    cut = Result([1.0], [1.0], {"w": torch.tensor([1.0, torch.nan])}, {"w": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"a part of these is missing: \['w'\]"):
        layouts.difference(cut, whole)
