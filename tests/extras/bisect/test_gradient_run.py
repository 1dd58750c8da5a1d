"""A run that compares gradients: the scheme's is that of training, and parts are the scheme with rules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.runs.gradients import Gradients, is_gradient, read_gradients
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment
from tests.conftest import run_here
from tests.recorded import json_lines

Tiny = Callable[..., Experiment]
GRADIENT = ("gradient.only=true", "training.stop_after=1", "capture=off")


@pytest.fixture
def gradients(tiny: Tiny) -> Callable[..., Gradients]:
    def run(*words: str) -> Gradients:
        return results(run_here(tiny(*GRADIENT, *words)))

    return run


def results(run: RunDir) -> Gradients:
    content = read_gradients(run)
    assert content is not None
    return content


def test_the_schemes_gradient_is_that_of_training(tiny: Tiny) -> None:
    trained = run_here(tiny("quant=linear_mxfp4", "capture=off", "training.stop_after=1"))
    run = run_here(tiny("quant=linear_mxfp4", *GRADIENT))
    assert is_gradient(run)
    assert not is_gradient(trained)
    (expected,), (line,) = json_lines(trained.metrics), json_lines(run.metrics)
    assert line["loss"] == expected["loss"]
    # Training rounds the norm to float32.
    assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2.0**-23)
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration, status.iterations) == (State.COMPLETED, 1, 1)
    assert json.loads(run.precision.read_text())["proved"]


def test_parts_alone_and_left_out_are_the_scheme_with_rules(
    gradients: Callable[..., Gradients],
) -> None:
    whole = gradients("quant=linear_mxfp4", "gradient.by=[layer]")
    assert whole["groups"] == ["embedding", "layer 0", "layer 1", "final norm"]
    kinds = [(one["kind"], one["unit"]) for one in whole["passes"]]
    assert kinds == [
        ("scheme", None),
        *((kind, f"layer {i}") for i in (0, 1) for kind in ("alone", "without")),
    ]
    only_first = gradients("quant=linear_mxfp4", "quant.rules=[{layers: [1], format: bf16}]")
    alone, without_second = whole["passes"][1], whole["passes"][4]
    for name in ("loss", "whole", "groups"):
        # With two layers the first one alone is the scheme without the second one.
        assert alone[name] == only_first["passes"][0][name] == without_second[name]
    assert alone["whole"] != whole["passes"][0]["whole"]


def test_a_scheme_that_changes_nothing_has_the_gradient_of_bf16(
    gradients: Callable[..., Gradients],
) -> None:
    none = gradients("quant=bf16", "gradient.by=[slot]")
    (one,) = none["passes"]
    assert one["whole"] == {"cosine": pytest.approx(1.0, abs=1e-15), "distance": 0.0}
    assert one["loss"] == none["bf16_loss"]
    norms = [float(norm or 0) for norm in none["bf16_norms"]]
    assert none["bf16_norm"] == pytest.approx(math.hypot(*norms))


def test_weight_gradients_of_one_layer_move_only_that_layer(
    gradients: Callable[..., Gradients],
) -> None:
    rule = "[{layers: [1], format: bf16}]"
    words = ("quant=more/linear_mxfp4_wgrad", f"quant.rules={rule}", "gradient.by=[slot]")
    content = gradients(*words)
    for one in content["passes"]:
        moved = [group["distance"] for group in one["groups"]]
        assert moved[0] == moved[2] == moved[3] == 0.0
        assert moved[1] is not None
        assert moved[1] > 0


def test_fp16_with_its_loss_scale(gradients: Callable[..., Gradients]) -> None:
    words = ("quant=linear_mxfp8", "training.precision=fp16", "training.initial_loss_scale=1024")
    half = gradients(*words)
    single = gradients("quant=linear_mxfp8", "training.precision=fp32")
    assert half["bf16_norm"] == pytest.approx(single["bf16_norm"], rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["", "tensor=2", "pipeline=2"])
def test_layouts_have_the_numbers_of_one_process(
    layout: str, tiny_words: list[str], tmp_path: Path
) -> None:
    """In fp32, with a scheme whose products are exact there; without a layout two processes share the batch."""
    from quantexp_launchers.local.execute import execute
    from rich.console import Console

    words = [*tiny_words, *GRADIENT, "training.precision=fp32", "quant=linear_mxfp4"]
    words += ["gradient.by=[layer]", "training.micro_batch_size=1", "training.global_batch_size=2"]

    def computed(*more: str) -> Gradients:
        outcome = execute(compose([*words, f"paths.root={tmp_path}", *more]), Console(quiet=True))
        assert outcome.state is State.COMPLETED, outcome.reason
        return results(outcome.run)

    more = [f"parallel.{layout}"] if layout else []
    one, two = computed(), computed("launcher.num_processes=2", *more)
    assert one["groups"] == two["groups"]
    assert one["bf16_norm"] == pytest.approx(two["bf16_norm"], rel=1e-5)
    for here, there in zip(one["passes"], two["passes"], strict=True):
        assert here["unit"] == there["unit"]
        for a, b in zip(
            [here["whole"], *here["groups"]], [there["whole"], *there["groups"]], strict=True
        ):
            assert a["distance"] == pytest.approx(b["distance"], rel=1e-3)
            assert a["cosine"] == pytest.approx(b["cosine"], abs=1e-5)
