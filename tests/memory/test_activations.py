"""Predicted activations against the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantexp.config.compose import compose
from quantexp.memory.activations import activation_bytes, largest_linear, passing_bytes
from quantexp.memory.part import WHOLE, Part
from quantexp.model.layout import Layout
from quantexp.schema import Dispatcher, Experiment
from tests.memory.small_models import losses_of, model_of

Tiny = Callable[..., Experiment]
Q_LORA = "model.mla.q_lora_rank=24"


def autograd_bytes(experiment: Experiment) -> int:
    """Bytes of all storages that a forward pass saves, excluding parameters."""
    training = experiment.training
    with model_of(experiment) as model:
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = losses_of(model, training)
        logits = training.seq_length * training.micro_batch_size * 384 * 4
        del loss
        return sum(storage.nbytes() for storage in storages.values()) - logits


MODELS: list[tuple[str, list[str]]] = [
    ("llama32-1b", []),
    ("llama31-8b", ["training.precision=fp32"]),
    ("deepseek2_lite", []),
    ("deepseek2_lite", [Q_LORA]),
    ("deepseek2_lite", ["model.moe.num_shared_experts=0", "model.moe.num_dense_layers=0"]),
    ("qwen2", []),
    ("qwen3", []),
    ("mixtral", []),
    ("qwen3_moe", []),
]


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        # The path determines what attention saves: one test for each kind of attention, the rest is slow.
        pytest.param(
            path, *model, marks=[] if path == "plain" or i in (0, 2, 6) else pytest.mark.slow
        )
        for path in ("plain", "fused", "tiled")
        for i, model in enumerate(MODELS)
    ],
    ids=str,
)
def test_predicted_activations_are_those_of_autograd(
    tiny: Tiny, tiny_models: dict[str, list[str]], model: str, words: list[str], path: str
) -> None:
    """Rotary tables, indices and the router's own tensors are not counted: under 5 % even at this width."""
    sizes = ["training.seq_length=256", "model.hidden_size=256", f"training.attention={path}"]
    experiment = tiny(*tiny_models[model], *sizes, *words)
    predicted = activation_bytes(experiment.model, experiment.training, is_cpu=True)
    measured = autograd_bytes(experiment)
    assert 0.95 * measured < predicted < 1.02 * measured


def test_on_a_gpu_a_norm_keeps_its_input_as_it_is(tiny: Tiny) -> None:
    experiment = tiny()
    model, training = experiment.model, experiment.training
    cpu, gpu = (activation_bytes(model, training, is_cpu=is_cpu) for is_cpu in (True, False))
    norms, tokens = 2 * 2 + 1, 64 * 2
    assert cpu - gpu == norms * tokens * 128 * (2 * 4 - 2)


def test_recomputation_keeps_the_inputs_and_one_layer(tiny: Tiny) -> None:
    whole, again = tiny(), tiny("training.recompute=full")
    total = activation_bytes(whole.model, whole.training, is_cpu=True)
    inputs, tokens, last = 2 * 128 * 2, 64 * 2, 128 * (8 + 2)
    layer = (total - tokens * last) // 2
    predicted = activation_bytes(again.model, again.training, is_cpu=True)
    assert predicted == tokens * (inputs + last) + layer


def test_a_large_vocabulary_makes_the_peak_with_its_logits() -> None:
    """Llama's 128,256 rows at 4,096 tokens: in bf16 and float32, or the gradient and that of the output weight."""
    experiment = compose(
        ["training=default", "model=llama32-1b", "training.attention=fused"], None, {}
    )
    tokens = experiment.training.seq_length * experiment.training.micro_batch_size
    logits, gradient = tokens * 128256 * 6, tokens * 128256 * 2 + 128256 * 2048 * 6
    counted = passing_bytes(experiment.model, experiment.training, is_cpu=True)
    assert counted == max(logits, gradient)


def test_a_small_vocabulary_leaves_the_peak_to_the_largest_weights_gradient(tiny: Tiny) -> None:
    experiment = tiny("training.attention=fused", "training.seq_length=32")
    largest = 2 * 192 * 128
    logits = 32 * 2 * 384
    counted = passing_bytes(experiment.model, experiment.training, is_cpu=True)
    assert counted == max(largest * 6, logits * 2 + 384 * 128 * 6)


@pytest.mark.parametrize(
    ("precision", "is_cpu", "of_score"),
    [
        ("bf16", True, 4 + 2),
        ("bf16", False, 4 + 4 + 4 - 2),
        ("fp32", True, 12),
        ("fp32", False, 12),
    ],
)
def test_scores_make_the_peak_where_they_are_larger_than_what_follows(
    tiny: Tiny, precision: str, is_cpu: bool, of_score: int
) -> None:
    experiment = tiny("training.seq_length=1024", f"training.precision={precision}")
    tokens, heads, size = 1024 * 2, 4, 2 if precision == "bf16" else 4
    scores = tokens * heads * 1024 * of_score
    feed_forward = tokens * size * (128 + 5 * 192)
    counted = passing_bytes(experiment.model, experiment.training, is_cpu=is_cpu)
    assert counted == scores - feed_forward


def test_layers_share_no_mask(tiny: Tiny) -> None:
    """Plain attention keeps probabilities and a mask in addition, and the projections' v is a view either way."""
    plain, tiled = (kept(tiny(f"training.attention={path}")) for path in ("plain", "tiled"))
    assert plain - tiled == 2 * (64 * 2 * 4 * 64 * (4 + 2) + 64 * 64)


def test_a_tile_of_scores_makes_the_peak_where_it_is_larger_than_what_follows(tiny: Tiny) -> None:
    experiment = tiny("training.attention=tiled", "training.seq_length=2048")
    tokens, heads = 2048 * 2, 4
    tile = 2 * heads * 128 * 2048 * (2 * 4 + 5 * 2)
    operands = tokens * heads * 32 * (4 * 2 + 2 * 4)
    feed_forward = tokens * 2 * (128 + 5 * 192)
    assert (
        passing_bytes(experiment.model, experiment.training, is_cpu=True)
        == tile + operands - feed_forward
    )


def kept(experiment: Experiment, part: Part = WHOLE) -> int:
    return activation_bytes(experiment.model, experiment.training, is_cpu=False, part=part)


@pytest.mark.parametrize("path", ["plain", "tiled", "fused"])
def test_ranks_of_a_tensor_parallel_group_share_everything_with_sequence_parallelism(
    tiny: Tiny, tiny_models: dict[str, list[str]], path: str
) -> None:
    """Except masks, and the rows of routed experts, which both ranks of an expert take in and give back whole."""
    part = Part(Layout(tensor=2, sequence=True, expert_tensor=2))
    for name in ("llama32-1b", "deepseek2_lite"):
        experiment = tiny(*tiny_models[name], f"training.attention={path}")
        moe = experiment.model.moe
        rows = 0 if moe is None else 64 * 2 * moe.top_k * 2 * 128 * 2
        masks = experiment.model.num_layers * 64 * 64 if path == "plain" else 0
        assert kept(experiment, part) == (kept(experiment) + rows + masks) // 2


def test_without_sequence_parallelism_each_rank_keeps_whole_inputs(tiny: Tiny) -> None:
    """Norms and the inputs of qkv, fc1 and the output layer: 2 of hidden size for each layer and its norms, and 2."""
    experiment = tiny()
    shared, whole = (Part(Layout(tensor=2, sequence=sequence)) for sequence in (True, False))
    tokens, hidden = 64 * 2, 128 * 2
    half = tokens * hidden // 2
    assert kept(experiment, whole) - kept(experiment, shared) == 2 * 4 * half + 2 * half


def test_ranks_that_share_a_sequence_keep_the_keys_and_values_of_all(tiny: Tiny) -> None:
    """Half of the tokens; for each, in place of qkv and rotated q and k: q, and k and v of both halves."""
    experiment = tiny("training.attention=tiled")
    layers, tokens, heads, groups, D = 2, 64 * 2, 4, 2, 32
    part = Part(Layout(context=2))
    width = heads * D + 2 * groups * 2 * D
    before = (heads + 2 * groups) * D + (heads + groups) * D
    expected = kept(experiment) // 2 + layers * tokens // 2 * 2 * (width - before)
    assert kept(experiment, part) == expected


def test_stages_keep_their_layers_once_for_each_micro_batch_in_flight(tiny: Tiny) -> None:
    experiment = tiny("model.num_layers=4")
    tokens, hidden = 64 * 2, 128 * 2
    last = tokens * 2 * hidden
    layer = (kept(experiment) - last) // 4
    first, end = (Part(Layout(pipeline=2), stage, micro_batches=8) for stage in (0, 1))
    assert kept(experiment, first) == 2 * (2 * layer + tokens * hidden), "with what it sends"
    assert kept(experiment, end) == 2 * layer + last
    interleaved = Part(Layout(pipeline=2, chunks=2), 0, micro_batches=8)
    assert kept(experiment, interleaved) == 5 * layer + 5 * tokens * hidden


def test_selective_recomputation_keeps_the_scores_of_one_layer(tiny: Tiny) -> None:
    plain, selective = tiny(), tiny("training.recompute=selective")
    scores_and_mask = 64 * 2 * 4 * 64 * (4 + 2) + 64 * 64
    assert kept(plain) - kept(selective) == (2 - 1) * scores_and_mask
    tiled = (
        tiny("training.attention=tiled", f"training.recompute={r}") for r in ("none", "selective")
    )
    assert len(set(map(kept, tiled))) == 1, "tiles keep no scores in the first place"


def test_experts_of_other_ranks_take_as_many_tokens_as_they_send(
    tiny: Tiny, tiny_models: dict[str, list[str]]
) -> None:
    experiment = tiny(*tiny_models["deepseek2_lite"], "training.attention=fused")
    part = Part(Layout(data=2, expert=2))
    assert kept(experiment, part) == kept(experiment)
    model, training = experiment.model, experiment.training
    tokens = 64 * 2 * model.hidden_size * 2
    passing = [
        passing_bytes(
            replace(model, vocab_size=1), training, is_cpu=False, part=replace(part, dispatcher=d)
        )
        for d in Dispatcher
    ]
    assert model.moe is not None
    weights = largest_linear(model) * 6
    expected = [max(weights, 2 * copies * tokens) for copies in (2, model.moe.top_k)]
    assert passing == expected


def test_the_last_stage_alone_has_logits_and_a_rank_its_share_of_them(tiny: Tiny) -> None:
    experiment = tiny("training.attention=fused")
    model, training = replace(experiment.model, vocab_size=100000), experiment.training
    rows, tokens = 100096, 64 * 2
    peaks = [
        passing_bytes(model, training, is_cpu=False, part=Part(Layout(pipeline=2, tensor=2), stage))
        for stage in (0, 1)
    ]
    largest = 2 * 192 * 128 // 2 * 6
    assert peaks == [largest, max(tokens * rows // 2 * 6, tokens * rows + rows // 2 * 128 * 6)]


def test_a_tile_of_a_rank_has_its_queries_and_all_keys(tiny: Tiny) -> None:
    experiment = tiny("training.attention=tiled", "training.seq_length=2048")
    model, training = experiment.model, experiment.training
    tokens, heads = 1024 * 2, 4
    tile = 2 * heads * 128 * 2048 * (2 * 4 + 5 * 2)
    operands = tokens * heads * 32 * (2 * 2 + 2 * (2 * 2 + 2 * 4))
    later = tokens * 2 * (128 + 5 * 192)
    peak = passing_bytes(model, training, is_cpu=False, part=Part(Layout(context=2)))
    assert peak == tile + operands - later
