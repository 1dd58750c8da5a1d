"""The attention probabilities and their gradients, captured only on request.

`recompute` shows that each of them follows from q, k, v and dO under every scheme; these tests hold for any tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from quantexp.cli.plan_record import make_plan
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

Tiny = Callable[..., Experiment]

#: One rounding to bf16, relative; the error of a sum over a row is at most this share of the sum of its magnitudes.
ROUNDING = 2.0**-8
P_ALONE = "capture.rules=[{level:off},{tensors:[attn_weights,grad_attn_weights,grad_scores],level:tensors}]"


def test_rows_are_causal_probabilities_and_gradients_are_those_of_a_softmax(
    run_tiny: Callable[..., RunDir],
) -> None:
    run = run_tiny("quant=FA_mxfp4", P_ALONE, "model.num_layers=1", "model.init_std=0.15")
    lines = [json.loads(line) for line in (run.tensors / "manifest.jsonl").read_text().splitlines()]
    P, dP, dS = (
        torch.load(run.tensors / line["file"], weights_only=True)["tensor"].double()
        for name in ("attn_weights", "grad_attn_weights", "grad_scores")
        for line in lines
        if line["tensor"] == name
    )
    assert P.shape == dP.shape == dS.shape == (2, 4, 64, 64)
    future = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert (P[..., future] == 0).all()
    assert (P[..., ~future] >= 0).all()
    assert (P[..., 0, 0] == 1).all()
    assert ((P.sum(-1) - 1).abs() <= ROUNDING * 1.01).all(), "of 1 in all, but for fp32's own"
    assert P[..., -1, :].amax() > 0.1, "not flat: the scores are spread"
    assert (dS[..., future] == 0).all()
    # dS = P (dP - sum P dP), of probabilities before they were rounded to the P that is kept, and then rounded itself:
    # of each term twice, and once more in fp32's sums.
    mean = (P * dP).sum(-1, keepdim=True)
    size = P * (dP.abs() + (P * dP.abs()).sum(-1, keepdim=True))
    assert ((dS - P * (dP - mean)).abs() <= 3 * ROUNDING * size).all()
    assert (dS.sum(-1).abs() <= 3 * ROUNDING * size.sum(-1)).all(), "a softmax ignores a constant"
    assert dS.abs().amax() > 0


def test_they_are_left_out_by_default_and_the_plan_knows_their_price(tiny: Tiny) -> None:
    plain, extended = make_plan(tiny()), make_plan(tiny("capture.attn_weights=true"))
    layers, sequences, heads, T = 2, 2, 4, 64
    each = sequences * heads * T * T * 2
    assert extended.capture_bytes - plain.capture_bytes == layers * 3 * each
    assert extended.capture_tensors - plain.capture_tensors == layers * 3
    assert make_plan(tiny(P_ALONE)).capture_bytes == layers * 3 * each
