"""Whether the stages of a pipeline get what their neighbours have sent, in drawn elements.

Forward that is what leaves a stage, backward the gradient of what entered the next one; for each micro-batch. No rank
has both ends, so each keeps what it has at its own, and all are compared when the passes of an iteration have ended.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.formats.torch_internals import unseen
from quantexp.model.layout import Layout, Place
from quantexp.proof.hooked import unseen_hook
from quantexp.proof.saved_state import drawn
from quantexp.training.megatron.collectives import gather


@dataclass(frozen=True, order=True)
class End:
    """One end of what is sent between a stage and the next one; interleaved chunks are stages of their own."""

    stage: int
    micro_batch: int
    is_backward: bool
    #: Whether it is that of the later stage.
    is_later: bool

    @property
    def other(self) -> End:
        """The other end."""
        return replace(self, is_later=not self.is_later)


#: What a rank has at its ends, and its place.
Seen = tuple[Place, dict[End, np.ndarray]]


class SendWatch:
    """What a rank's chunks of the model send and get."""

    def __init__(self, chunks: Sequence[GPTModel], layout: Layout) -> None:
        self._place = layout.place(torch.distributed.get_rank())
        #: By stage; empty without a pipeline.
        self._chunks = {
            number * layout.pipeline + self._place.pipeline: chunk
            for number, chunk in enumerate(chunks)
            if layout.pipeline > 1
        }
        self._handles: list[Any] = []
        self._values: dict[End, np.ndarray] = {}
        self._first = 0.0

    @contextlib.contextmanager
    def evaluating(self, first: float) -> Iterator[list[str]]:
        """The passes of an evaluation inside; what is wrong, in words, is in the list afterwards."""
        found: list[str] = []
        self.begin(first)
        yield found
        own = self.taken()
        if self._chunks:
            found += self.wrong(gather(own))

    def begin(self, first: float) -> None:
        """The passes of an iteration that is looked at begin; `first` of [0, 1) says which elements are compared."""
        self._first, self._values = first, {}
        for stage, chunk in self._chunks.items():
            if not chunk.pre_process:
                enter = partial(self._enter, stage - 1, itertools.count())
                self._handles.append(chunk.decoder.register_forward_pre_hook(enter))
            if not chunk.post_process:
                leave = partial(self._leave, stage, itertools.count())
                self._handles.append(chunk.decoder.register_forward_hook(leave))

    def taken(self) -> Seen:
        """What was seen; nothing is, from now on."""
        while self._handles:
            self._handles.pop().remove()
        own, self._values = self._values, {}
        return self._place, own

    def wrong(self, seen: Sequence[Seen]) -> list[str]:
        """What is wrong with what this rank got, in words; `seen` is what was `taken` on all ranks."""
        if not self._chunks:
            return []
        column = replace(self._place, pipeline=0)
        others = {
            end: values
            for place, ends in seen
            if replace(place, pipeline=0) == column
            for end, values in ends.items()
        }
        found: dict[tuple[int, bool], str] = {}
        for end, values in sorted(dict(seen)[self._place].items()):
            if end.is_later is end.is_backward:
                continue  # the end that sends
            sent = others.get(end.other)
            if sent is None or not np.array_equal(sent, values, equal_nan=True):
                what = "the gradient that stage" if end.is_backward else "what stage"
                sender, receiver = end.stage + end.is_backward, end.stage + (not end.is_backward)
                words = (
                    f"{what} {sender} sent in micro-batch {end.micro_batch} is not what stage "
                    f"{receiver} got"
                )
                found.setdefault((end.stage, end.is_backward), words)
        return list(found.values())

    def _enter(self, stage: int, calls: Iterator[int], decoder: Any, _: object) -> None:
        self._see(stage, next(calls), decoder.input_tensor, is_later=True)

    def _leave(self, stage: int, calls: Iterator[int], _: object, __: object, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        self._see(stage, next(calls), x, is_later=False)

    def _see(self, stage: int, index: int, x: Tensor, *, is_later: bool) -> None:
        with unseen():
            self._keep(End(stage, index, False, is_later), x.detach())
        if x.requires_grad:
            keep = partial(self._keep, End(stage, index, True, is_later))
            x.register_hook(unseen_hook(keep))  # type: ignore[no-untyped-call]

    def _keep(self, end: End, x: Tensor) -> None:
        at = torch.from_numpy(drawn(x.numel(), self._first)).to(x.device)
        self._values[end] = x.reshape(-1)[at].float().cpu().numpy()
