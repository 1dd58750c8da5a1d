"""The rates of a machine: measured once, kept, and measured again where the machine is another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantexp.launch import machine_rates as module
from quantexp.launch.machine_rates import (
    Rates,
    measured_rates,
    product_gflop_per_s,
    rate_in_words,
    rates_of,
)
from quantexp.quant.products import go_through_fp32
from quantexp.schema import Precision


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The rates of products that the next measurements find."""
    found, cached = [100.0, 50.0], module.copied_bytes_per_s
    monkeypatch.setattr(module, "product_gflop_per_s", lambda *_: found.pop(0))
    monkeypatch.setattr(module, "_COPY_ELEMENTS", 1 << 10)
    cached.cache_clear()
    yield found
    cached.cache_clear()


def gflop_per_s(folder: Path, precision: Precision = Precision.bf16) -> float:
    found = rates_of(precision, "cpu", folder)
    assert found is not None
    return found.gflop_per_s


def test_rates_are_measured_once(tmp_path: Path) -> None:
    assert gflop_per_s(tmp_path) == 100.0
    assert gflop_per_s(tmp_path) == 100.0
    assert gflop_per_s(tmp_path, Precision.fp32) == 50.0


def test_a_new_measurement_replaces_the_kept_one(tmp_path: Path) -> None:
    assert gflop_per_s(tmp_path) == 100.0
    assert measured_rates(Precision.bf16, "cpu", tmp_path) is not None
    assert gflop_per_s(tmp_path) == 50.0


@pytest.mark.parametrize(
    ("where", "other"),
    [
        ("platform.node", lambda: "another"),
        ("_processor", lambda: "model name: another"),
        ("allowed_cores", lambda: [*range(1000)]),
        ("versions", lambda: {"torch": "0.1"}),
    ],
)
def test_another_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, other: object
) -> None:
    assert gflop_per_s(tmp_path) == 100.0
    monkeypatch.setattr(f"quantexp.launch.machine_rates.{where}", other)
    assert gflop_per_s(tmp_path) == 50.0


@pytest.mark.parametrize(
    "content", ["", "{", '{"gflop_per_s": 0, "num_threads": 1, "copied_bytes_per_s": 1}']
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, content: str) -> None:
    assert gflop_per_s(tmp_path) == 100.0
    (file,) = (tmp_path / "rates").iterdir()
    file.write_text(content)
    assert gflop_per_s(tmp_path) == 50.0


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "rates").write_text("")
    assert [gflop_per_s(tmp_path), gflop_per_s(tmp_path)] == [100.0, 50.0]


def test_a_full_gpu_has_no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Rates:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "copied_bytes_per_s", full)
    assert rates_of(Precision.bf16, "NVIDIA H200", tmp_path) is None
    assert not (tmp_path / "rates").exists()


CPU = torch.device("cpu")


class Clock:
    """A clock that only matrix products advance, at `flop_per_s`."""

    def __init__(self, flop_per_s: float) -> None:
        self.flop_per_s, self.now_s = flop_per_s, 0.0
        self.sizes: list[int] = []
        #: How many of the first calls take longer, each by this many seconds, while there are several threads.
        self.interrupted, self.longer_s = 0, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        self.sizes.append(len(left))
        if self.interrupted and torch.get_num_threads() > 1:
            self.interrupted -= 1
            self.now_s += self.longer_s
        self.now_s += 2 * left.shape[0] * left.shape[1] * right.shape[1] / self.flop_per_s
        return left


class Threads:
    """Stands in for torch's number of threads."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> int:
        return self.number

    def set(self, number: int) -> None:
        self.number = number


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    product_gflop_per_s.cache_clear()
    yield
    product_gflop_per_s.cache_clear()


@pytest.mark.parametrize("flop_per_s", [1e8, 1e11, 1e13])
def test_rate_is_that_of_the_products_within_the_budget_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, flop_per_s: float
) -> None:
    clock = Clock(flop_per_s)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.multiply)
    rate = product_gflop_per_s(Precision.fp32, CPU)
    assert rate == pytest.approx(flop_per_s / 1e9)
    assert clock.now_s <= module.BUDGET_S
    assert clock.sizes[-1] <= 2048


@pytest.mark.parametrize("interrupted", [4, 10**9])
def test_interrupted_samples_leave_the_rate_as_it_is(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", threads := Threads(2))
    monkeypatch.setattr(torch, "set_num_threads", threads.set)
    clock = Clock(1e11)
    clock.interrupted, clock.longer_s = interrupted, 1.0
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.multiply)
    assert product_gflop_per_s(Precision.fp32, CPU) == pytest.approx(100.0)
    assert threads.number == 2, "restored"


@pytest.mark.parametrize("is_native", [True, False])
def test_products_are_measured_through_fp32_where_training_uses_it(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    through = set()

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        through.add(go_through_fp32(torch.bfloat16))
        return left.float() @ right.float()

    monkeypatch.setattr(module, "multiplies_natively", lambda _: is_native)
    monkeypatch.setattr(torch, "mm", multiply)
    product_gflop_per_s(Precision.bf16, CPU)
    assert through == {not is_native}


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0.004123, "0.00412"), (9.999, "10.0"), (95.24, "95.2"), (123.4, "123"), (98765.0, "98,800")],
)
def test_rate_has_three_significant_digits(rate: float, words: str) -> None:
    assert rate_in_words(rate) == f"{words} GFLOP/s"


def test_the_three_products_of_a_linear_layer_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = []

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        orders.append((left.is_contiguous(), right.is_contiguous()))
        return left @ right

    monkeypatch.setattr(torch, "mm", multiply)
    product_gflop_per_s(Precision.bf16, CPU)
    assert orders[:3] == [(True, False), (True, True), (False, True)]


def test_a_rate_is_measured_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = product_gflop_per_s(Precision.fp32, CPU)
    monkeypatch.setattr(torch, "mm", None)
    assert first > 0
    assert product_gflop_per_s(Precision.fp32, CPU) == first
