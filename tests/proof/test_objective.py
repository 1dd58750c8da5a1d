"""Labels, and the part of each token in the loss, against autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantexp.proof.draws import Moment
from quantexp.proof.objective import NOT_KNOWN, Objective
from quantexp.proof.places import Ranks
from quantexp.training.megatron.passes import zigzag

B, T = 2, 16


def _gradient(mean: Objective, mask: Tensor, factor: float = 1.0) -> Tensor:
    """Of the losses, for a rank's part of the loss as `passes` and Megatron-Core's schedule make it."""
    losses = torch.rand(B, T, requires_grad=True)
    total = (losses * mask).sum() / (mask.sum() * mean.context) * mean.context
    (total / mean.num_micro_batches * mean.scale * factor).backward()
    assert losses.grad is not None
    return losses.grad


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize(("context", "num_micro_batches"), [(1, 1), (1, 3), (2, 3)])
def test_every_token_has_its_part_in_the_mean(
    context: int, num_micro_batches: int, scale: float
) -> None:
    mean = Objective(num_micro_batches, context, scale=scale)
    mask = torch.ones(B, T)
    assert mean.num_wrong(_gradient(mean, mask)) == 0
    assert mean.num_wrong(_gradient(mean, mask, 1.001)) == B * T
    mask[0, 3] = 0
    assert mean.num_wrong(_gradient(mean, mask)) > 0


def test_masked_tokens_have_no_part_and_all_others_the_same() -> None:
    mean, mask = Objective(2, is_masked=True), torch.ones(B, T)
    mask[1, 5:9] = 0
    own = _gradient(mean, mask)
    assert mean.num_wrong(own) == 0
    own[0, 0] *= 1.01
    assert mean.num_wrong(own) == 1
    assert mean.num_wrong(_gradient(mean, mask, 2.0)) == B * T - 4


def test_labels_are_the_next_tokens_also_of_two_chunks() -> None:
    ids = torch.randint(0, 1000, (B, 2 * T + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels = ids[:, :T], ids[:, 1 : T + 1]
    assert Objective(1).num_unlike(tokens, labels) == 0
    assert Objective(1).num_unlike(tokens, tokens) > B * T / 2
    own = [torch.cat([x[:, : T // 2], x[:, -T // 2 :]], 1) for x in (ids[:, :-1], ids[:, 1:])]
    assert Objective(1, context=2).num_unlike(*own) == 0
    assert Objective(1, context=2).num_unlike(own[0], own[1].roll(1, 1)) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_pass_has_the_samples_of_its_iteration_and_micro_batch(size: int) -> None:
    ids = torch.arange(64 * (size * T + 1)).view(64, -1)
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in ids]
    objective = Objective(3, size, global_batch_size=12, sample=samples)
    for rank in range(size):
        moment = Moment(1, 2, micro_batch=3, ranks=Ranks(context=(rank, size)))
        tokens, labels = (  # of sample 12 + 3 * 2 and the next one
            zigzag(torch.stack([samples[n][name] for n in (18, 19)]), rank, size)
            for name in ("tokens", "labels")
        )
        assert objective.compared(tokens, labels, None, moment, -1)[0] == 0
        assert objective.compared(tokens.flip(0), labels, None, moment, -1)[0] == B * T
        later = replace(moment, iteration=3), moment.later(1)
        assert {objective.compared(tokens, labels, None, each, -1)[0] for each in later} == {
            2 * B * T
        }


def test_a_mask_of_documents_that_is_lost_or_another_is_named() -> None:
    ids, mask = torch.arange(2 * T).view(2, T), torch.ones(2, 1, T, T, dtype=torch.bool).triu(1)
    mask[..., 5:, :5] = True
    samples = [
        {"tokens": row, "labels": row + 1, "attention_mask": of_row}
        for row, of_row in zip(ids, mask, strict=True)
    ]
    objective = Objective(1, global_batch_size=2, sample=samples)
    moment = Moment(1, 1)
    assert objective.compared(ids, ids + 1, mask, moment, -1)[0] == 0
    assert objective.compared(ids, ids + 1, None, moment, -1)[0] == 2 * T
    assert objective.compared(ids, ids + 1, mask.tril(1), moment, -1)[0] == 2 * T


def test_nothing_is_compared_of_losses_that_are_not_known() -> None:
    tokens = torch.zeros(B, T, dtype=torch.long)
    assert NOT_KNOWN.num_unlike(tokens, tokens + 1) == 0
    assert NOT_KNOWN.num_wrong(torch.rand(B, T)) == 0


def _seen(losses: Tensor, mask: Tensor, objective: Objective, passes: int) -> None:
    for _ in range(passes):
        own = losses.clone().requires_grad_()
        (own * mask).sum().backward()
        assert own.grad is not None
        objective.see(losses, own.grad)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("copies", [1, 2])
def test_written_loss_is_the_mean_over_all_ranks(context: int, copies: int) -> None:
    """Of two data-parallel ranks, each with as many context- and tensor-parallel ones."""
    losses = [torch.rand(B, T) + 1 for _ in range(2 * context)]
    seen = []
    for own in losses:
        objective = Objective(3, context)
        _seen(own, torch.ones(B, T), objective, 3)
        seen += [objective.taken()] * copies
    seen.append(Objective(3, context).taken())  # of an earlier stage
    mean = float(torch.stack(losses).double().mean())
    assert Objective(3, context).wrong_loss(mean, seen) == ""
    assert "was written for it" in Objective(3, context).wrong_loss(mean * 0.999, seen)


def test_tokens_that_do_not_count_are_not_in_the_mean() -> None:
    losses, mask = torch.rand(B, T) + 1, (torch.rand(B, T) > 0.5).float()
    objective = Objective(1, is_masked=True)
    _seen(losses, mask, objective, 1)
    mean = float((losses * mask).double().sum() / mask.sum())
    assert objective.wrong_loss(mean, [objective.taken()]) == ""


def test_micro_batch_that_was_left_out_is_named() -> None:
    objective = Objective(2)
    _seen(torch.ones(B, T), torch.ones(B, T), objective, 1)
    assert "has had 1 micro-batches, not 2" in objective.wrong_loss(1.0, [objective.taken()])


def test_evaluation_has_all_tokens_and_their_mean() -> None:
    losses = torch.rand(4, B, T)
    objective = Objective(1, num_held_out=losses.numel())
    every = torch.ones(B, T, dtype=torch.bool)
    for own in losses:
        objective.see_evaluated(own, every)
    seen = [objective.taken()]
    assert objective.wrong_loss(float(losses.mean()), seen) == ""
    assert "was written for it" in objective.wrong_loss(float(losses[0].mean()), seen)
    objective.see_evaluated(losses[0], every)
    words = "the evaluation has seen 32 tokens, not 128"
    assert objective.wrong_loss(float(losses[0].mean()), [objective.taken()]) == words


def test_evaluation_of_masked_tokens_is_the_mean_of_those_that_count() -> None:
    losses, counts = torch.rand(2, B, T), torch.rand(2, B, T) > 0.5
    objective = Objective(1, is_masked=True, num_held_out=losses.numel())
    for own, mask in zip(losses, counts, strict=True):
        objective.see_evaluated(own, mask)
    seen = [objective.taken()]
    assert objective.wrong_loss(float(losses[counts].mean()), seen) == ""
    assert "was written for it" in objective.wrong_loss(float(losses.mean()), seen)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_of_an_evaluation_has_the_samples_of_its_rank_and_their_masks(rank: int) -> None:
    ids, mask = torch.arange(8 * T).view(8, T), torch.rand(8, T) > 0.5
    samples = [
        {"tokens": row, "labels": row + 1, "loss_mask": of_row.float()}
        for row, of_row in zip(ids, mask, strict=True)
    ]
    objective = Objective(1, is_masked=True, held_out=samples, data=(rank, 2))
    at = slice((2 + rank) * B, (3 + rank) * B)  # of its second pass
    number, counts = objective.compared(ids[at], ids[at] + 1, None, Moment(1, 1), 1)
    assert number == 0
    assert counts is not None
    assert torch.equal(counts, mask[at])
    assert objective.compared(ids[at], ids[at] + 1, None, Moment(1, 1), 0)[0] == 2 * B * T


def test_a_balancing_loss_is_compared_if_all_passes_of_all_routers_were_seen() -> None:
    ranks = [Objective(2, data=(rank, 2), coefficient=0.01, num_routers=3) for rank in (0, 1)]
    for rank in ranks:
        for _ in range(6):
            rank.see_balance(1.5, 0.0)
    seen = [rank.taken() for rank in ranks]
    # The mean over four micro-batches of the sum over three routers.
    assert ranks[0].wrong_balance(0.01 * 4.5, seen) == ""
    words = "the balancing loss of the routers is 0.045, and 0.0451 was written for it"
    assert ranks[0].wrong_balance(0.0451, seen) == words
    assert ranks[0].wrong_balance(None, seen) != ""
    assert ranks[0].wrong_balance(0.0, [*seen, ranks[0].taken()]) == "", "a pass was not seen"
    ranks[0].see_balance(1.5, 1.0)
    assert ranks[0].wrong_balance(0.0, [ranks[0].taken()]) == ""


def test_a_choice_that_rounding_could_decide_may_change_a_balancing_loss() -> None:
    own = Objective(1, coefficient=0.01, num_routers=1)
    own.see_balance(1.0, 0.1)
    seen = [own.taken()]
    assert own.wrong_balance(0.0109, seen) == ""
    assert own.wrong_balance(0.0112, seen) != ""
