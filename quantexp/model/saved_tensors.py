"""Published tensors, and the padding of the vocabulary, from the shards that the ranks of any layout saved.

A tensor is put together from the main weights, and rounded to the working dtype: to the bits of the model's weights,
which the optimizer makes in the same way. One tensor, and one block of it in fp32, are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantexp.model.huggingface.blocks import Block, Source, sources
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.pieces import Piece
from quantexp.model.shards import Shard
from quantexp.model.training_state import MAIN, SavedPieces
from quantexp.schema import ModelConfig, Precision

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: torch's names.
_DTYPES = {Precision.bf16: "bfloat16", Precision.fp16: "float16", Precision.fp32: "float32"}


def dtype_name_of(precision: Precision) -> str:
    """torch's name of the dtype of published weights."""
    return _DTYPES[precision]


@dataclass(frozen=True)
class SavedTensors:
    """The published tensors, and the paddings by their parameters' names."""

    saved: SavedPieces
    sources: Mapping[str, Source]
    #: Of each parameter.
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def open(
        cls, folder: Path, files: Iterable[str], model: ModelConfig, precision: Precision
    ) -> SavedTensors:
        """Those of a model in these files of a folder, to be rounded to the dtype of `precision`.

        Raises:
            DataError: a file is missing or damaged.
        """
        import torch

        shapes = {each.name: each.shape for each in mapping(model)}
        saved = SavedPieces.open(folder, files, shapes)
        return cls(saved, sources(model), shapes, getattr(torch, dtype_name_of(precision)))

    def tensor(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            DataError: the files hold another model, or lack elements.
        """
        import torch

        source = self.sources[name]
        whole = torch.empty(source.shape, dtype=self.dtype)
        for block in source.blocks:
            rows = whole[block.first : block.first + block.count]
            rows.copy_(self._rows(block).view(rows.shape))
        return whole

    def _rows(self, block: Block) -> Tensor:
        rows = Shard(0, ((block.part_row, block.part_row + block.count),))
        piece = Piece(self.shapes[block.parameter], rows, 0, block.numel)
        return self.saved.read(block.parameter, piece, (MAIN,))[MAIN]
