"""Exact arithmetic where torch flushes subnormal numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantexp.formats import encode, kernels, quantise
from quantexp.formats.kernels import exact, is_flushing, torch_alone

SMALLEST = 2.0**-126


@pytest.fixture
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


#: A process whose second thread of torch flushes; a pool that other tests have started cannot be made to.
FLUSHING_POOL = """
import torch
from quantexp.formats.kernels import cpu, exact_in_pool
torch.set_num_threads(2)
torch.set_flush_denormal(True)
torch.zeros(1 << 20).add_(1)
torch.set_flush_denormal(False)
x = torch.full((1 << 20,), 2.0**-126)
def num_flushed(x):
    return int((x.mul(0.5).view(torch.int32) == 0).sum())
assert num_flushed(x) > 0, "the second thread does not flush"
"""


def in_flushing_pool(program: str) -> None:
    command = [sys.executable, "-c", FLUSHING_POOL + program]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def num_flushed(x: Tensor) -> int:
    return int((x.mul(0.5).view(torch.int32) == 0).sum())


def test_a_thread_that_flushes_is_recognised(flushing: None) -> None:
    assert is_flushing()
    torch.set_flush_denormal(False)
    assert not is_flushing()


@pytest.mark.usefixtures("flushing")
def test_a_function_is_exact_and_the_mode_is_restored() -> None:
    x = torch.full((4,), SMALLEST)
    assert num_flushed(x) == 4
    assert exact(num_flushed)(x) == 0
    assert is_flushing()

    def fail() -> None:
        raise ValueError("after the change")

    with pytest.raises(ValueError, match="after the change"):
        exact(fail)()
    assert is_flushing()


def test_threads_of_torch_are_exact_and_their_mode_is_restored() -> None:
    in_flushing_pool("assert exact_in_pool(num_flushed)(x) == 0\nassert num_flushed(x) > 0")


def test_without_a_compiler_threads_that_flush_are_refused() -> None:
    in_flushing_pool(
        """
cpu.functions = lambda: None
try:
    exact_in_pool(num_flushed)(x)
except RuntimeError as error:
    assert "torch's threads flush" in str(error) and "torch.set_num_threads(1)" in str(error), error
else:
    raise AssertionError("not refused")
"""
    )


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("alone", [False, True])
def test_a_normal_number_does_not_become_zero(alone: bool) -> None:
    """2.06e-38 is normal, but its scale in MX is 2^-127 or close to it."""
    x = torch.full((32,), 2.0**-126 * 1.75)
    if alone:
        with torch_alone():
            y = quantise(x, "mxfp8")
    else:
        y = quantise(x, "mxfp8")
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))
    codes, _ = encode(x, "mxfp8")
    assert (codes != 0).all()


def test_a_forked_process_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(kernels, "_is_forked", True)
    quantise(torch.ones(32), "mxfp8")
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
