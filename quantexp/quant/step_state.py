"""Current iteration and micro-batch: the state that determines random numbers and delayed scales.

Random numbers are a function of position (see `quantexp.formats.philox`): the seed depends on the run and the slot, the
offset on the iteration and the micro-batch.

    seed    the first 8 bytes, big-endian, of sha256("<training.seed> <stream>"); the stream is the slot's label, such
            as `layer 0 fc1 linear.wgrad.g`, and for the signs of a product's Hadamard transform the product's,
            `layer 0 fc1 linear.wgrad`
    offset  iteration 2^32 + micro-batch; micro-batches are counted over all processes, so that a run draws the same
            numbers with any number of processes; micro-batch 0 for a weight with one copy for the whole step

A recomputed forward pass, and a forward copy recomputed in the backward pass, therefore repeat the forward's numbers.
In a pipeline the backward pass of a micro-batch runs after the forward passes of later ones, so it begins its own
micro-batch again (`begin`).
A slot under delayed scaling keeps its amax history here (`state_dict` is for a checkpoint); the history advances once
an iteration, by the largest amax of all ranks (`finish`). While `updates_histories` is off (an evaluation), nothing
enters a history. A recomputed forward pass enters the same tensor again, which changes no maximum.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypedDict

import torch
from torch import Tensor

from quantexp.formats import (
    AmaxHistory,
    Hadamard,
    Place,
    QuantSpec,
    Rounding,
    Scaling,
    random_signs,
)

#: From the amaxes of this rank by stream to the largest of any rank, by the streams of all ranks.
MergeAmaxes = Callable[[dict[str, float]], dict[str, float]]


#: A piece of a rank's part of an operand: its indices in the part, and its position in the whole operand.
Piece = tuple[tuple[slice, ...], Place]
#: The pieces of the part of a stream's operand with this shape; none if the rank has the whole operand.
PiecesOf = Callable[[str, tuple[int, ...]], Sequence[Piece]]


class Draw(TypedDict, total=False):
    """The random numbers of a call of `quantise`."""

    seed: int
    offset: int


@dataclass
class StepState:
    """The run's seed, the current iteration and micro-batch, and the amax histories of its slots."""

    seed: int
    iteration: int = 1
    #: Within this iteration, over all processes.
    micro_batch: int = 0
    updates_histories: bool = True
    #: Whether a weight is quantised once a step (`quantexp.quant.weight_cache.weights`), with micro-batch 0's numbers.
    weights_once: bool = False
    histories: dict[str, AmaxHistory] = field(default_factory=dict)
    #: Registered where ranks share operands; the numbers of an element follow from its position in the whole operand.
    pieces_of: PiecesOf | None = None
    #: Where operands lie.
    _device: torch.device = field(default=torch.device("cpu"), repr=False, compare=False)

    @property
    def offset(self) -> int:
        """The offset of all random numbers of this micro-batch."""
        return (self.iteration << 32) + self.micro_batch

    def begin(self, iteration: int, micro_batch: int) -> None:
        """Start a micro-batch; in a pipeline its backward pass, too."""
        self.iteration, self.micro_batch = iteration, micro_batch

    @contextlib.contextmanager
    def later(self, num_micro_batches: int) -> Iterator[None]:
        """Draw inside as the micro-batch whose number is higher (or lower) by so many."""
        before = self.micro_batch
        self.micro_batch += num_micro_batches
        try:
            yield
        finally:
            self.micro_batch = before

    def finish(self, keep: bool = True, merge: MergeAmaxes | None = None) -> None:
        """End the iteration: every history advances, or forgets the iteration if it is not kept.

        With several ranks, `merge` is called once, if the iteration is kept, and each history of this rank advances by
        the largest amax that any rank observed for its stream.
        """
        if keep and merge is not None:
            self._include(merge(self._running()))
        for history in self.histories.values():
            history.advance(keep)

    def _running(self) -> dict[str, float]:
        """The largest amax of this iteration by stream, exactly; the device is read once."""
        running = {
            stream: history.running
            for stream, history in self.histories.items()
            if history.running is not None
        }
        amaxes = torch.stack(list(running.values())).tolist() if running else []
        return dict(zip(running, amaxes, strict=True))

    def _include(self, amaxes: dict[str, float]) -> None:
        """Include the amaxes of all ranks in this rank's histories."""
        own = {stream: amaxes[stream] for stream in self.histories if stream in amaxes}
        values = torch.tensor(list(own.values()), dtype=torch.float32, device=self._device)
        for stream, amax in zip(own, values.unbind(), strict=True):
            self.histories[stream].include(amax)

    def amax(self, spec: QuantSpec) -> Tensor | None:
        """The amax that scales an operand under delayed scaling; None means its own amax."""
        history = self.histories.get(spec.stream)
        return None if history is None or history.window != spec.window else history.amax

    def amax_for(self, spec: QuantSpec, x: Tensor) -> Tensor:
        """The amax that scales x; x enters the history unless it is a forward copy."""
        history = self.history_for(spec, x.device)
        if self.updates_histories and not spec.reuse:
            history.observe(x)
        return history.amax_for(x)

    def history_for(self, spec: QuantSpec, device: torch.device) -> AmaxHistory:
        """The history of an operand, a new one if there is none or its window has changed."""
        self._device = device
        history = self.histories.get(spec.stream)
        if history is None or history.window != spec.window:
            assert spec.window is not None
            history = self.histories[spec.stream] = AmaxHistory(spec.window)
        return history

    def signs(self, spec: QuantSpec, device: torch.device) -> Tensor | None:
        """The signs of an operand's Hadamard transform; both operands of a product have the same."""
        if spec.hadamard is not Hadamard.RANDOM:
            return None
        product = spec.stream.rpartition(".")[0]
        return _signs(spec.hadamard_block, seed_of(self.seed, product), self.offset, device)

    def draw(self, spec: QuantSpec) -> Draw:
        """Seed and offset for `quantise`; empty unless its values depend on random numbers."""
        if not spec.draws:
            return {}
        offset = self.offset if self.draws_again(spec) else self.iteration << 32
        return {"seed": seed_of(self.seed, spec.stream), "offset": offset}

    def draws_again(self, spec: QuantSpec) -> bool:
        """Whether every micro-batch draws random numbers or signs of its own for an operand."""
        if not spec.draws and spec.hadamard is not Hadamard.RANDOM:
            return False
        return not (self.weights_once and spec.once_per_step)

    def pieces(self, spec: QuantSpec, shape: Sequence[int]) -> Sequence[Piece]:
        """The pieces of a part of this shape; none if it is the whole operand, or if nothing is drawn for it."""
        if self.pieces_of is None or spec.rounding is not Rounding.STOCHASTIC:
            return ()
        return self.pieces_of(spec.stream, tuple(shape))

    def record(self, spec: QuantSpec) -> dict[str, object]:
        """Options of an operand that depend on this state, for a capture: seed, offset, signs, amax."""
        if not spec.needs_step_state:
            return {}
        added: dict[str, object] = dict(self.draw(spec))
        signs = self.signs(spec, torch.device("cpu"))
        if signs is not None:
            added["signs"] = [int(sign) for sign in signs]
        if spec.scaling is Scaling.DELAYED:
            amax = self.amax(spec)
            added["amax"] = None if amax is None else float(amax)
        return added

    def state_dict(self) -> dict[str, Any]:
        """The histories as plain numbers, by stream."""
        return {stream: history.state_dict() for stream, history in self.histories.items()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Replace the histories by those of `state_dict`."""
        self.histories = {stream: AmaxHistory(saved["window"]) for stream, saved in state.items()}
        for stream, history in self.histories.items():
            history.load_state_dict(state[stream], device)


@lru_cache(maxsize=1 << 16)
def seed_of(seed: int, stream: str) -> int:
    """The seed of a stream, in [0, 2^64)."""
    digest = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


@lru_cache(maxsize=16)
def _signs(block: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """Both operands of a product take these, one soon after the other."""
    return random_signs(block, seed, offset, device)


_current: StepState | None = None


def current_state() -> StepState:
    """The active step state.

    Raises:
        RuntimeError: none is active.
    """
    if _current is None:
        raise RuntimeError(
            "random numbers and delayed scales need a step state; quantise inside use_step_state"
        )
    return _current


@contextlib.contextmanager
def use_step_state(state: StepState) -> Iterator[StepState]:
    """Quantise inside under this state, including backward passes on other threads."""
    global _current
    before = _current
    _current = state
    try:
        yield state
    finally:
        _current = before
