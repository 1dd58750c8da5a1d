"""The proof's own steps of Adam, against torch's in each of its implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantexp.proof.master_weights import AdamStep, num_not_stepped

SIZE = 20_000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    ("lr", "betas", "eps", "decay"),
    [
        (1e-3, (0.9, 0.95), 1e-8, 0.1),
        (3e-2, (0.0, 0.999), 1e-15, 0.0),
        (1.0, (0.99, 0.5), 1e-4, 0.5),
        (1e-7, (0.5, 0.9999), 1e-8, 10.0),
    ],
)
def test_torchs_steps_are_within_the_bound_and_a_larger_change_is_not(
    how: dict[str, Any],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    seed: int,
) -> None:
    """Weights and gradients over 20 binades; 1 part in 2^19 of the larger one of weight and change is found."""
    generator = torch.Generator().manual_seed(seed)

    def wild() -> torch.Tensor:
        exponents = torch.randint(-16, 4, (SIZE,), generator=generator)
        return torch.randn(SIZE, generator=generator) * torch.exp2(exponents)

    w = torch.nn.Parameter(wild())
    adam = torch.optim.AdamW([w], lr=lr, betas=betas, eps=eps, weight_decay=decay, **how)
    for t in (1, 2, 3):
        w.grad, before = wild() / 1000, w.detach().clone()
        adam.step()
        state, step = adam.state[w], AdamStep(lr, *betas, eps, decay, t)
        moments = state["exp_avg"], state["exp_avg_sq"]
        after = w.detach()
        assert num_not_stepped(before, after, *moments, step) == 0
        size = torch.maximum(before.abs(), (after - before).abs())
        assert num_not_stepped(before, after + size * 2**-19, *moments, step) > 0.99 * SIZE
