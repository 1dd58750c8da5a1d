"""Every result of a module follows from the captured files under the declared scheme and under no other.

A result is right if every element lies between the bounds of `bounds`. Other schemes are distinguished by the root mean
square distance to the result before its last rounding. For the declared scheme it is that one rounding to bf16, about
2^-8 / sqrt(6) = 0.0016 (measured 0.0015 to 0.0018). A format of 4 significant bits rounds 16 times more coarsely, and
both operands of a product: sqrt(2) 16 = 22 times that. The nearest pair, mxfp8 against hifp8, agrees on elements to
which both give 4 bits: measured 0.023 and more, 14 times. CLEARLY is 8, with room for other data.

Head and feed-forward sizes leave short last blocks; the initial weights are wide, so that the scores are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from quantexp.runs.paths import RunDir

from .bounds import distance, share_outside
from .captured import Module, Slot, read_capture
from .oracle import (
    ATTENTION,
    CONTEXT,
    DIMS,
    LINEAR,
    Formats,
    Recompute,
    attention_output,
    captured_operand,
    grad_key,
    grad_query,
    linear_grad_input,
    linear_grad_weight,
    linear_output,
    operand,
    scores,
)
from .schemes import FORMATS, SCHEMES, attention_slots, linear_slots

MODEL = [
    "model.init_std=0.15",
    "model.head_dim=40",
    "model.ffn_hidden_size=200",
    "training.seq_length=72",
    "capture.attn_weights=true",
    "capture.weight_grads=true",
    "capture.stop_after_capture=true",
]
#: Two layers of qkv, attention, proj, fc1, fc2.
NUM_MODULES = 10
#: The factor by which every other scheme must be further away than the declared one.
CLEARLY = 8.0
#: The least standard deviation of attention scores that makes the softmax distinguish formats.
SPREAD = 2.0
#: The result that shows how a slot was quantised.
SHOWN_BY: dict[str, tuple[tuple[str, str], Recompute]] = {
    "fprop": (("forward", "output"), linear_output),
    "dgrad": (("backward", "grad_input"), linear_grad_input),
    "wgrad": (("backward", "grad_weight"), linear_grad_weight),
    "qk.fprop": (("forward", "output"), attention_output),
    "qk.dgrad_q": (("backward", "grad_query"), grad_query),
    "qk.dgrad_k": (("backward", "grad_key"), grad_key),
}

Run = Callable[..., RunDir]


@pytest.mark.parametrize(
    "scheme",
    [
        # Each of these quantises what two others do, linear layers and QK; nothing passes from one to the other.
        pytest.param(scheme, marks=[] if scheme.startswith("FA_linear") else pytest.mark.slow)
        for scheme in SCHEMES
    ],
)
def test_results_follow_from_the_captured_operands_under_the_declared_scheme_alone(
    run_tiny: Run, scheme: str
) -> None:
    modules = read_capture(run_tiny(f"quant={scheme}", *MODEL).tensors)
    assert len(modules) == NUM_MODULES
    linear, qk = SCHEMES[scheme]
    for module in modules:
        _captured_before_quantisation(module)
        if module.layer_type == "linear":
            assert module.files["backward", "weight"] == module.files["forward", "weight"]
            _only_declared(module, LINEAR, linear, linear_slots)
        else:
            _scores_are_spread(module)
            _only_declared(module, ATTENTION, qk, attention_slots)
            _only_declared(module, CONTEXT, "bf16", lambda pv: attention_slots(qk, pv))
        if module.layer == 0:
            _misreadings_are_noticed(module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pv",
    [
        "mxfp8",
        pytest.param("mxfp4", marks=pytest.mark.slow),
        pytest.param("hifp8", marks=pytest.mark.slow),
    ],
)
def test_a_quantised_pv_follows_from_the_captured_weights_and_value(run_tiny: Run, pv: str) -> None:
    modules = read_capture(run_tiny("quant=bf16", f"quant/pv={pv}", *MODEL).tensors)
    for module in modules:
        if module.layer_type == "attention":
            _captured_before_quantisation(module)
            _only_declared(module, CONTEXT, pv, lambda pv: attention_slots("bf16", pv))


def _only_declared(
    module: Module,
    results: Mapping[tuple[str, str], Recompute],
    declared: str,
    slots: Callable[[str], Formats],
) -> None:
    """The manifest declares the design's formats; results lie within the bounds, far from other formats'."""
    assert module.formats == slots(declared)
    for key, recompute in results.items():
        captured, right = module.tensors[key], recompute(module, module.formats)
        what = f"{module} {' '.join(key)}"
        assert captured.shape == right.nominal.shape, what
        assert share_outside(captured, right, module.dtype) == 0, what
        near = distance(captured, right)
        for other in FORMATS:
            if other != declared:
                far = distance(captured, recompute(module, slots(other)))
                assert far > CLEARLY * near, f"{what}: {declared} {near:.5f}, {other} {far:.5f}"


def _captured_before_quantisation(module: Module) -> None:
    """No captured operand already lies on its slot's grid: quantising changes most of its elements."""
    for slot, declared in module.formats.items():
        name = slot.rpartition(".")[2]
        if declared["format"] != "bf16":
            values = captured_operand(module, name)
            moved = np.mean((operand(module, module.formats, slot) != values)[values != 0])
            assert moved > 0.5, f"{module} {slot}"


def _scores_are_spread(module: Module) -> None:
    S = scores(module, module.formats).nominal
    assert S[..., np.tri(S.shape[-1], dtype=bool)].std() >= SPREAD, module


def _misreadings_are_noticed(module: Module) -> None:
    """A slot with one option changed puts some element outside the bounds: they are that narrow."""
    for slot, declared in module.formats.items():
        product, _, name = slot.rpartition(".")
        if declared["format"] == "bf16" or product not in SHOWN_BY:
            continue
        key, recompute = SHOWN_BY[product]
        for misread in _misread(declared, DIMS[name]):
            value = recompute(module, {**module.formats, slot: misread})
            outside = share_outside(module.tensors[key], value, module.dtype)
            assert outside > 0, f"{module} {slot} read as {misread}"


def _misread(slot: Slot, dims: tuple[str, ...]) -> Iterator[Slot]:
    """The slot with one option changed that shows: E4M3's 15 binades below amax hide where a block ends here."""
    if slot["format"] == "hifp8":
        yield {**slot, "amax_target": slot["amax_target"] / 2}
        return
    yield {**slot, "scale_rule": "floor" if slot["scale_rule"] == "rceil" else "rceil"}
    if slot["format"] == "mxfp4_e2m1":
        yield from ({**slot, "block": block} for block in (16, 64))
        yield from ({**slot, "axis": axis} for axis in dims if axis != slot["axis"])
