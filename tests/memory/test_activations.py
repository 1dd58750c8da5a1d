"""Predicted activations against the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantexp.config.compose import compose
from quantexp.memory.activations import activation_bytes, passing_bytes
from quantexp.quant.precision import precision_map
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.schema import Experiment, Precision
from quantexp.training.megatron.model import build_model, set_precision
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec
from tests.training.megatron.whole_models import draw

Tiny = Callable[..., Experiment]
Q_LORA = "model.mla.q_lora_rank=24"


def autograd_bytes(experiment: Experiment) -> int:
    """Bytes of all storages that a forward pass saves, excluding parameters."""
    training = experiment.training
    T, B = training.seq_length, training.micro_batch_size
    with session(training), use_step_state(StepState(1)):
        spec = inject(stock_spec(experiment.model))
        model, _ = build_model(experiment.model, training, spec)
        draw(model, experiment.model)
        if training.precision is not Precision.fp32:
            model = model.bfloat16()
        declared = precision_map(experiment.model, experiment.quant)
        set_precision(model, declared, training.attention)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return x

        ids = torch.randint(256, (B, T), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(T).expand(B, T)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(ids, positions, None, labels=ids)
        logits = T * B * 384 * 4
        del loss
        return sum(storage.nbytes() for storage in storages.values()) - logits


MODELS: list[tuple[str, list[str]]] = [
    ("llama32-1b", []),
    ("llama31-8b", ["training.precision=fp32"]),
    ("deepseek2_lite", []),
    ("deepseek2_lite", [Q_LORA]),
    ("deepseek2_lite", ["model.moe.num_shared_experts=0", "model.moe.num_dense_layers=0"]),
]


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        # The path determines what attention saves: one test for each kind of attention, the rest is slow.
        pytest.param(path, *model, marks=[] if path == "plain" or i in (0, 2) else pytest.mark.slow)
        for path in ("plain", "fused", "tiled")
        for i, model in enumerate(MODELS)
    ],
    ids=str,
)
def test_predicted_activations_are_those_of_autograd(
    tiny: Tiny, tiny_models: dict[str, list[str]], model: str, words: list[str], path: str
) -> None:
    """Masks, rotary tables, indices and the router's own tensors are not counted: under 5 % even at this width."""
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


def test_scores_make_the_peak_where_they_are_larger_than_what_follows(tiny: Tiny) -> None:
    experiment = tiny("training.seq_length=1024")
    tokens, heads = 1024 * 2, 4
    scores = tokens * heads * 1024 * (4 + 2)
    feed_forward = tokens * 2 * (128 + 5 * 192)
    assert (
        passing_bytes(experiment.model, experiment.training, is_cpu=True) == scores - feed_forward
    )


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
