"""The parameters of a mixture of experts: the router, the routed experts, the shared ones."""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.model.decoder import shared_width
from quantexp.model.huggingface.parameters import GATE_UP_DOWN, Parameter, feed_forward, whole
from quantexp.schema import MoeConfig


def experts(
    ours: str,
    theirs: str,
    hidden: int,
    moe: MoeConfig,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Iterator[Parameter]:
    """The parameters in Megatron's order; `names` are the published ones of an expert's gate, up and down."""
    yield whole(f"{ours}.router.weight", f"{theirs}.gate.weight", moe.num_experts, hidden)
    for expert in range(moe.num_experts):
        own, published = f"{ours}.experts.local_experts.{expert}", f"{theirs}.experts.{expert}"
        yield from feed_forward(own, published, moe.expert_ffn_hidden_size, hidden, names)
    if moe.num_shared_experts:
        own, published = f"{ours}.shared_experts", f"{theirs}.shared_experts"
        yield from feed_forward(own, published, shared_width(moe), hidden)
