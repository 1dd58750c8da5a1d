"""Where a training is: what random numbers and delayed scales follow from.

Random numbers are a function of place (see `quantexp.formats.philox`): the seed is that of the training and the slot,
the offset that of the iteration and the micro-batch.

    seed    the first 8 bytes, big-endian, of sha256("<training.seed> <stream>"); the stream is the slot's label, such
            as `layer 0 fc1 linear.wgrad.g`, and for the signs of a product's Hadamard transform the product's,
            `layer 0 fc1 linear.wgrad`
    offset  iteration 2^32 + micro-batch; micro-batches are counted over all processes, so that a run draws the same
            numbers however many share it; 0 for a weight of which one copy serves the whole step

So a forward pass that is recomputed, and a forward copy that the backward makes again, repeat the forward's numbers.
A slot under delayed scaling keeps the history of its amax here (`state_dict` is for a checkpoint); it moves on once an
iteration. While `observing` is off (an evaluation) nothing enters a history; a recomputed forward pass shows it the
tensor of the first one again, which changes no maximum.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import AmaxHistory, Hadamard, Rounding, Scaling, random_signs
from quantexp.quant.slots import Operand


@dataclass
class Moment:
    """The training's seed, the micro-batch at work, and the histories of its slots."""

    seed: int
    iteration: int = 1
    #: Of this iteration, over all processes.
    micro_batch: int = 0
    observing: bool = True
    #: Whether a weight is quantised once a step (`quantexp.quant.weight_cache.weights`), with the first micro-batch's
    #: numbers.
    weights_once: bool = False
    histories: dict[str, AmaxHistory] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """The offset of every random number of this micro-batch."""
        return (self.iteration << 32) + self.micro_batch

    def begin(self, iteration: int, micro_batch: int) -> None:
        """A micro-batch begins."""
        self.iteration, self.micro_batch = iteration, micro_batch

    def finish(self) -> None:
        """The iteration is over: every history moves on."""
        for history in self.histories.values():
            history.advance()

    def amax(self, operand: Operand) -> Tensor | None:
        """What an operand under delayed scaling is scaled by; None is its own amax."""
        history = self.histories.get(operand.stream)
        return None if history is None or history.window != operand.window else history.amax

    def amax_for(self, operand: Operand, x: Tensor) -> Tensor:
        """The same for x, which is observed unless it is a forward copy."""
        history = self.histories.get(operand.stream)
        if history is None or history.window != operand.window:
            assert operand.window is not None
            history = self.histories[operand.stream] = AmaxHistory(operand.window)
        if self.observing and not operand.reuse:
            history.observe(x)
        return history.amax_for(x)

    def signs(self, operand: Operand, device: torch.device) -> Tensor | None:
        """The signs before an operand's Hadamard transform, alike for both operands of a product."""
        if operand.hadamard is not Hadamard.RANDOM:
            return None
        assert operand.hadamard_block is not None
        product = operand.stream.rpartition(".")[0]
        return random_signs(
            operand.hadamard_block, seed_of(self.seed, product), self.offset, device
        )

    def draw(self, operand: Operand) -> dict[str, int]:
        """The seed and offset that `quantise` is told; nothing where rounding is not stochastic."""
        if operand.rounding is not Rounding.STOCHASTIC:
            return {}
        once = self.weights_once and operand.once_a_step
        offset = self.iteration << 32 if once else self.offset
        return {"seed": seed_of(self.seed, operand.stream), "offset": offset}

    def record(self, operand: Operand) -> dict[str, object]:
        """What the moment adds to an operand's options, for a capture: seed, offset, signs, amax."""
        if not operand.depends_on_moment:
            return {}
        added: dict[str, object] = dict(self.draw(operand))
        signs = self.signs(operand, torch.device("cpu"))
        if signs is not None:
            added["signs"] = [int(sign) for sign in signs]
        if operand.scaling is Scaling.DELAYED:
            amax = self.amax(operand)
            added["amax"] = None if amax is None else float(amax)
        return added

    def state_dict(self) -> dict[str, Any]:
        """The histories, in plain numbers, by stream."""
        return {stream: history.state_dict() for stream, history in self.histories.items()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue with the histories of `state_dict`, and no others."""
        self.histories = {stream: AmaxHistory(saved["window"]) for stream, saved in state.items()}
        for stream, history in self.histories.items():
            history.load_state_dict(state[stream], device)


@lru_cache(maxsize=1 << 16)
def seed_of(seed: int, stream: str) -> int:
    """The seed of a stream, in [0, 2^64)."""
    digest = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


_current: Moment | None = None


def current() -> Moment:
    """The moment in force.

    Raises:
        RuntimeError: if none is.
    """
    if _current is None:
        raise RuntimeError(
            "no training is at work: random numbers and delayed scales have no moment"
        )
    return _current


@contextlib.contextmanager
def during(moment: Moment) -> Iterator[Moment]:
    """Whatever is quantised inside belongs to this training; backward passes on other threads too."""
    global _current
    before = _current
    _current = moment
    try:
        yield moment
    finally:
        _current = before
