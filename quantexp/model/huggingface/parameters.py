"""A parameter of Megatron's, made of rows of published tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """A range of rows (the first axis) of a published tensor."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True)
class Parameter:
    """A parameter of Megatron's."""

    #: As in `GPTModel.named_parameters()`.
    name: str
    #: What its rows are, from the first on.
    parts: tuple[Rows, ...]
    #: Elements of a row; None where the parameter is a vector.
    width: int | None
    #: Rows at the end that no published tensor has.
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """As Megatron holds it."""
        rows = sum(part.count for part in self.parts) + self.padding
        return (rows,) if self.width is None else (rows, self.width)


def whole(name: str, tensor: str, rows: int, width: int) -> Parameter:
    """A matrix that is published as it is."""
    return Parameter(name, (Rows(tensor, 0, rows),), width)


def vector(name: str, tensor: str, count: int) -> Parameter:
    """A norm's weight, which is published as it is."""
    return Parameter(name, (Rows(tensor, 0, count),), None)


def feed_forward(ours: str, theirs: str, inner: int, hidden: int) -> Iterator[Parameter]:
    """A gated feed-forward: Megatron holds gate and up in one."""
    gate_and_up = (
        Rows(f"{theirs}.gate_proj.weight", 0, inner),
        Rows(f"{theirs}.up_proj.weight", 0, inner),
    )
    yield Parameter(f"{ours}.linear_fc1.weight", gate_and_up, hidden)
    yield whole(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", hidden, inner)
