"""A Megatron parameter, composed of rows of published tensors; and those of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantexp.model.decoder import shared_width
from quantexp.schema import MoeConfig

#: The usual published names of a gated feed-forward's matrices.
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Rows:
    """A range of rows (the first axis) of a published tensor."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter."""

    #: As in `GPTModel.named_parameters()`.
    name: str
    #: The sources of its rows, in order.
    parts: tuple[Rows, ...]
    #: Elements per row; None if the parameter is a vector.
    width: int | None
    #: Rows at the end that are in no published tensor.
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in Megatron."""
        rows = sum(part.count for part in self.rows)
        return (rows,) if self.width is None else (rows, self.width)

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The sources of all rows; the padding is a tensor by itself, with the parameter's name."""
        padding = (Rows(self.name, 0, self.padding),) if self.padding else ()
        return (*self.parts, *padding)


def whole(name: str, tensor: str, rows: int, width: int) -> Parameter:
    """A matrix that is published unchanged."""
    return Parameter(name, (Rows(tensor, 0, rows),), width)


def vector(name: str, tensor: str, count: int) -> Parameter:
    """A vector that is published unchanged, such as a norm's weight."""
    return Parameter(name, (Rows(tensor, 0, count),), None)


def feed_forward(
    ours: str,
    theirs: str,
    inner: int,
    hidden: int,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Iterator[Parameter]:
    """A gated feed-forward; Megatron stores gate and up in one matrix.

    `names` are the published ones of gate, up and down.
    """
    gate, up, down = names
    gate_and_up = (
        Rows(f"{theirs}.{gate}.weight", 0, inner),
        Rows(f"{theirs}.{up}.weight", 0, inner),
    )
    yield Parameter(f"{ours}.linear_fc1.weight", gate_and_up, hidden)
    yield whole(f"{ours}.linear_fc2.weight", f"{theirs}.{down}.weight", hidden, inner)


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
