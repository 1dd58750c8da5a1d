"""Gradients that are compared in Megatron-LM's loop are those of its own steps, from the same checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.runs.gradients import is_gradient, read_gradients
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from tests.extras.megatron_lm.runs import proof, quantised

_PLANT = str(Path(__file__).with_name("plants_record.py"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gradients_are_those_of_megatron_lms_steps_from_its_checkpoint(
    source: Path, tmp_path: Path
) -> None:
    """Under delayed scales, whose histories lie beside the checkpoint."""
    scheme, checkpoints = "more/linear_fp8_delayed", str(tmp_path / "checkpoints")
    trained = RunDir(tmp_path / "checkpoints" / "quantexp")
    save = ["--save", checkpoints, "--save-interval", "1", "--exit-interval", "1"]
    quantised(trained, tmp_path / "a", source, scheme, save)
    load = ["--load", checkpoints, "--train-iters", "3", "--exit-interval", "1"]

    compared = RunDir(tmp_path / "compared")
    quantised(compared, tmp_path / "b", source, scheme, load, QUANTEXP_GRADIENT="layer")
    gradients = read_gradients(compared)
    assert gradients is not None
    assert gradients["iteration"] == 2
    assert is_gradient(compared)
    assert proof(compared)["proved"]
    status = read_status(compared.status)
    assert status is not None
    assert (status.state, status.reason) == (State.COMPLETED, "")

    def step(name: str, words: str, run: RunDir) -> dict[str, Tensor]:
        file = tmp_path / f"{name}.pt"
        planted = {"QUANTEXP_TEST_PLANT": _PLANT, "RECORDED": str(file)}
        quantised(run, tmp_path / name, source, words, load, **planted)
        recorded: dict[str, Tensor] = torch.load(file)["gradients"]
        return recorded

    bf16 = step("bf16", "bf16", RunDir(tmp_path / "bf16_run"))
    whole = step("scheme", scheme, trained)
    of_pass: dict[tuple[str, str | None], Any] = {
        (each["kind"], each["unit"]): each for each in gradients["passes"]
    }
    assert len(of_pass) == 5
    _require_equal(of_pass["scheme", None], whole, bf16)
    groups = of_pass["without", "layer 1"]["groups"], of_pass["alone", "layer 0"]["groups"]
    assert groups[0] == groups[1], "of two layers"
    assert groups[0] != of_pass["scheme", None]["groups"]


def _require_equal(of_pass: Any, own: Mapping[str, Tensor], bf16: Mapping[str, Tensor]) -> None:
    """The pass has the distance and cosine of a gradient, to the last bits of sums in float64 in another order."""
    g, b = (torch.cat([x[n].double().view(-1) for n in bf16]) for x in (own, bf16))
    distance = float((g - b).norm() / b.norm())
    cosine = float(g.dot(b) / (g.norm() * b.norm()))
    assert math.isfinite(distance)
    assert distance > 0
    assert of_pass["whole"]["distance"] == pytest.approx(distance, rel=1e-12)
    assert of_pass["whole"]["cosine"] == pytest.approx(cosine, rel=1e-12)
    for layer in (0, 1):
        names = [n for n in bf16 if n.startswith(f"decoder.layers.{layer}.")]
        g, b = (torch.cat([x[n].double().view(-1) for n in names]) for x in (own, bf16))
        expected = pytest.approx(float((g - b).norm() / b.norm()), rel=1e-12)
        assert of_pass["groups"][1 + layer]["distance"] == expected


def test_micro_batches_are_taken_once_and_given_in_megatrons_form() -> None:
    from quantexp.extras.megatron_lm.gradient import repeatable

    data, chunks = iter(range(9)), [iter("abcd"), iter("efgh")]
    again = repeatable(data, 3)
    assert list(again()) == list(again()) == [0, 1, 2]
    assert next(data) == 3
    of_chunks = repeatable(chunks, 2)
    assert [[*each] for each in of_chunks()] == [[*each] for each in of_chunks()]
    assert [[*each] for each in of_chunks()] == [["a", "b"], ["e", "f"]]
    assert repeatable(None, 2)() is None
