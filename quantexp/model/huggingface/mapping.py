"""Maps Megatron's parameters to rows of published tensors.

In all supported families the two differ only in names and the order of rows: a Megatron parameter is a
concatenation of row ranges of published tensors, and every row of every published tensor appears in exactly one
place. One table therefore serves loading and exporting, bit for bit.

    linear_qkv      for each query group: its query heads, its key head, its value head; a bias likewise
    linear_fc1      gate, then up
    embedding, output layer     the published rows, then Megatron's padding of the vocabulary, which is zero

A kind of attention is a module with `layer(model, index)`: `llama` (grouped queries) and `deepseek_v2` (a latent).
Imports no torch.
"""

from __future__ import annotations

from quantexp.model.huggingface import deepseek_v2, llama
from quantexp.model.huggingface.parameters import Parameter, Rows, vector
from quantexp.model.sizes import padded_vocab_size
from quantexp.schema import ModelConfig


def mapping(model: ModelConfig) -> list[Parameter]:
    """Every parameter of a model, in Megatron's order."""
    kind = llama if model.mla is None else deepseek_v2
    return [
        _vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", model),
        *(parameter for layer in range(model.num_layers) for parameter in kind.layer(model, layer)),
        vector("decoder.final_layernorm.weight", "model.norm.weight", model.hidden_size),
        *_output_layer(model),
    ]


def published(parameters: list[Parameter]) -> dict[str, tuple[int, ...]]:
    """The shape of every published tensor that the parameters consist of."""
    rows: dict[str, int] = {}
    widths: dict[str, int | None] = {}
    for parameter in parameters:
        for part in parameter.parts:
            rows[part.tensor] = rows.get(part.tensor, 0) + part.count
            widths[part.tensor] = parameter.width
    return {
        name: (count,) if (width := widths[name]) is None else (count, width)
        for name, count in rows.items()
    }


def _vocabulary(name: str, tensor: str, model: ModelConfig) -> Parameter:
    padding = padded_vocab_size(model.vocab_size) - model.vocab_size
    return Parameter(name, (Rows(tensor, 0, model.vocab_size),), model.hidden_size, padding)


def _output_layer(model: ModelConfig) -> list[Parameter]:
    """Empty if the output layer is the embedding."""
    if model.tie_embeddings:
        return []
    return [_vocabulary("output_layer.weight", "lm_head.weight", model)]
