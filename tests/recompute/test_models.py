"""The other models' captures follow from their operands too: latent attention, experts, and rows of several sequences.

The oracle, the bounds and what counts as clearly another scheme are those of `test_schemes`. A routed expert has few
tokens, so that a result has few elements, and no other scheme is asked of it that the same module's elements could
not tell: every element must lie within the bounds, for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quantexp.paths import RunDir

from .bounds import distance, share_outside
from .captured import Array, Module, read_capture
from .oracle import ATTENTION, CONTEXT, LINEAR, Formats, linear_grad_weight
from .schemes import FORMATS, SCHEMES, attention_slots, linear_slots
from .test_schemes import CLEARLY

WORDS = [
    "model.init_std=0.15",
    "training.seq_length=72",
    "capture.attn_weights=true",
    "capture.weight_grads=true",
    "capture.router_logits=true",
    "capture.stop_after_capture=true",
]
#: Rows of an expert from which on other schemes must be clearly further away.
MANY = 16

Run = Callable[..., RunDir]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_deepseeks_results_follow_from_the_captured_operands_under_the_declared_scheme_alone(
    run_tiny: Run, tiny_models: dict[str, list[str]], scheme: str
) -> None:
    run = run_tiny(f"quant={scheme}", *tiny_models["deepseek2_lite"], *WORDS)
    modules = [m for m in read_capture(run.tensors) if m.name != "router"]
    layers = Counter(m.layer for m in modules)
    assert layers[0] == 5 + 2
    assert 5 + 2 + 2 <= layers[1] <= 5 + 2 + 2 * 6
    linear, qk = SCHEMES[scheme]
    for module in modules:
        if module.layer_type == "linear":
            _follows(module, linear, linear_slots, "linear")
        else:
            _follows(module, qk, attention_slots, "attention")


def test_blocks_along_tokens_end_where_a_sequence_ends(
    run_tiny: Run, tiny_models: dict[str, list[str]]
) -> None:
    """Read as if an expert's rows were of one sequence, the weight gradient lies outside of the bounds."""
    run = run_tiny("quant=linear_mxfp4", *tiny_models["deepseek2_lite"], *WORDS)
    experts = [m for m in read_capture(run.tensors) if m.name.startswith("expert")]
    told_apart = 0
    for module in experts:
        assert module.row_sequences is not None
        assert set(module.row_sequences) <= {0, 1}
        module.row_sequences = None
        value = linear_grad_weight(module, module.formats)
        captured = module.backward("grad_weight")
        told_apart += share_outside(captured, value, module.dtype) > 0
    assert told_apart >= len(experts) // 2


def test_experts_rows_are_the_tokens_that_the_router_chose(
    run_tiny: Run, tiny_models: dict[str, list[str]]
) -> None:
    """Softmax over all experts, the largest two, and the first token of the micro-batch first: from the logits alone."""
    run = run_tiny("quant=FA_linear_mxfp8", *tiny_models["deepseek2_lite"], *WORDS)
    modules = {m.name: m for m in read_capture(run.tensors) if m.layer == 1}
    logits = modules["router"].forward("router_logits")
    T, B, E = logits.shape
    assert (T, B, E) == (72, 2, 6)
    chosen = np.argsort(-logits.reshape(T * B, E), axis=1)[:, :2]
    hidden = modules["shared-fc1"].forward("input").reshape(T * B, -1)
    for expert in range(E):
        tokens = np.flatnonzero((chosen == expert).any(axis=1))
        if not len(tokens):
            assert f"expert{expert}-fc1" not in modules
            continue
        module = modules[f"expert{expert}-fc1"]
        assert np.array_equal(module.forward("input"), hidden[tokens])
        assert module.row_sequences == (tokens % B).tolist()


@pytest.mark.parametrize("scheme", ["FA_linear_mxfp8", "FA_linear_mxfp4", "FA_linear_hifp8"])
def test_untied_llamas_results_follow_too(
    run_tiny: Run, tiny_models: dict[str, list[str]], scheme: str
) -> None:
    words = [word for word in WORDS if "router" not in word]
    run = run_tiny(f"quant={scheme}", *tiny_models["llama31-8b"], *words)
    linear, qk = SCHEMES[scheme]
    for module in read_capture(run.tensors):
        if module.layer_type == "linear":
            _follows(module, linear, linear_slots, "linear")
        else:
            _follows(module, qk, attention_slots, "attention")


def _follows(
    module: Module, declared: str, slots: Callable[[str], Formats], layer_type: str
) -> None:
    assert module.formats == slots(declared)
    for key, captured, recompute in _results(module, layer_type):
        right, what = recompute(module, module.formats), f"{module} {' '.join(key)}"
        assert captured.shape == right.nominal.shape, what
        assert share_outside(captured, right, module.dtype) == 0, what
        if len(module.row_sequences or range(MANY)) < MANY:
            continue
        near = distance(captured, right)
        for other in FORMATS:
            if other != declared and key not in CONTEXT.keys() - ATTENTION.keys():
                far = distance(captured, recompute(module, slots(other)))
                assert far > CLEARLY * near, f"{what}: {declared} {near:.5f}, {other} {far:.5f}"


def _results(module: Module, layer_type: str) -> Iterator[tuple[tuple[str, str], Array, Callable[..., Array]]]:
    recomputed = LINEAR if layer_type == "linear" else {**CONTEXT, **ATTENTION}
    for key, recompute in recomputed.items():
        yield key, module.tensors[key], recompute
