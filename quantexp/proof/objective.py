"""Whether a pass has the samples of its micro-batch, labels that follow, and each token its part in the loss.

    loss = scale / (micro-batches * tokens) * sum of losses        dloss_t = scale / (micro-batches * tokens)

Context-parallel ranks multiply by their number, as their gradients are averaged.

    # B sequences, T tokens of a rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from quantexp.model.layout import Layout
from quantexp.model.sizes import num_micro_batches_each
from quantexp.proof.draws import Moment
from quantexp.proof.places import from_both_ends
from quantexp.proof.products import unit
from quantexp.schema import AuxLoss, Experiment

#: The passes of an iteration and their total; the tokens of an evaluation, those that count and their total; the
#: passes of routers, their balancing loss, and by how much that may be off; and how many passes these have.
Seen: TypeAlias = tuple[int, float, int, int, float, int, float, float, int]


class Samples(Protocol):
    """Samples by their numbers."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Tokens, labels and loss_mask, [T of all ranks]."""


@dataclass
class Objective:
    """What the passes of a run's iterations learn, and what the losses of tokens are divided and multiplied by."""

    #: Of a rank in an iteration; 0 if labels and losses are taken as they are.
    num_micro_batches: int = 0
    #: The ranks that divide each sequence.
    context: int = 1
    #: Whether some tokens do not count.
    is_masked: bool = False
    #: The loss scale of the running iteration.
    scale: float = 1.0
    #: The samples of all ranks in an iteration.
    global_batch_size: int = 0
    #: The samples of training and of evaluations, in the order of the data; None: not compared.
    sample: Samples | None = None
    held_out: Samples | None = None
    #: Tokens of an evaluation; 0 if its loss is taken as it is.
    num_held_out: int = 0
    #: This rank among the data-parallel ones, and their number.
    data: tuple[int, int] = (0, 1)
    #: What the balancing loss is multiplied by; 0 without one.
    coefficient: float = 0.0
    #: The routers of this rank, and the passes whose balancing loss was seen, its sum, and by how much that may be off.
    num_routers: int = 0
    num_balanced: int = 0
    balance: float = 0.0
    slack_of_balance: float = 0.0
    #: The passes of the running iteration whose losses were seen, and the sum of this rank's parts of their means.
    num_seen: int = 0
    total: float = 0.0
    #: The tokens of the running evaluation whose losses were seen, those that count, and the sum of their losses.
    num_evaluated: int = 0
    num_counted: int = 0
    total_evaluated: float = 0.0

    @classmethod
    def of(
        cls, experiment: Experiment, rank: int, sample: Samples | None, held_out: Samples | None
    ) -> Objective:
        """That of a run's iterations and evaluations, on a rank."""
        training, layout = experiment.training, Layout.of(experiment)
        moe = experiment.model.moe
        return cls(
            num_micro_batches_each(experiment),
            experiment.parallel.context,
            experiment.dataset.mask_eod_loss,
            1.0,
            training.global_batch_size,
            sample,
            held_out,
            0 if held_out is None else experiment.evaluation.samples * training.seq_length,
            (layout.place(rank).data, layout.data),
            0.0 if moe is None or moe.aux_loss is AuxLoss.none else moe.aux_loss_coefficient,
        )

    def compared(
        self, tokens_BT: Tensor, labels_BT: Tensor, mask: Tensor | None, moment: Moment, index: int
    ) -> tuple[int, Tensor | None]:
        """How many tokens and labels of a pass are not those of the samples that are due, and which tokens count.

        The samples are read again, by the data set that the passes read, too. With another mask, [B, 1, T, T] of all
        ranks, True where a token does not attend, all tokens count as wrong; None is a causal one.

        Args:
            tokens_BT: a rank's.
            labels_BT: a rank's.
            mask: see above.
            moment: of a pass of training.
            index: of a pass of an evaluation, from 0 on each rank; negative in training.
        """
        B, T = tokens_BT.shape
        source = self.sample if index < 0 else self.held_out
        if source is None:
            return 0, None
        first = (moment.iteration - 1) * self.global_batch_size + moment.micro_batch * B
        if index >= 0:
            first = (index * self.data[1] + self.data[0]) * B
        number, counts_BT = 0, torch.ones(B, T, dtype=torch.bool)
        for row in range(B):
            sample = source[first + row]
            number += T * (not _are_equal(None if mask is None else mask[row], sample))
            for own, length, start in from_both_ends(T, moment.ranks.context):
                for name, x_BT in (("tokens", tokens_BT), ("labels", labels_BT)):
                    expected = sample[name][start : start + length]
                    number += int((x_BT[row, own : own + length].cpu() != expected).sum())
                if self.is_masked:
                    own_mask = sample["loss_mask"][start : start + length] != 0
                    counts_BT[row, own : own + length] = own_mask
        return number, counts_BT.to(tokens_BT.device)

    def num_wrong(self, g_BT: Tensor) -> int:
        """How many of all tokens have another part in the loss than any other token that counts.

        Which tokens do not count is taken as it is; where ranks divide the sequences of such, nothing is compared.
        """
        if not self.num_micro_batches or (self.is_masked and self.context > 1):
            return 0
        count = int(g_BT.count_nonzero()) if self.is_masked else g_BT.numel() * self.context
        part = self.scale * self.context / self.num_micro_batches / max(1, count)
        wrong = (g_BT.double() - part).abs() > 8 * unit(g_BT.dtype) * part
        return int((wrong & (g_BT != 0) if self.is_masked else wrong).sum())

    def see(self, losses_BT: Tensor, g_BT: Tensor) -> None:
        """Add the losses of a training pass, with their gradients."""
        if self.num_micro_batches and not (self.is_masked and self.context > 1):
            counts = g_BT != 0 if self.is_masked else torch.ones_like(g_BT, dtype=torch.bool)
            total = float(losses_BT.double()[counts].sum())
            self.num_seen += 1
            self.total += total / (max(1, int(counts.sum())) * self.context)

    def see_evaluated(self, losses_BT: Tensor, counts_BT: Tensor) -> None:
        """Add the losses of a pass of an evaluation, of the tokens that count."""
        self.num_evaluated += losses_BT.numel()
        self.num_counted += int(counts_BT.sum())
        self.total_evaluated += float(losses_BT.double()[counts_BT].sum())

    @property
    def scale_of_balance(self) -> float | None:
        """What the derivative of the balancing loss is multiplied by in a pass.

        None if it is not known: Megatron-Core's releases differ where ranks divide sequences.
        """
        if not self.num_micro_batches or self.context > 1:
            return None
        return self.scale / self.num_micro_batches

    def see_balance(self, value: float, slack: float) -> None:
        """Add the balancing loss of a pass of a router, without its coefficient."""
        self.num_balanced += 1
        self.balance += value
        self.slack_of_balance += slack

    def taken(self) -> Seen:
        """What was seen on this rank; nothing is, from now on."""
        of_evaluation = self.num_evaluated, self.num_counted, self.total_evaluated
        balanced = self.num_balanced, self.balance, self.slack_of_balance
        due = self.num_routers * self.num_micro_batches
        own = self.num_seen, self.total, *of_evaluation, *balanced, due
        self.num_seen = self.num_evaluated = self.num_counted = self.num_balanced = 0
        self.total = self.total_evaluated = self.balance = self.slack_of_balance = 0.0
        return own

    def wrong_balance(self, loss: float | None, seen: Sequence[Seen]) -> str:
        """What is wrong with an iteration's balancing loss, in words, if all passes of all routers were seen."""
        number, total, slack, due = (sum(each) for each in tuple(zip(*seen, strict=True))[5:])
        factor = self.coefficient / max(1, self.num_micro_batches * self.data[1])
        mean = factor * total
        if not due or number != due or not factor or not math.isfinite(mean):
            return ""
        # As with other losses; and a choice of experts that rounding could decide.
        if loss is not None and abs(loss - mean) <= 2.0**-16 * mean + factor * slack:
            return ""
        return f"the balancing loss of the routers is {mean:.6g}, and {loss} was written for it"

    def wrong_loss(self, loss: float, seen: Sequence[Seen]) -> str:
        """What is wrong with a loss that is written, in words.

        Args:
            loss: of an iteration, or of an evaluation after it.
            seen: what was `taken` on all ranks.
        """
        own = tuple(zip(*seen, strict=True))[:5]
        passes, total, tokens, counted, evaluated = (sum(each) for each in own)
        if tokens:
            if tokens % self.num_held_out:  # tensor-parallel ranks have seen the same ones
                return f"the evaluation has seen {tokens:,} tokens, not {self.num_held_out:,}"
            mean = evaluated / counted if counted else math.nan
        elif not passes:
            return ""
        elif other := {each[0] for each in seen} - {0, self.num_micro_batches}:
            return f"a rank has had {min(other)} micro-batches, not {self.num_micro_batches}"
        else:
            mean = total * self.context / passes
        # A float32 sum of positive numbers, by halves or in a kernel's order, and three means.
        if not math.isfinite(mean) or abs(loss - mean) <= 2.0**-16 * abs(mean):
            return ""
        return f"the loss of the tokens is {mean:.6g}, and {loss:.6g} was written for it"

    def num_unlike(self, tokens_BT: Tensor, labels_BT: Tensor) -> int:
        """How many labels are not the next token; that of the last one of a rank's chunk is not known."""
        if not self.num_micro_batches:
            return 0
        chunks = (x.chunk(2 if self.context > 1 else 1, dim=1) for x in (tokens_BT, labels_BT))
        return sum(
            int((tokens[:, 1:] != labels[:, :-1]).sum())
            for tokens, labels in zip(*chunks, strict=True)
        )


def _are_equal(mask: Tensor | None, sample: Mapping[str, Tensor]) -> bool:
    expected = sample.get("attention_mask")
    if mask is None or expected is None:
        return mask is expected
    return torch.equal(mask.cpu(), expected)


NOT_KNOWN = Objective()
