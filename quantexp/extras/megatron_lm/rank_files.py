"""The format torch of Megatron-LM's checkpoints: a file for each rank that holds a part of the model.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

TT is the tensor-parallel rank, PPP the stage (with several stages), EEE the expert-parallel rank (with several of
these). A rank counts layers from the first of each of its chunks, and experts from its own first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.model.layout import Layout, Place
from quantexp.model.shards import Shard, expert_of, global_name, layer_of, owners
from quantexp.schema import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_FILE = "model_optim_rng.pt"


def first_file(folder: Path) -> Path:
    """The file of the first rank, which may not exist."""
    return min(folder.glob(f"mp_rank_00*/{_FILE}"), default=folder / "mp_rank_00" / _FILE)


def joined(
    names: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    args: Any,
    load: Callable[[str], Mapping[str, Any]],
) -> dict[str, Tensor | None]:
    """The whole parameters by global name; None for one of which a part is missing, or has another shape.

    Args:
        names: the shapes of the whole parameters.
        model: the whole model.
        args: Megatron-LM's arguments, which say the layout.
        load: reads a file, by its path in the folder.
    """
    layout = _layout(args)
    places = layout.model_places()
    parts = {name: owners(name, shape, model, layout, places) for name, shape in names.items()}
    whole: dict[str, Tensor | None] = {}
    for rank, place in places:
        content = load(_file_of(place, layout))
        for name, shape in names.items():
            for shard in (each for each, owner in parts[name].items() if owner == rank):
                own = _local(name, content, model, layout, place)
                if own is None or tuple(own.shape) != shard.shape(shape):
                    whole[name] = None
                elif shard.axis is None:
                    whole[name] = own
                else:
                    _put(whole, name, shape, shard, own)
    return whole


def _put(
    whole: dict[str, Tensor | None], name: str, shape: tuple[int, ...], shard: Shard, own: Tensor
) -> None:
    """Copy a part to its place, unless another part is missing."""
    import torch

    if name not in whole:
        whole[name] = torch.empty(shape, dtype=own.dtype)
    if (target := whole[name]) is None:
        return
    assert shard.axis is not None
    pieces = torch.split(own, [stop - start for start, stop in shard.ranges], dim=shard.axis)
    for (start, stop), piece in zip(shard.ranges, pieces, strict=True):
        target.narrow(shard.axis, start, stop - start).copy_(piece)


def _layout(args: Any) -> Layout:
    """The layout of the run that saved the checkpoint."""

    def size(of: str) -> int:
        return getattr(args, f"{of}_size", None) or 1

    tensor, pipeline, context = (
        size(f"{of}_parallel") for of in ("tensor_model", "pipeline_model", "context")
    )
    return Layout(
        data=max(1, size("world") // (tensor * context * pipeline)),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        chunks=size("virtual_pipeline_model_parallel"),
        expert=size("expert_model_parallel"),
        expert_tensor=getattr(args, "expert_tensor_parallel_size", None) or tensor,
    )


def _file_of(place: Place, layout: Layout) -> str:
    name = f"mp_rank_{place.tensor:02d}"
    if layout.pipeline > 1:
        name += f"_{place.pipeline:03d}"
    if layout.expert > 1:
        name += f"_{place.expert:03d}"
    return f"{name}/{_FILE}"


def _local(
    name: str, content: Mapping[str, Any], model: ModelConfig, layout: Layout, place: Place
) -> Tensor | None:
    """A rank's part of a parameter in its file; None if it is not there."""
    layer, expert = layer_of(name), expert_of(name)
    chunk = 0 if name.startswith("embedding.") else layout.chunks - 1
    first = 0
    if layer is not None:
        of_chunks = [
            layout.layers(model.num_layers, place.pipeline, c) for c in range(layout.chunks)
        ]
        chunk = next(c for c, layers in enumerate(of_chunks) if layer in layers)
        first = of_chunks[chunk].start
    first_expert = 0
    if expert is not None:
        assert model.moe is not None
        first_expert = layout.experts(model.moe.num_experts, place).start
    key = "model" if layout.chunks == 1 else f"model{chunk}"
    own: Tensor | None = content.get(key, {}).get(global_name(name, -first, -first_expert))
    return own
