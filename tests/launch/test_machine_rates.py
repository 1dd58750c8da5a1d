"""The rates of a machine: measured once, kept, and measured again where the machine is another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantexp.launch import machine_rates as module
from quantexp.launch.machine_rates import Rates, measured_rates, rates_of
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
