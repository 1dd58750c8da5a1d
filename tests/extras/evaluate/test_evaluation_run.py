"""`quantexp evaluate` in this process: its losses are those of training's own evaluation, and each pass is proved."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from quantexp.analysis.evaluation_table import part_words
from quantexp.runs.evaluation import DOCUMENT_COLUMNS, Evaluation, is_evaluation, read_evaluation
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from tests.conftest import run_here
from tests.recorded import json_lines

Tiny = Callable[..., Experiment]
HELD_OUT = ("evaluation.samples=4", "dataset.split='50,50,0'")
EVALUATE = (*HELD_OUT, "evaluate.only=true", "capture=off")


@pytest.fixture(scope="module")
def trained(run_tiny_once: Callable[..., RunDir]) -> RunDir:
    """A run under a scheme that evaluates its last weights and saves them."""
    words = ("quant=FA_linear_mxfp4", "capture=off", "checkpoint.at_end=true", "training.lr=3e-3")
    return run_tiny_once(*words, *HELD_OUT, "evaluation.every=2")


@pytest.fixture
def evaluate(tiny: Tiny, trained: RunDir) -> Callable[..., RunDir]:
    def run(*words: str, expect: int = 0) -> RunDir:
        start = f"training.start_from={trained.root}@2"
        return run_here(tiny(*EVALUATE, start, *words), expect)

    return run


def results(run: RunDir) -> Evaluation:
    evaluation = read_evaluation(run)
    assert evaluation is not None
    return evaluation


def test_loss_is_that_of_the_evaluation_in_training(
    trained: RunDir, evaluate: Callable[..., RunDir]
) -> None:
    run = evaluate("quant=FA_linear_mxfp4")
    one = results(run)["scheme"]
    # Megatron's losses are float32, ours float64: a relative error of some 2^-24 in a token's.
    expected = json_lines(trained.metrics)[-1]["validation_loss"]
    assert one["loss"] == pytest.approx(expected, rel=1e-6)
    assert one["tokens"] == 4 * 64
    assert one["difference"] == pytest.approx(
        float(one["loss"] or 0) - float(one["bf16_loss"] or 0)
    )
    assert one["difference"] != 0
    assert one["divergence"] is not None
    assert one["divergence"] > 0
    assert is_evaluation(run)
    assert not is_evaluation(trained)
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration, status.iterations) == (State.COMPLETED, 2, 2)
    last = json_lines(run.metrics)[-1]
    assert last["loss"] == pytest.approx(one["loss"], rel=1e-12)


def test_documents_add_up_to_the_whole(evaluate: Callable[..., RunDir]) -> None:
    run = evaluate("quant=FA_linear_mxfp4")
    one, documents = results(run)["scheme"], json_lines(run.documents)
    assert len(documents) == one["documents"]
    total = {name: sum(line[name] for line in documents) for name in DOCUMENT_COLUMNS}
    assert total["tokens"] == one["tokens"]
    assert total["loss"] / total["tokens"] == pytest.approx(one["loss"], rel=1e-12)
    assert total["bf16_loss"] / total["tokens"] == pytest.approx(one["bf16_loss"], rel=1e-12)


def test_bf16_does_not_differ_from_itself(evaluate: Callable[..., RunDir]) -> None:
    one = results(evaluate("quant=bf16", "evaluate.each_layer=true"))
    assert one["each"] == []
    exact = ("difference", "divergence")
    assert [one["scheme"].get(name) for name in exact] == [0.0, 0.0]
    assert one["scheme"].get("same_top") == 1.0


def test_parts_alone_are_the_scheme_with_rules_for_the_others(
    evaluate: Callable[..., RunDir],
) -> None:
    run = evaluate("quant=linear_mxfp4", "evaluate.each_layer=true", "evaluate.each_module=true")
    each = results(run)["each"]
    modules = ("qkv", "proj", "fc1", "fc2")
    names = [(one.get("layer"), one.get("module")) for one in each]
    expected: list[tuple[int, str | None]] = [(0, None), (1, None)]
    expected += [(layer, module) for layer in (0, 1) for module in modules]
    assert names == expected
    rule = "{layers: [1], format: bf16}"
    alone = results(evaluate("quant=linear_mxfp4", f"quant.rules=[{rule}]"))["scheme"]
    assert each[0]["loss"] == alone["loss"]
    assert each[1]["loss"] != alone["loss"]


@pytest.mark.parametrize("key", ["each_layer", "each_module"])
def test_output_layer_and_a_tied_embedding_are_evaluated_alone(
    evaluate: Callable[..., RunDir], key: str
) -> None:
    run = evaluate("quant=bf16", "quant/output=mxfp4", f"evaluate.{key}=true")
    each = results(run)["each"]
    names = [(one.get("layer"), one.get("module")) for one in each]
    assert names == [(2, "output"), (2, "embedding")]
    whole = results(run)["scheme"]["loss"]
    assert len({whole, *(one["loss"] for one in each)}) == 3
    assert [part_words(one) for one in each] == ["output layer", "embedding"]


def test_proof_has_the_forward_slots_and_nothing_else(evaluate: Callable[..., RunDir]) -> None:
    record = json.loads(evaluate("quant=FA_linear_mxfp4").precision.read_text())
    assert record["proved"]
    assert {entry["product"] for entry in record["entries"]} == {"fprop"}
    quantised = {entry["status"] for entry in record["entries"] if entry["format"] != "bf16"}
    assert quantised == {"engaged"}


def test_pass_that_multiplies_the_originals_fails_the_evaluation(
    evaluate: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.quant import multiply

    def unchanged(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return x

    monkeypatch.setattr(multiply, "quantise_operand", unchanged)
    run = evaluate("quant=linear_mxfp4", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert "linear.fprop.x" in status.reason
    assert read_evaluation(run) is None


def test_masked_documents_and_stochastic_rounding_are_evaluated(
    evaluate: Callable[..., RunDir],
) -> None:
    words = (
        "dataset.mask_documents=true",
        "quant=linear_mxfp4",
        "quant.linear.rounding=stochastic",
    )
    first, again = (results(evaluate(*words, "force=true"))["scheme"] for _ in range(2))
    assert first == again
    other = results(evaluate(*words, "training.seed=7", "force=true"))["scheme"]
    assert other["loss"] != first["loss"]


def test_more_samples_than_there_are_is_refused(evaluate: Callable[..., RunDir]) -> None:
    run = evaluate("evaluation.samples=1000000", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.reason.startswith("evaluation.samples=1000000 needs 1000000 held-out samples of")
    assert status.reason.endswith(", a shorter training.seq_length, or more of dataset.split")
