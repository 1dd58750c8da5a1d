"""Where the ranks' parts of parameters lie in published tensors, in any layout.

A block is a rectangle: some rows of a published tensor, in all columns or some, that lie together in the part of a
parameter that one rank holds. The blocks of one copy of the model cover every published tensor exactly once, and so
they serve both directions: a rank reads the blocks of its parts, and a published tensor consists of the blocks of whole
parameters.

The padding of the vocabulary counts as a tensor with the parameter's name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.shards import WHOLE, Shard
from quantexp.schema import ModelConfig


@dataclass(frozen=True)
class Block:
    """Rows of a published tensor that are rows of a rank's part of a parameter."""

    parameter: str
    tensor: str
    #: The first row in the tensor, and the number of rows.
    first: int
    count: int
    #: The first row in the part.
    part_row: int
    #: The range [start, stop) of the tensor's columns; the part has these alone. None for a vector.
    columns: tuple[int, int] | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        start, stop = self.columns or (0, 1)
        return self.count * (stop - start)


@dataclass(frozen=True)
class Source:
    """A published tensor, or padding, and the blocks of whole parameters that it consists of."""

    shape: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)


def blocks_of(parameter: Parameter, shard: Shard) -> Iterator[Block]:
    """The blocks of a part of a parameter, in the order of the part's rows."""
    width = parameter.width
    columns = None if width is None else shard.ranges[0] if shard.axis == 1 else (0, width)
    part_row = 0
    for start, stop in shard.ranges if shard.axis == 0 else ((0, parameter.shape[0]),):
        begin = 0
        for rows in parameter.rows:
            low, high = max(start, begin), min(stop, begin + rows.count)
            if low < high:
                first, at = rows.first + low - begin, part_row + low - start
                yield Block(parameter.name, rows.tensor, first, high - low, at, columns)
            begin += rows.count
        part_row += stop - start


def sources(model: ModelConfig) -> dict[str, Source]:
    """Every published tensor of a model in its order, then the paddings."""
    parameters = mapping(model)
    shapes = published(parameters) | {
        each.name: (each.padding, *each.shape[1:]) for each in parameters if each.padding
    }
    by_name = {name: Source(shape) for name, shape in shapes.items()}
    for parameter in parameters:
        for block in blocks_of(parameter, WHOLE):
            by_name[block.tensor].blocks.append(block)
    return by_name
