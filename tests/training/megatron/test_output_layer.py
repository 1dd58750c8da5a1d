"""The output layer, and an embedding tied to it, against plain products of quantised tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor

from quantexp.capture import open_capture
from quantexp.capture.select.budget import price
from quantexp.formats import quantise
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training.megatron.finite import _first_gradient
from quantexp.training.megatron.model import (
    build_model,
    linear_weights,
    scheme_modules,
    set_precision,
    share_weight_copies,
)
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec

from .whole_models import draw

Tiny = Callable[..., Experiment]
OUTPUT, EMBEDDING = ModuleId(2, "output"), ModuleId(2, "embedding")
FP32 = (
    *("training.precision=fp32", "training.iterations=1", "training.warmup_iterations=0"),
    *("capture.weight_grads=true", "capture.values=both"),
)


@contextmanager
def built(experiment: Experiment) -> Iterator[Any]:
    """The model with initial weights under its scheme."""
    with session(experiment.training):
        spec = inject(stock_spec(experiment.model))
        gpt, _ = build_model(experiment.model, experiment.training, spec, experiment.quant)
        draw(gpt, experiment.model)
        set_precision(gpt, precision_map(experiment.model, experiment.quant))
        yield gpt


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("fmt", ["mxfp8", "hifp8"])
def test_logits_and_gradients_are_products_of_quantised_operands(
    run_tiny: Callable[..., RunDir], tiny: Tiny, fmt: str, tied: str
) -> None:
    """In fp32, whose products here are those of torch; g is quantised along the vocabulary and along tokens."""
    words = ("quant=bf16", f"quant/output={fmt}", f"model.tie_embeddings={tied}")
    run = run_tiny(*FP32, *words)
    lines = open_capture(run.tensors).with_values()
    stored = {line.name: line.metadata["bytes"] for line in lines}
    assert sum(stored.values()) == price(tiny(*FP32, *words)).num_bytes
    tensors = {
        entry.metadata["tensor"]: entry.torch()
        for entry in open_capture(run.tensors).select(module="output")
    }
    x, w, g = (tensors[name] for name in ("input", "weight", "grad_output"))
    assert w.shape == (384, 128), "the padded vocabulary"

    def quantised(tensor: Tensor, axis: int, target: float = 15.0) -> Tensor:
        if fmt == "mxfp8":
            return quantise(tensor, "mxfp8_e4m3", axis=axis, scale_rule="rceil")
        return quantise(tensor, "hifp8", scaling="current", amax_target=target)

    g_dgrad, g_wgrad = (quantised(g, axis, 224.0) for axis in (-1, 0))
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-8)
    output = quantised(x, -1) @ quantised(w, -1).t()
    torch.testing.assert_close(tensors["output"], output, rtol=1e-5, atol=1e-6)
    close(tensors["grad_input"], g_dgrad @ quantised(w, 0))
    dw = g_wgrad.flatten(0, 1).t() @ quantised(x, 0).flatten(0, 1)
    close(tensors["grad_weight"], dw)
    assert not torch.equal(output, x @ w.t())


def test_tied_embedding_looks_up_the_quantised_weight_and_passes_the_gradient_on(
    tiny: Tiny,
) -> None:
    with built(tiny("quant=bf16", "quant/output=mxfp8")) as gpt:
        embedding = gpt.embedding.word_embeddings
        tokens = torch.tensor([[3, 5, 3]])
        table = quantise(embedding.weight.detach(), "mxfp8_e4m3", axis=-1, scale_rule="rceil")
        rows = embedding(tokens)
        assert torch.equal(rows, table[tokens])
        assert not torch.equal(rows, embedding.weight[tokens])
        rows.sum().backward()
        gradient = embedding.weight.grad
        assert gradient[3].eq(2).all()
        assert gradient[5].eq(1).all()
        assert gradient.abs().sum() == 3 * gradient.shape[1]


def test_clipped_weight_has_no_gradient_from_the_lookup_either(tiny: Tiny) -> None:
    site = "{format: mxfp8, scale_rule: floor, clip_gradient: true}"
    with built(tiny("quant=bf16", f"quant.output.fprop.w={site}")) as gpt:
        embedding = gpt.embedding.word_embeddings
        with torch.no_grad():
            embedding.weight[7] = 1.0
            embedding.weight[7, 0] = 500.0  # beyond 448, the largest under the scale 1
        embedding(torch.tensor([[7]])).sum().backward()
    assert embedding.weight.grad[7, 0] == 0
    assert embedding.weight.grad[7, 1:].eq(1).all()


def test_lookup_and_product_share_one_copy_of_a_step(tiny: Tiny) -> None:
    copies = WeightCopies()
    with built(tiny("quant=bf16", "quant/output=mxfp8")) as gpt, torch.no_grad():
        share_weight_copies(gpt, copies)
        weight = gpt.embedding.word_embeddings.weight
        with copies.step(several=True):
            gpt.embedding.word_embeddings(torch.tensor([[1]]))
            assert copies.num_bytes() == weight.nbytes
            gpt.output_layer(torch.zeros(4, 1, 128, dtype=weight.dtype), weight=weight)
            assert copies.num_bytes() == weight.nbytes


@pytest.mark.parametrize("tied", ["true", "false"])
def test_first_gradient_that_is_not_finite_names_the_product(tiny: Tiny, tied: str) -> None:
    with built(tiny("quant=bf16", "quant/output=mxfp8", f"model.tie_embeddings={tied}")) as gpt:
        for parameter in gpt.parameters():
            parameter.main_grad = torch.zeros(2)
        linear_weights(gpt)[OUTPUT].main_grad[0] = torch.nan  # type: ignore[attr-defined]
        assert "(output layer output.wgrad) is the first" in str(_first_gradient(gpt))


def test_modules_are_those_of_the_map_and_stock_without_it(tiny: Tiny) -> None:
    with built(tiny("quant=linear_mxfp8")) as gpt:
        assert type(gpt.output_layer) is ColumnParallelLinear
        assert type(gpt.embedding.word_embeddings) is VocabParallelEmbedding
    untied = "model.tie_embeddings=false"
    with built(tiny("quant=bf16", "quant/output=mxfp8", untied)) as gpt:
        assert OUTPUT in scheme_modules(gpt)
        assert EMBEDDING not in scheme_modules(gpt)
        assert type(gpt.embedding.word_embeddings) is VocabParallelEmbedding
        assert linear_weights(gpt)[OUTPUT] is gpt.output_layer.weight
    with built(tiny("quant=bf16", "quant/output=mxfp8")) as gpt:
        assert {OUTPUT, EMBEDDING} <= scheme_modules(gpt).keys()
        assert linear_weights(gpt)[OUTPUT] is gpt.embedding.word_embeddings.weight
        assert EMBEDDING not in linear_weights(gpt)
