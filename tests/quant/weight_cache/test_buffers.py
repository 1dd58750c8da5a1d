"""Memory that is lent and written again, never while somebody may still read it."""

from __future__ import annotations

import torch

from quantexp.quant.weight_cache.buffers import Buffers


def test_a_steps_buffers_serve_the_next_step() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    buffers.begin_step()
    one, two = buffers.until_the_step_ends(w), buffers.until_the_step_ends(w)
    assert one is not None
    assert two is not None
    assert one.data_ptr() != two.data_ptr()
    buffers.end_step()
    buffers.begin_step()
    again = {id(buffers.until_the_step_ends(w)) for _ in range(2)}
    assert again == {id(one), id(two)}
    assert id(buffers.until_the_step_ends(w)) not in again
    assert id(buffers.until_the_step_ends(w.bfloat16())) not in again


def test_what_somebody_holds_on_to_is_not_written_again() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    buffers.begin_step()
    shown, other = buffers.until_the_step_ends(w), buffers.until_the_step_ends(w)
    assert shown is not None
    buffers.give_away(shown)
    buffers.end_step()
    buffers.begin_step()
    assert buffers.until_the_step_ends(w) is other
    assert buffers.until_the_step_ends(w) is not shown


def test_buffers_that_a_step_did_not_need_are_given_back() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    buffers.begin_step()
    one = buffers.until_the_step_ends(w)
    buffers.end_step()
    buffers.begin_step()
    buffers.end_step()
    buffers.begin_step()
    assert buffers.until_the_step_ends(w) is not one


def test_scratch_grows_to_the_largest_and_is_one_for_each_use() -> None:
    buffers = Buffers()
    buffers.begin_step()
    small, large = torch.zeros(2, 3), torch.zeros(4, 1, 6)
    first = buffers.until_the_next("g", large)
    second = buffers.until_the_next("g", small)
    other = buffers.until_the_next("x", small)
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.shape, second.shape) == (large.shape, small.shape)
    assert second.is_contiguous()
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()
    half = buffers.until_the_next("g", large.bfloat16())
    assert half is not None
    assert half.dtype == torch.bfloat16


def test_nothing_is_lent_outside_of_steps_or_for_another_layout() -> None:
    buffers, w = Buffers(), torch.zeros(4, 6)
    assert buffers.until_the_step_ends(w) is None
    assert buffers.until_the_next("w", w) is None
    buffers.begin_step()
    assert buffers.until_the_next("w", w.t()) is None
    assert buffers.until_the_step_ends(torch.zeros(2, device="meta")) is None
    buffers.end_step()
    assert buffers.until_the_next("w", w) is None
