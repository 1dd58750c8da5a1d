"""Gathers the whole tensors of a model from the ranks that hold its parts, one at a time.

    rank 0                                      all other ranks
    `lead_or_serve` runs a function             `lead_or_serve` waits for requests
    `WholeTensors.tensor` requests a tensor     `WholeTensors.send` sends the rank's blocks of it, if it owns any
    ends: the last request                      return, or raise the error that ended rank 0

A tensor goes over the group of all ranks, on the device. Of equal parts on several ranks one is sent
(`quantexp.model.huggingface.blocks`). In a single process nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from quantexp.errors import RunError
from quantexp.model.huggingface.blocks import Block, Source, sources
from quantexp.model.layout import Layout
from quantexp.schema import ModelConfig
from quantexp.training.log import first_line
from quantexp.training.megatron.collectives import is_lost_peer
from quantexp.training.megatron.parameters import Part, parts_of

#: The request that ends serving, and the one that makes every rank call a function together.
_END, TOGETHER = -1, -2


@dataclass(frozen=True)
class WholeTensors:
    """The published tensors and the padding of a model whose parts lie on the ranks."""

    parts: Mapping[str, Part]
    #: By name; the order is the same on all ranks.
    sources: Mapping[str, Source]
    #: The working dtype; fp32 parameters of a 16-bit model came from it and are converted back.
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        chunks: Sequence[GPTModel],
        model: ModelConfig,
        dtype: torch.dtype,
        layout: Layout | None = None,
        rank: int = 0,
    ) -> WholeTensors:
        """Those of a rank's chunks; without a layout, of a single process."""
        layout = layout or Layout()
        parts = parts_of(chunks, model, layout, layout.place(rank))
        return cls(parts, sources(model, layout), dtype)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU; rank 0 alone calls this."""
        source = self.sources[name]
        others = {rank: blocks for rank, blocks in source.blocks.items() if rank}
        whole = torch.empty(source.shape, dtype=self.dtype)
        largest = max((_numel(blocks) for blocks in others.values()), default=0)
        buffer = torch.empty(largest, dtype=self.dtype, device=_device())
        if others:
            request_of(list(self.sources).index(name))
        for block in source.blocks.get(0, ()):
            _rows(whole, block).copy_(self._values(block))
        for rank, blocks in others.items():
            received = buffer[: _numel(blocks)]
            _exchange(P2POp(irecv, received, rank))
            _scatter(received.cpu(), blocks, whole)
        return whole

    def send(self, request: int) -> None:
        """Send this rank's blocks of a requested tensor to rank 0, if it owns any."""
        source = list(self.sources.values())[request]
        if blocks := source.blocks.get(torch.distributed.get_rank()):
            values = [self._values(block).to(self.dtype).reshape(-1) for block in blocks]
            _exchange(P2POp(isend, torch.cat(values).to(_device()), 0))

    def _values(self, block: Block) -> Tensor:
        part = self.parts[block.parameter].tensor.detach()
        return part[block.part_row : block.part_row + block.count]


def lead_or_serve(lead: Callable[[], None], serve: Callable[[int], None]) -> None:
    """Run `lead` on rank 0 while the other ranks answer its requests with `serve`; every rank calls this.

    Raises:
        RunError: on the other ranks, with the words of the error that `lead` raised on rank 0.
    """
    if torch.distributed.get_rank():
        while (request := request_of()) != _END:
            serve(request)
        if words := _words():
            raise RunError(words)
        return
    try:
        lead()
    except Exception as error:
        if not is_lost_peer(error):
            _end(first_line(error))
        raise
    _end("")


def _end(words: str) -> None:
    request_of(_END)
    _words(words)


def request_of(request: int = _END) -> int:
    """Rank 0's request, on all ranks."""
    if torch.distributed.get_world_size() == 1:
        return request
    number = torch.tensor(request, device=_device())
    torch.distributed.broadcast(number, 0)
    return int(number)


def _words(words: str = "") -> str:
    """Rank 0's words, on all ranks."""
    if torch.distributed.get_world_size() == 1:
        return words
    box = [words]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


def _device() -> str:
    return "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"


def _exchange(operation: P2POp) -> None:
    for work in batch_isend_irecv([operation]):
        work.wait()


def _numel(blocks: Sequence[Block]) -> int:
    return sum(block.numel for block in blocks)


def _rows(whole: Tensor, block: Block) -> Tensor:
    rows = whole[block.first : block.first + block.count]
    return rows if block.columns is None else rows[:, slice(*block.columns)]


def _scatter(values: Tensor, blocks: Sequence[Block], whole: Tensor) -> None:
    pieces = torch.split(values, [block.numel for block in blocks])
    for piece, block in zip(pieces, blocks, strict=True):
        rows = _rows(whole, block)
        rows.copy_(piece.view(rows.shape))
