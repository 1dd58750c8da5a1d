"""Keeps the training state in number formats: each tensor is rounded after every step, as the next step reads it.

A step computes with what it read, and updates the weights with the moments before they are rounded, as a kernel would
that holds them in registers. Master weights are rounded before the model gets them. With feedback, the error of their
rounding is added to Adam's first moment (ECO, arXiv 2601.22101, algorithm 3), and the next step makes up for it:

    e = w - round(w)
    m = m + (1 - b1^t) / lr (1 - 1/b1) (sqrt(v / (1 - b2^t)) + eps) e

The numbers do not depend on the layout: the ranks of a distributed optimizer exchange the few blocks that the ends of
their ranges cut, and the amaxes of formats with one scale a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from quantexp.formats import finite_amax
from quantexp.model.pieces import Box
from quantexp.model.training_state import KEPT, MOMENTS
from quantexp.proof.draws import Moment
from quantexp.proof.master_weights import AdamStep
from quantexp.proof.outside_products import StateWatch
from quantexp.quant.outside_products import (
    LINEAR,
    MASTER,
    OPTIMIZER,
    PULL,
    RESET,
    SMOOTH,
    WEIGHTS,
    StateSlot,
)
from quantexp.schema import TrainingConfig
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.initial_weights import perturb_weights
from quantexp.training.megatron.muon import is_matrix
from quantexp.training.megatron.oscillation import follow, phase_of
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.pull import pulled, strength_of
from quantexp.training.megatron.rounded_pieces import RoundedPiece, draw_of
from quantexp.training.megatron.shared_blocks import amaxes_of, shared_elements, whole_block
from quantexp.training.megatron.smooth import curvature, smoothed
from quantexp.training.megatron.state_shards import held_pieces, publish_weights

(_CURVATURE,) = KEPT[SMOOTH]
#: Elements of a box whose error is added at once: 8 MB in float64.
_AT_ONCE = 1 << 20


class RoundedState:
    """The tensors of the training state that this rank holds of those that a scheme rounds."""

    def __init__(
        self,
        slots: Sequence[StateSlot],
        optimizer: Any,
        parts: Mapping[str, Part],
        training: TrainingConfig,
        is_new: bool,
    ) -> None:
        """`slots`: all that a scheme rounds; `is_new`: the run does not go on from a checkpoint of its own."""
        self._slots = slots
        self.weights = [slot for slot in slots if slot.product in WEIGHTS]
        of_state = [slot for slot in slots if slot.site == OPTIMIZER]
        self.moments = [slot for slot in of_state if slot.product not in WEIGHTS]
        #: Whether the master weights are weights alone, which no run has rounded.
        self._are_first = is_new and not training.start_optimizer
        self._training, self._optimizer, self._parts = training, optimizer, parts
        self._held = held_pieces(optimizer, parts)
        cuts = any(
            box.cut
            for slot in of_state
            for name, held in self._held.items()
            for box in RoundedPiece(name, held.piece, held.main, slot.spec).boxes()
        )
        for slot in self.weights:
            for name, held in self._held.items():
                if slot.product in KEPT and self._is_covered(name, slot):
                    held.kept[slot.product] = {}
        #: The parameters of all ranks.
        self._names = sorted({name for of_rank in gather(list(self._held)) for name in of_rank})
        #: Whether ranks must exchange anything, the same on all.
        self._exchanges_blocks = any(gather(cuts))

    def watch(self, iteration: int, is_complete: bool | None) -> StateWatch | None:
        """A watch of an iteration that is proved completely or not, or (None) not at all.

        In one that is not, it looks at one parameter, the same on all ranks, and at all that is reset.
        """
        slots, own = self._slots, self.weights + self.moments
        iterations = self._training.iterations
        if is_complete is None or not (slots if is_complete else own):
            return None
        if is_complete:
            return StateWatch(slots, iteration, iterations)
        name = Moment(self._training.seed, iteration).choice("state").choice(self._names)
        return StateWatch(own, iteration, iterations, name)

    def begin(self, models: Sequence[DistributedDataParallel], watch: StateWatch | None) -> None:
        """Before a step: round the master weights with which a run begins, of which the model then has the values."""
        stored = [slot for slot in self.weights if slot.product == MASTER]
        if not (self._are_first and stored):
            return
        self._are_first = False
        self._round_all(stored, 0, watch)
        publish_weights(self._optimizer, models)
        # What `chaos` moved may have been rounded away.
        perturb_weights(self._parts, self._training)

    @contextlib.contextmanager
    def around_step(self, iteration: int, watch: StateWatch | None) -> Iterator[None]:
        """Round the master weights that a step leaves; every rank enters this. `watch` judges what they then are."""
        seen = [] if watch is None else list(self._covered_weights(watch))
        before = {name: self._flat(name, slot).clone() for slot, name in seen}
        for slot in self.weights:
            if slot.product == SMOOTH:
                self._smooth(slot, iteration, watch)
        yield
        for slot, name in seen:
            held = self._held[name]
            if watch is not None and (step := held.adam_step) is not None:
                m, v = (held.moment(kind).view(-1) for kind in ("exp_avg", "exp_avg_sq"))
                watch.stepped(slot, name, (before[name], self._flat(name, slot)), (m, v), step)
        for slot in self.weights:
            if slot.product == MASTER:
                self._round_all([slot], iteration, watch)
            elif slot.product == RESET:
                self._reset(slot, iteration, watch)
            elif slot.product == PULL:
                self._pull(slot, iteration, watch)

    def after_step(self, iteration: int, watch: StateWatch | None) -> None:
        """Round the moments that a step has left; every rank calls this. `watch` judges what is then held."""
        self._round_all(self.moments, iteration, watch)
        if watch is not None:
            for slot, name in self._covered_weights(watch):
                piece = self._held[name].piece
                own = self._parts[name].tensor.detach().reshape(-1)[piece.start : piece.stop]
                watch.published(slot, name, own, self._flat(name, slot))

    @torch.no_grad()
    def _smooth(self, slot: StateSlot, iteration: int, watch: StateWatch | None) -> None:
        """Add to gradients those of the loss that stochastic rounding of the weights costs."""
        beta, strength = self._training.adam_beta2, dict(slot.options)["strength"]
        for piece in self._rounded_copies(slot, iteration, watch):
            held, slopes = self._held[piece.name], piece.flat
            assert held.main.grad is not None
            gradient, kept = held.main.grad.view(-1), held.kept[SMOOTH]
            own = watch if watch is not None and watch.covers(slot, piece.name) else None
            seen = (
                None if own is None else (gradient.clone(), {k: x.clone() for k, x in kept.items()})
            )
            last = kept.get(_CURVATURE)
            now = torch.empty_like(gradient) if last is None else last
            for first in range(0, len(gradient), _AT_ONCE):
                at = slice(first, first + _AT_ONCE)
                now[at] = curvature(gradient[at], None if last is None else last[at], beta)
                gradient[at] = smoothed(gradient[at], slopes[at], now[at], strength)
            kept[_CURVATURE] = now
            if own is not None and seen is not None:
                own.smoothed(slot, piece.name, (*seen, slopes), (gradient, kept), beta)

    @torch.no_grad()
    def _reset(self, slot: StateSlot, iteration: int, watch: StateWatch | None) -> None:
        """Observe weights that may oscillate, or reset those that do."""
        phase = phase_of(slot, iteration, self._training.iterations)
        if phase is None:
            return
        for piece in self._rounded_copies(slot, iteration, watch):
            w, tracked = self._flat(piece.name, slot), self._held[piece.name].kept[RESET]
            own = watch if watch is not None and watch.covers(slot, piece.name) else None
            before = {kind: x.clone() for kind, x in tracked.items()} if own is not None else {}
            w_before = w.clone() if own is not None else None
            follow(phase, w, piece.flat, tracked, dict(slot.options)["ratio"])
            if own is not None and w_before is not None:
                own.followed(slot, piece.name, (w_before, piece.flat, w), before, tracked)

    @torch.no_grad()
    def _pull(self, slot: StateSlot, iteration: int, watch: StateWatch | None) -> None:
        """Pull weights towards their values in a format."""
        strength = strength_of(slot, iteration, self._training.iterations)
        if not strength:
            return
        for piece in self._rounded_copies(slot, iteration, watch):
            w, rate = self._flat(piece.name, slot), float(self._held[piece.name].group["lr"])
            own = watch if watch is not None and watch.covers(slot, piece.name) else None
            before = w.clone() if own is not None else None
            for first in range(0, len(w), _AT_ONCE):
                at = slice(first, first + _AT_ONCE)
                w[at] = pulled(w[at], piece.flat[at], rate * strength)
            if own is not None and before is not None:
                own.pulled(slot, piece.name, (before, piece.flat, w), rate)

    def _rounded_copies(
        self, slot: StateSlot, iteration: int, watch: StateWatch | None
    ) -> list[RoundedPiece]:
        """What the format of a slot makes of the main weights, which stay."""
        pieces = [
            RoundedPiece(name, held.piece, self._flat(name, slot).clone(), slot.spec)
            for name, held in self._held.items()
            if self._is_covered(name, slot)
        ]
        self._round(slot, pieces, iteration, watch)
        return pieces

    @torch.no_grad()
    def _round_all(
        self, slots: Sequence[StateSlot], iteration: int, watch: StateWatch | None
    ) -> None:
        for slot in slots:
            pieces = [
                RoundedPiece(name, held.piece, self._flat(name, slot), slot.spec)
                for name, held in self._held.items()
                if self._is_covered(name, slot)
            ]
            self._round(slot, pieces, iteration, watch)

    def _covered_weights(self, watch: StateWatch) -> Iterator[tuple[StateSlot, str]]:
        for slot in self.weights:
            covered = (name for name in self._held if self._is_covered(name, slot))
            yield from ((slot, name) for name in covered if watch.covers(slot, name))

    def _is_covered(self, name: str, slot: StateSlot) -> bool:
        if slot.product in WEIGHTS:
            return slot.module != LINEAR or is_matrix(self._parts[name].parameter)
        held = self._held[name]
        return bool(held.steps) and slot.operand in held.kinds

    def _flat(self, name: str, slot: StateSlot) -> Tensor:
        """What the optimizer reads of a slot, as a vector of the same memory."""
        held = self._held[name]
        tensor = held.main.detach() if slot.product in WEIGHTS else held.moment(slot.operand)
        return tensor.view(-1)

    def _round(
        self,
        slot: StateSlot,
        pieces: list[RoundedPiece],
        iteration: int,
        watch_of_all: StateWatch | None,
    ) -> None:
        seed = self._training.seed
        amaxes = amaxes_of(slot.spec, pieces)
        shared = shared_elements(pieces) if self._exchanges_blocks else {}
        for piece in pieces:
            amax, watch = amaxes.get(piece.name), watch_of_all
            if watch is not None and not watch.covers(slot, piece.name):
                watch = None
            if watch is not None and amax is not None:
                watch.scale(slot, piece.name, finite_amax(piece.flat), amax)
            stream = f"{piece.name} {slot}"
            draw = draw_of(slot.spec, seed, stream, iteration)
            seen_draw = Moment(seed, iteration).draw(slot.spec, stream)
            for box in piece.boxes():
                whole, column = piece.values(box), box.column
                if box.cut is not None:
                    whole, column = whole_block(shared, piece, box), box.cut[0]
                is_step = slot.product == MASTER and iteration > 0
                is_kept = watch is not None or (is_step and slot.feedback)
                before = whole.clone() if is_kept else None
                if slot.product == SMOOTH:
                    piece.take_slopes(whole, amax)
                else:
                    piece.round(whole, box.row, column, amax, draw)
                columns = slice(box.column - column, box.column - column + box.columns)
                own = whole[:, columns]
                if box.cut is not None:
                    piece.values(box).copy_(own)
                if watch is not None and before is not None:
                    own.copy_(self._read(piece, slot, box))
                    place = piece.place(box.row, column)
                    watch.see(slot, piece.name, whole, before, amax, place, seen_draw)
                if before is not None and is_step:
                    self._feed_back(slot, piece, box, before[:, columns].reshape(-1), watch)

    def _feed_back(
        self,
        slot: StateSlot,
        piece: RoundedPiece,
        box: Box,
        before: Tensor,
        watch: StateWatch | None,
    ) -> None:
        """Add what a box of master weights lost in rounding to Adam's first moment, if the scheme does."""
        held = self._held[piece.name]
        step = held.adam_step
        if step is None:
            return
        for first in range(0, len(before), _AT_ONCE):
            part = before[first : first + _AT_ONCE]
            at = slice(box.first + first, box.first + first + len(part))
            w = self._flat(piece.name, slot)[at]
            m, v = (held.moment(kind).view(-1)[at] for kind in MOMENTS)
            m_before = None if watch is None else m.clone()
            if slot.feedback:
                m.copy_(with_error(m, v, part.double() - w, step))
            if watch is not None and m_before is not None:
                m_after = held.moment(MOMENTS[0]).view(-1)[at]
                watch.fed_back(slot, piece.name, part.double() - w, (m_before, m_after, v), step)

    def _read(self, piece: RoundedPiece, slot: StateSlot, box: Box) -> Tensor:
        """What the optimizer's state holds in a box, as the next step reads it; the copy of observed weights."""
        is_copy = slot.product in (SMOOTH, PULL, RESET)
        flat = piece.flat if is_copy else self._flat(piece.name, slot)
        return flat[box.first : box.stop].view(box.rows, box.columns)


def with_error(m: Tensor, v: Tensor, error: Tensor, step: AdamStep) -> Tensor:
    """The first moment after the error of a weight's rounding is added, float64; the moment itself at a rate of 0."""
    if not step.lr:
        return m
    factor = (1 - step.beta1**step.steps) / step.lr * (1 - 1 / step.beta1)
    root = (v.double() / (1 - step.beta2**step.steps)).sqrt_().add_(step.eps)
    return root.mul_(error).mul_(factor).add_(m)
