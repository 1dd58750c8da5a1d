"""The other models in every scheme: trained, proved, and every captured result recomputed from its operands.

The oracle, the bounds and the criterion for another scheme are those of `test_schemes`. Every element of every
result must lie within its bounds; other schemes must lie clearly further away for experts with enough tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from quantexp.runs.paths import RunDir

from .bounds import Value, distance, share_outside
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
    "training.iterations=3",
]
#: The number of an expert's rows from which other schemes must be clearly further away.
MANY = 16
#: Results that distinguish formats of PV, which none of the ten schemes quantises, and not those of QK.
BY_PV = CONTEXT.keys() - ATTENTION.keys()

Run = Callable[..., RunDir]


#: Slow cases; llama31-8b is built like llama32-1b, which `test_schemes` tests. The others are exhaustive.
SOME = {
    *(("deepseek2_lite", f"FA_linear_{fmt}") for fmt in ("mxfp8", "mxfp4", "hifp8")),
    *(("deepseek2_lite", scheme) for scheme in ("bf16", "FA_mxfp4", "linear_mxfp8")),
    ("llama31-8b", "FA_linear_mxfp4"),
}
#: Slow cases of the families that add to these.
MORE_MODELS = [
    pytest.param(model, scheme, marks=pytest.mark.slow)
    for model, scheme in (
        ("qwen2", "FA_linear_mxfp4"),
        ("qwen3", "FA_linear_mxfp4"),
        ("mixtral", "linear_mxfp4"),
        ("qwen3_moe", "FA_linear_mxfp4"),
    )
]
#: The modules of each layer.
MODULES = {
    "deepseek2_lite": {0: 7, 1: 7 + 2 * 4},
    "mixtral": {0: 3 + 2 * 4, 1: 3 + 2 * 4},
    "qwen3_moe": {0: 5, 1: 3 + 2 * 4},
}
DENSE = {0: 5, 1: 5}
#: Biases begin at zero; after two steps of this length they are large, and in no captured product.
MORE = {"qwen2": ["capture.first_iteration=3", "training.lr=0.03", "training.iterations=3"]}
EVERY = [
    pytest.param(
        model,
        scheme,
        marks=pytest.mark.slow if (model, scheme) in SOME else pytest.mark.exhaustive,
    )
    for model in ("deepseek2_lite", "llama31-8b")
    for scheme in SCHEMES
]


@pytest.mark.parametrize(("model", "scheme"), [*EVERY, *MORE_MODELS])
def test_each_model_trains_is_proved_and_its_results_follow_from_the_captured_operands(
    run_tiny: Run, tiny_models: dict[str, list[str]], model: str, scheme: str
) -> None:
    words = [word for word in WORDS if model in MODULES or "router" not in word]
    run = run_tiny(f"quant={scheme}", *tiny_models[model], *words, *MORE.get(model, []))
    _trained_and_proved(run, quantised=scheme != "bf16")
    iteration = 3 if model in MORE else 1
    modules = [m for m in read_capture(run.tensors, iteration) if m.name != "router"]
    layers = Counter(m.layer for m in modules)
    assert layers == MODULES.get(model, DENSE)
    linear, qk = SCHEMES[scheme]
    for module in modules:
        if module.layer_type == "linear":
            _follows(module, linear, linear_slots, "linear")
        else:
            _follows(module, qk, attention_slots, "attention")


def _trained_and_proved(run: RunDir, quantised: bool) -> None:
    record = json.loads(run.precision.read_text())
    assert record["proved"]
    assert (record["quantised_calls"] > 0) == quantised
    metrics = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert len(metrics) == 3
    assert all(line["loss"] is not None and line["grad_norm"] > 0 for line in metrics)


@pytest.mark.slow
def test_blocks_along_tokens_end_where_a_sequence_ends(
    run_tiny: Run, tiny_models: dict[str, list[str]]
) -> None:
    """If an expert's rows are read as one sequence, the weight gradient lies outside of the bounds."""
    run = run_tiny("quant=linear_mxfp4", *tiny_models["deepseek2_lite"], *WORDS)
    experts = [m for m in read_capture(run.tensors) if m.name.startswith("expert")]
    assert experts
    num_outside = 0
    for module in experts:
        assert module.row_sequences is not None
        assert set(module.row_sequences) <= {0, 1}
        module.row_sequences = None
        value = linear_grad_weight(module, module.formats)
        captured = module.backward("grad_weight")
        num_outside += share_outside(captured, value, module.dtype) > 0
    assert num_outside >= len(experts) // 2


@pytest.mark.slow
def test_experts_rows_are_the_tokens_that_the_router_chose(
    run_tiny: Run, tiny_models: dict[str, list[str]]
) -> None:
    """The logits alone determine the rows: those of the two largest, in the order of the micro-batch."""
    run = run_tiny("quant=FA_linear_mxfp8", *tiny_models["deepseek2_lite"], *WORDS)
    modules = {m.name: m for m in read_capture(run.tensors) if m.layer == 1}
    logits = modules["router"].forward("router_logits")
    T, B, E = logits.shape
    assert (T, B, E) == (72, 2, 4)
    chosen = np.argsort(-logits.reshape(T * B, E), axis=1)[:, :2]
    hidden = modules["shared-fc1"].forward("input").reshape(T * B, -1)
    for expert in range(E):
        tokens = np.flatnonzero((chosen == expert).any(axis=1))
        module = modules[f"expert{expert}-fc1"]
        if not len(tokens):
            assert {tensor for _, tensor in module.tensors} == {"weight"}
            continue
        assert np.array_equal(module.forward("input"), hidden[tokens])
        assert module.row_sequences == (tokens % B).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recompute"), [("sequence", "none"), ("sequence", "full"), ("batch", "none")]
)
def test_the_balancing_loss_follows_from_the_routers_logits(
    run_tiny: Run, tiny_models: dict[str, list[str]], kind: str, recompute: str
) -> None:
    """arXiv 2405.04434, equations 23 to 25: alpha sum_i f_i P_i, in each sequence (or batch) by itself, then the mean.

    The logits are float32, and so are softmax and sums: 1e-5 is some hundred roundings.
    """
    words = [
        *("training.global_batch_size=4", "capture.collect_micro_batches=0"),
        *(f"training.recompute={recompute}", f"model.moe.aux_loss={kind}", "capture=tensors"),
        "capture.rules=[{level: 'off'}, {tensors: [router_logits], level: tensors}]",
        *("training.iterations=1", "training.warmup_iterations=0", "model.init_std=0.15"),
    ]
    run = run_tiny(*tiny_models["deepseek2_lite"], *words)
    losses = []
    for line in map(json.loads, (run.tensors / "manifest.jsonl").read_text().splitlines()):
        if line["tensor"] == "router_logits":
            logits = torch.load(run.tensors / line["file"], weights_only=True)["tensor"]
            groups = logits.double().numpy()
            groups = groups.reshape(-1, 1, 4) if kind == "batch" else groups
            losses += [_balancing_loss(groups[:, b], top_k=2) for b in range(groups.shape[1])]
    assert len(losses) == (2 if kind == "batch" else 4)
    aux_loss = json.loads(run.metrics.read_text().splitlines()[0])["aux_loss"]
    assert aux_loss == pytest.approx(0.001 * np.mean(losses), rel=1e-5)


def _balancing_loss(logits_TE: Array, top_k: int) -> float:
    T, E = logits_TE.shape
    scores = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits_TE, axis=1)[:, :top_k]
    f = np.array([E / (top_k * T) * (chosen == expert).sum() for expert in range(E)])
    return float((f * scores.mean(axis=0)).sum())


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
            if other != declared and key not in BY_PV:
                far = distance(captured, recompute(module, slots(other)))
                assert far > CLEARLY * near, f"{what}: {declared} {near:.5f}, {other} {far:.5f}"


def _results(
    module: Module, layer_type: str
) -> Iterator[tuple[tuple[str, str], Array, Callable[..., Value]]]:
    if ("forward", "input") not in module.tensors and layer_type == "linear":
        return  # an expert without tokens
    recomputed = LINEAR if layer_type == "linear" else {**CONTEXT, **ATTENTION}
    for key, recompute in recomputed.items():
        yield key, module.tensors[key], recompute
