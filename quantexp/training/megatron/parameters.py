"""The parts of a model's parameters that a rank holds, by global name.

Global names are those of `GPTModel.named_parameters()` of a model in one process. A rank counts layers from the first
of each chunk and experts from its own first, and the last of several stages holds a tied embedding once more, as its
output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from quantexp.model.huggingface.mapping import mapping
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.layout import Layout, Place
from quantexp.model.shards import Shard, axis_of, global_name, num_ranges, shard_of
from quantexp.schema import ModelConfig

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter."""

    #: The whole parameter: global name, shape, published rows.
    parameter: Parameter
    #: The part of it that `tensor` is.
    shard: Shard
    tensor: torch.nn.Parameter


def parts_of(
    chunks: Sequence[GPTModel], model: ModelConfig, layout: Layout, place: Place
) -> dict[str, Part]:
    """A rank's parts by global name, in the order of its chunks.

    Args:
        chunks: the rank's chunks of a model built for `model`; a single one without interleaving.
        model: the whole model's configuration.
        layout: the run's.
        place: the rank's.
    """
    whole = {parameter.name: parameter for parameter in mapping(model)}
    parts: dict[str, Part] = {}
    for chunk, gpt in enumerate(chunks):
        first = layout.layers(model.num_layers, place.pipeline, chunk).start
        for local, tensor in gpt.named_parameters():
            name = _global_name(local, model, layout, place, first)
            shard = shard_of(name, whole[name].shape, layout, place)
            assert tuple(tensor.shape) == shard.shape(whole[name].shape), name
            parts[name] = Part(whole[name], shard, tensor)
    return parts


def _global_name(
    local: str, model: ModelConfig, layout: Layout, place: Place, first_layer: int
) -> str:
    if local == _OUTPUT and model.tie_embeddings:
        return _EMBEDDING
    experts = 0 if model.moe is None else layout.experts(model.moe.num_experts, place).start
    return global_name(local, first_layer, experts)


def mark_divided(parts: dict[str, Part]) -> None:
    """Set Megatron's attributes of parameters that tensor parallelism divides, in every layout.

    Megatron sets them where it initialises weights itself, and always of a bias. Without them the gradient's norm
    counts a divided parameter on one rank of its group alone. Call before the optimizer is built.
    """
    for name, part in parts.items():
        axis = axis_of(name)
        if axis is not None and not hasattr(part.tensor, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(part.tensor, True, axis, num_ranges(name))
