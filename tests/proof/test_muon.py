"""The step of a matrix that Muon moves, against torch's Muon."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantexp.proof.muon import wrong_direction

BETA, LR, DECAY = 0.95, 3e-3, 0.1


def _steps(
    number: int, shape: tuple[int, int], rank: int, lr: float = LR
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Steps of torch's Muon with AdamW's root mean square: weights before and after, gradient, momentum."""
    generator = torch.Generator().manual_seed(5)
    w = torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
    muon = torch.optim.Muon(
        [w], lr=lr, weight_decay=DECAY, momentum=BETA, adjust_lr_fn="match_rms_adamw"
    )
    found = []
    for _ in range(number):
        left = torch.randn(shape[0], rank, generator=generator)
        w.grad = left @ torch.randn(rank, shape[1], generator=generator)
        w.grad += 1e-3 * torch.randn(shape, generator=generator)
        before = w.detach().clone()
        muon.step()
        momentum = muon.state[w]["momentum_buffer"].clone()
        found.append((before, w.detach().clone(), w.grad.clone(), momentum))
    return found


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (200, 8)])
@pytest.mark.parametrize("rank", [1, 4, 200])
def test_steps_of_torchs_muon_are_right(shape: tuple[int, int], rank: int) -> None:
    for step in _steps(3, shape, rank):
        assert wrong_direction(*step, BETA, (LR, DECAY), [range(shape[0])]) == ""


@pytest.mark.parametrize("lr", [1e-5, 1e-6, 1e-7, 1e-8, 1e-10])
def test_steps_at_small_rates_are_right_though_weights_are_rounded(lr: float) -> None:
    for step in _steps(3, (384, 1024), 16, lr):
        assert wrong_direction(*step, BETA, (lr, DECAY), [range(384)]) == ""


@pytest.mark.parametrize(
    ("lr", "decay", "beta"), [(LR * 1.02, DECAY, BETA), (LR, 0.0, BETA), (LR, DECAY, 0.8)]
)
def test_other_numbers_are_named(lr: float, decay: float, beta: float) -> None:
    step = _steps(3, (64, 96), 8)[-1]
    assert "as Muon does" in wrong_direction(*step, beta, (lr, decay), [range(64)])


def test_a_matrix_that_is_orthogonalised_with_others_is_named() -> None:
    step = _steps(1, (64, 96), 64)[0]
    assert "as Muon does" in wrong_direction(*step, BETA, (LR, DECAY), [range(32), range(32, 64)])


def test_what_does_not_move_is_right_without_a_rate_or_a_gradient() -> None:
    w, zero = torch.randn(8, 8), torch.zeros(8, 8)
    assert wrong_direction(w, w, w, w, BETA, (0.0, DECAY), [range(8)]) == ""
    assert wrong_direction(w, w, zero, zero, BETA, (LR, 0.0), [range(8)]) == ""
