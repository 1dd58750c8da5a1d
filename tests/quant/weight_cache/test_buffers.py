"""Reused memory is never overwritten while it may still be read."""

from __future__ import annotations

import torch

from quantexp.quant.weight_cache.buffers import Buffers


def test_a_steps_buffers_serve_the_next_step() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    buffers.begin_step()
    one, two = buffers.for_step(w), buffers.for_step(w)
    assert one is not None
    assert two is not None
    assert one.data_ptr() != two.data_ptr()
    buffers.end_step()
    buffers.begin_step()
    again = {id(buffers.for_step(w)) for _ in range(2)}
    assert again == {id(one), id(two)}
    assert id(buffers.for_step(w)) not in again
    assert id(buffers.for_step(w.bfloat16())) not in again


def test_disowned_buffers_are_not_overwritten() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    buffers.begin_step()
    first, other = buffers.for_step(w), buffers.for_step(w)
    assert first is not None
    buffers.disown(first)
    buffers.end_step()
    buffers.begin_step()
    assert buffers.for_step(w) is other
    assert buffers.for_step(w) is not first


def test_buffers_that_a_step_did_not_need_are_released() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    buffers.begin_step()
    one = buffers.for_step(w)
    buffers.end_step()
    buffers.begin_step()
    buffers.end_step()
    buffers.begin_step()
    assert buffers.for_step(w) is not one


def test_scratch_grows_to_the_largest_and_is_one_for_each_use() -> None:
    buffers = Buffers()
    buffers.begin_step()
    small, large = torch.zeros(2, 3), torch.zeros(4, 1, 6)
    first = buffers.for_next_use("g", large)
    second = buffers.for_next_use("g", small)
    other = buffers.for_next_use("x", small)
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.shape, second.shape) == (large.shape, small.shape)
    assert second.is_contiguous()
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()
    half = buffers.for_next_use("g", large.bfloat16())
    assert half is not None
    assert half.dtype == torch.bfloat16


def test_nothing_is_lent_outside_of_steps_or_for_another_layout() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    assert buffers.for_step(w) is None
    assert buffers.for_next_use("w", w) is None
    buffers.begin_step()
    assert buffers.for_next_use("w", w.t()) is None
    assert buffers.for_step(torch.zeros(2, device="meta")) is None
    buffers.end_step()
    assert buffers.for_next_use("w", w) is None
