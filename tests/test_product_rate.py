"""The measured rate of matrix products: cheap on any machine, and of the products that training takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantexp import product_rate
from quantexp.product_rate import product_gflop_per_s

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass with the work of products alone, at a rate of so many FLOP/s."""

    def __init__(self, flop_per_s: float) -> None:
        self.flop_per_s, self.now_s = flop_per_s, 0.0
        self.sizes: list[int] = []

    def perf_counter(self) -> float:
        return self.now_s

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        self.sizes.append(len(left))
        self.now_s += 2 * left.shape[0] * left.shape[1] * right.shape[1] / self.flop_per_s
        return left


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    product_gflop_per_s.cache_clear()
    yield
    product_gflop_per_s.cache_clear()


@pytest.mark.parametrize("flop_per_s", [1e8, 1e11, 1e13])
def test_rate_is_that_of_the_products_and_the_budget_holds_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, flop_per_s: float
) -> None:
    clock = Clock(flop_per_s)
    monkeypatch.setattr(product_rate, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.multiply)
    rate = product_gflop_per_s(torch.float32, CPU)
    assert rate == pytest.approx(flop_per_s / 1e9)
    assert clock.now_s <= product_rate.BUDGET_S
    assert clock.sizes[-1] <= 2048


def test_measured_are_the_three_products_of_a_linear_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = []

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        orders.append((left.is_contiguous(), right.is_contiguous()))
        return left @ right

    monkeypatch.setattr(torch, "mm", multiply)
    product_gflop_per_s(torch.bfloat16, CPU)
    assert orders[:3] == [(True, False), (True, True), (False, True)]


def test_a_rate_is_measured_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = product_gflop_per_s(torch.float32, CPU)
    monkeypatch.setattr(torch, "mm", None)
    assert first > 0
    assert product_gflop_per_s(torch.float32, CPU) == first
