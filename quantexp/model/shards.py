"""Which part of each parameter a rank holds.

Names are global: those of `GPTModel.named_parameters()` of a model in one process. A parameter is divided along one
axis, or not at all:

    rows (0)      embedding, output layer, qkv and its bias, q-proj, q-down, q-up, kv-down, kv-up, fc1
    columns (1)   proj, fc2
    whole         norms, router

fc1 holds gate and up, and a rank's share of each: two ranges of rows. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantexp.model.layout import Layout, Place
from quantexp.schema import ModelConfig

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_BY_ROWS = (
    *("embedding.word_embeddings", "output_layer", "linear_qkv", "linear_q_proj"),
    *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    "linear_fc1",
)
_BY_COLUMNS = ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class Shard:
    """A part of a tensor along one axis."""

    #: None means the whole tensor.
    axis: int | None
    #: The ranges [start, stop) along the axis, in the order in which they lie in the part.
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def extent(self) -> int:
        """The part's extent along the axis."""
        return sum(stop - start for start, stop in self.ranges)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape, of a tensor of shape `whole`."""
        return tuple(self.extent if axis == self.axis else n for axis, n in enumerate(whole))


WHOLE = Shard(None)


def layer_of(name: str) -> int | None:
    """The layer of a parameter; None for the embedding, the final norm and the output layer."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def expert_of(name: str) -> int | None:
    """The routed expert of a parameter; None if it belongs to none."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def global_name(name: str, first_layer: int, first_expert: int = 0) -> str:
    """The global name of a parameter that a rank counts from its own first layer and first expert."""
    if (layer := layer_of(name)) is not None:
        name = _LAYER.sub(f"decoder.layers.{layer + first_layer}.", name, count=1)
    if (expert := expert_of(name)) is not None:
        name = _EXPERT.sub(f".mlp.experts.local_experts.{expert + first_expert}.", name, count=1)
    return name


def axis_of(name: str) -> int | None:
    """The axis along which tensor parallelism divides a parameter; None for a whole one."""
    owner = _owner(name)
    if owner.endswith(_BY_ROWS):
        return 0
    return 1 if owner.endswith(_BY_COLUMNS) else None


def num_ranges(name: str) -> int:
    """Ranges in a rank's share of a divided parameter: one of gate and one of up in fc1, one in all others."""
    return 2 if _owner(name).endswith("linear_fc1") else 1


def _owner(name: str) -> str:
    """The module of a weight or a bias."""
    return name.removesuffix(".weight").removesuffix(".bias")


def shard_of(name: str, shape: tuple[int, ...], layout: Layout, place: Place) -> Shard:
    """The part of a parameter, of whole `shape`, that a rank with this place holds (if it holds any of it).

    `holds` says whether it does.
    """
    axis = axis_of(name)
    routed = expert_of(name) is not None
    size = layout.expert_tensor if routed else layout.tensor
    index = place.expert_tensor if routed else place.tensor
    if axis is None or size == 1:
        return WHOLE
    halves = num_ranges(name)
    part = shape[axis] // halves
    each = part // size
    starts = [half * part + index * each for half in range(halves)]
    return Shard(axis, tuple((start, start + each) for start in starts))


def holds(name: str, model: ModelConfig, layout: Layout, place: Place) -> bool:
    """Whether a rank holds a part of a parameter.

    A tied embedding is on the first and on the last stage.
    """
    stage, last = place.pipeline, layout.pipeline - 1
    layer = layer_of(name)
    if layer is None:
        if name.startswith("embedding."):
            return stage == 0 or (model.tie_embeddings and stage == last)
        return stage == last
    chunks = range(layout.chunks)
    if not any(layer in layout.layers(model.num_layers, stage, chunk) for chunk in chunks):
        return False
    expert = expert_of(name)
    assert model.moe is not None or expert is None
    return expert is None or expert in layout.experts(_num_experts(model), place)


def owners(
    name: str,
    shape: tuple[int, ...],
    model: ModelConfig,
    layout: Layout,
    places: Iterable[tuple[int, Place]],
) -> dict[Shard, int]:
    """The ranks that together hold a parameter, of whole `shape`, once: of equal parts the lowest rank's counts.

    `places` are `layout.model_places()`.
    """
    ranks: dict[Shard, int] = {}
    for rank, place in places:
        if holds(name, model, layout, place):
            ranks.setdefault(shard_of(name, shape, layout, place), rank)
    return ranks


def _num_experts(model: ModelConfig) -> int:
    return 0 if model.moe is None else model.moe.num_experts
